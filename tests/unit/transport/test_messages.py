"""Messages of the control channel: a value that makes no sense is a ProtocolError, in words."""

import copy
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from kvferry.common.errors import ProtocolError
from kvferry.transport.messages import (
    MAX_TICKETS,
    Claim,
    PeerInfo,
    compare_facts,
    decode_reply,
    decode_request,
    encode,
)
from kvferry.transport.redeem import MAX_BLOCKS, MAX_GROUPS, Grant, PromptContent, Redeem, Redeemed
from support.examples import examples
from transport.cards import cards, facts

QUICK = examples(100)

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.sampled_from([0, -1, 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]),
    st.floats(),
    st.text(max_size=4),
    st.binary(max_size=4),
    st.lists(st.integers(0, 3), max_size=3),
    st.dictionaries(st.text(max_size=2), st.integers(0, 3), max_size=2),
)


def paths(value: Any, here: tuple[Any, ...] = ()):
    """Where in a nested value there is something."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, element in inside:
        yield (*here, key)
        yield from paths(element, (*here, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with another value at `path`."""
    whole = copy.deepcopy(value)
    inside = whole
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = new
    return whole


RANKS = msgspec.to_builtins(PeerInfo(facts(), cards()), builtin_types=(bytes,))
PATHS = list(paths(RANKS))


@QUICK
@given(st.data())
def test_ranks_with_any_value_replaced_by_any_other_are_sound_or_a_protocol_error(data):
    path = data.draw(st.sampled_from(PATHS))
    spoiled = replaced(RANKS, path, data.draw(JUNK))
    try:
        answer = decode_reply(msgspec.msgpack.encode(spoiled))
    except ProtocolError:
        return
    if isinstance(answer, PeerInfo):
        for card in answer.ranks:
            card.geometry.check()
            assert 0 < card.incarnation < 1 << 32, "the high half of a word"
            assert 0 < card.words <= 1 << 20, "a list of that many is prepared"
            assert 0 <= card.words_address < 1 << 63


def test_a_rank_whose_pages_lie_outside_its_regions_is_refused():
    spoiled = msgspec.to_builtins(PeerInfo(facts(), cards()), builtin_types=(bytes,))
    spoiled["ranks"][0]["geometry"]["regions"][0]["length"] -= 1
    with pytest.raises(ProtocolError, match="outside the registered regions"):
        decode_reply(msgspec.msgpack.encode(spoiled))


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("ranks", 0, "words"), 0, "words"),
        (("ranks", 0, "words"), 2**40, "words"),
        (("ranks", 0, "words_address"), -8, "words_address"),
        (("ranks", 0, "incarnation"), 2**32, "incarnation"),
        (("ranks", 0, "incarnation"), -1, "incarnation"),
        (("ranks", 0, "geometry", "num_blocks"), -3, "pool of -3"),
        (("ranks", 0, "geometry", "num_blocks"), 2**40, "outside"),
        (("ranks", 0, "geometry", "tp_rank"), 5, r"\(pp, tp\) is \(0, 5\); expected below"),
        (
            ("ranks", 0, "geometry", "groups", 0, "block_tokens"),
            -16,
            "blocks of -16 tokens; expected 1 or more",
        ),
        (("ranks", 0, "geometry", "groups", 0, "kind"), "telepathy", "telepathy"),
        (("ranks", 0, "geometry", "groups", 0, "layers", 0, "block_stride"), -1, "overlap"),
        (("ranks", 0, "geometry", "groups", 0, "layers", 0, "name"), "layers.1", "described more than once"),
    ],
)
def test_a_number_that_makes_no_sense_is_refused_in_words(path, value, says):
    spoiled = replaced(msgspec.to_builtins(PeerInfo(facts(), cards()), builtin_types=(bytes,)), path, value)
    with pytest.raises(ProtocolError, match=says):
        decode_reply(msgspec.msgpack.encode(spoiled))


