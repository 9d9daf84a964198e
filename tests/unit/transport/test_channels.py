"""Messages of both channels: what is sent arrives, and whatever else arrives is a ProtocolError."""

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvferry.common.errors import ProtocolError
from kvferry.planning.cell_copy import PoolCopies
from kvferry.planning.strided_copy import Loop, StridedCopy
from kvferry.transport import gather_client as gather, messages as control, redeem
from kvferry.transport.lease import LeaseWord
from support.examples import examples
from transport.cards import cards, facts

QUICK = examples(100)
PROTOCOL = control.PROTOCOL
COPY = StridedCopy(4096, 64, 8, (Loop(3, 100, 16), Loop(2, 8, 8)))
GRANT = redeem.Grant.of(LeaseWord(1, 2, 9), 4, [[5, 6], [7]])
BLOCKS = np.array([1, 2, 3], np.int32).tobytes()


class Sample(NamedTuple):
    """A message, and the module that decodes it."""

    channel: ModuleType
    message: Any

    def __str__(self) -> str:
        return type(self.message).__name__


REQUESTS = [
    Sample(control, control.Hello(PROTOCOL, facts())),
    Sample(control, control.Claim(9, [bytes(16), b"b" * 16])),
    Sample(control, control.Claim(9, [bytes(16)], released=True)),
    Sample(control, redeem.Redeem(7, 9, bytes(16), 40, redeem.PromptContent("t", "i", "ü", "s"))),
    Sample(control, control.AskTurn(7, 16, [bytes(32)])),
    Sample(
        gather,
        gather.AnnounceRoutes(
            PROTOCOL, [gather.GatherRoute(4096, 9, 128, (PoolCopies((0, 8), (COPY,)),) * 2)]
        ),
    ),
    Sample(gather, gather.Gather(7, 1, 3, 2**32 - 1, BLOCKS, BLOCKS)),
    Sample(gather, gather.Done(9)),
]
REPLIES = [
    Sample(control, control.Refused(["one", "two"])),
    Sample(control, control.PeerInfo(facts(), cards(2), bytes(32))),
    Sample(control, redeem.Redeemed(7, GRANT, 3)),
    Sample(control, redeem.Unchanged(7)),
    Sample(control, redeem.NotRedeemed(7, "other tokens")),
    Sample(control, control.Turns(7, [control.KeptTurn("D", bytes(16), GRANT, 1, 2, [5])])),
    Sample(gather, gather.Gathered(7, 12, 70, 5)),
    Sample(gather, gather.NotGathered(7, "too late")),
    Sample(gather, gather.NotGathered(7, "who are you", unknown=True)),
]
EVERY_REQUEST, EVERY_REPLY = (
    pytest.mark.parametrize(("channel", "message"), samples, ids=map(str, samples))
    for samples in (REQUESTS, REPLIES)
)
EVERY_CHANNEL = pytest.mark.parametrize("channel", [control, gather], ids=["control", "gather"])


def is_a_message_or_a_protocol_error(channel: ModuleType, data: bytes) -> None:
    for decode in (channel.decode_request, channel.decode_reply):
        try:
            decode(data)
        except ProtocolError:
            continue


@EVERY_REQUEST
def test_a_request_arrives_as_it_was_sent(channel, message):
    assert channel.decode_request(channel.encode(message)) == message


@EVERY_REPLY
def test_a_reply_arrives_as_it_was_sent(channel, message):
    assert channel.decode_reply(channel.encode(message)) == message


@EVERY_REQUEST
def test_a_request_cut_short_anywhere_is_refused(channel, message):
    data = channel.encode(message)
    for length in range(len(data)):
        with pytest.raises(ProtocolError):
            channel.decode_request(data[:length])


@EVERY_REPLY
def test_a_reply_cut_short_anywhere_is_refused(channel, message):
    data = channel.encode(message)
    for length in range(len(data)):
        with pytest.raises(ProtocolError):
            channel.decode_reply(data[:length])


@EVERY_REQUEST
def test_a_request_is_not_taken_for_a_reply(channel, message):
    with pytest.raises(ProtocolError):
        channel.decode_reply(channel.encode(message))


@EVERY_REPLY
def test_a_reply_is_not_taken_for_a_request(channel, message):
    with pytest.raises(ProtocolError):
        channel.decode_request(channel.encode(message))


@EVERY_CHANNEL
@QUICK
@given(data=st.binary(max_size=200))
def test_random_bytes_are_a_message_or_a_protocol_error(channel, data):
    is_a_message_or_a_protocol_error(channel, data)


@EVERY_CHANNEL
@QUICK
@given(data=st.data())
def test_a_message_with_a_few_bytes_changed_is_a_message_or_a_protocol_error(channel, data):
    message = data.draw(st.sampled_from([s.message for s in REQUESTS + REPLIES if s.channel is channel]))
    spoiled = bytearray(channel.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        spoiled[data.draw(st.integers(0, len(spoiled) - 1))] = data.draw(st.integers(0, 255))
    is_a_message_or_a_protocol_error(channel, bytes(spoiled))