def test_a_block_of_more_tokens_than_memory_could_plan_is_refused():
    spoiled = msgspec.to_builtins(PeerInfo(facts(), cards()), builtin_types=(bytes,))
    geometry = spoiled["ranks"][0]["geometry"]
    tokens, geometry["num_blocks"], geometry["regions"][0]["length"] = 1 << 36, 1, 1 << 62
    for group in geometry["groups"]:
        group["block_tokens"] = tokens
        for layer in group["layers"]:
            layer["page"] |= {"block_tokens": tokens, "page_bytes": 1 << 60}
            for field in layer["page"]["fields"]:
                for axis in field["axes"]:
                    if axis["name"] == "token":
                        axis["loops"], axis["total"] = [[tokens, axis["loops"][-1][1]]], tokens
    with pytest.raises(ProtocolError, match="68719476736 elements, at most 1048576"):
        decode_reply(msgspec.msgpack.encode(spoiled))


@pytest.mark.parametrize("released", [False, True])
def test_messages_about_leases_are_bounded(released):
    assert decode_request(encode(Claim(9, [bytes(16)] * MAX_TICKETS, released)))
    for tickets in ([bytes(16)] * (MAX_TICKETS + 1), [bytes(15)], [bytes(17)], ["x" * 16], [None]):
        with pytest.raises(ProtocolError):
            decode_request(encode(Claim(9, tickets, released)))


REDEEM = Redeem(7, 9, bytes(16), 40, PromptContent("t" * 32, "i" * 32, "a" * 4096, "s" * 32))


def test_a_redemption_is_bounded_in_every_part():
    assert decode_request(encode(REDEEM)) == REDEEM
    for change in (
        {"ticket": bytes(17)}, {"ticket": bytes(15)}, {"ticket": "x" * 16}, {"number": -1}, {"number": 2**63},
        {"consumer": 2**32}, {"consumer": -1}, {"tokens": 0}, {"tokens": -1}, {"tokens": 2**31},
        {"content": PromptContent("t" * 33)}, {"content": PromptContent("t", "i" * 33)},
        {"content": PromptContent("t", adapter="a" * 4097)}, {"content": PromptContent("t", salt="s" * 33)},
        {"content": None},
    ):  # fmt: skip
        with pytest.raises(ProtocolError):
            decode_request(encode(msgspec.structs.replace(REDEEM, **change)))


GOOD = {"incarnation": 1, "slot": 0, "generation": 0, "tokens": 4}


@pytest.mark.parametrize(
    "grant",
    [
        Grant(1, -1, 0, 4, []), Grant(1, 2**31, 0, 4, []), Grant(1, 0, -1, 4, []), Grant(1, 0, 2**32, 4, []),
        Grant(-1, 0, 0, 4, []), Grant(2**32, 0, 0, 4, []), Grant(1, 0, 0, 0, []), Grant(1, 0, 0, 2**31, []),
        Grant(1, 0, 0, 4, [[1] * 4]), Grant(1, 0, 0, 4, ["1234"]),
        Grant(1, 0, 0, 4, [b""] * (MAX_GROUPS + 1)),
        {**GOOD, "tables": [b"123"]}, {**GOOD, "tables": None},
        {**GOOD, "tables": [bytes(2 * MAX_BLOCKS), bytes(2 * MAX_BLOCKS + 4)]},
    ],
)  # fmt: skip
def test_a_grant_out_of_bounds_is_none(grant):
    with pytest.raises(ProtocolError):
        decode_reply(encode(Redeemed(7, grant)))


def test_a_count_that_the_bytes_do_not_hold_is_refused():
    # An array that says it has 2**32 - 1 elements and ends there.
    with pytest.raises(ProtocolError):
        decode_request(b"\x82\xa4type\xa9heartbeat\xa6leases\xdd\xff\xff\xff\xff")


def test_every_fact_on_which_both_speak_is_compared():
    theirs = {"weights": "a", "dtype": "bf16", "only there": "1"}
    ours = {"weights": "b", "dtype": "f32", "only here": "2"}
    assert compare_facts(theirs, ours) == ["weights: a there, b here", "dtype: bf16 there, f32 here"]
    assert compare_facts(ours, ours) == []
