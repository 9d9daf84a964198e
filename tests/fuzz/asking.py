"""The ends of both channels that ask, and a liar that answers them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from fuzz.judge import seed
from fuzz.lies import Lies
from fuzz.odd import Odd
from fuzz.rigs import BLOCKS, HOST, STRIDE, Rig, redeem
from fuzz.seeds import CHUNK_TOKENS, CONTENT, GRANT, KEYS, TOKENS, gather_replies, replies
from kvferry.planning.cell_copy import PoolCopies
from kvferry.planning.strided_copy import StridedCopy
from kvferry.transport.control_client import ControlClient
from kvferry.transport.gather_client import GatherClient, GatherRoute
from kvferry.transport.handshake import Pending
from kvferry.transport.lease import LeaseWord
from kvferry.transport.messages import MAX_TURNS, PeerInfo
from kvferry.transport.redeem import Redeemed
from kvferry.transport.turns import TurnContent, shared_tokens
from support.waiting import wait_for
from transport.cards import ticket

_NOWHERE = (HOST, 1)
"""The address of a producer that nobody has met, so a ticket of it is not answered."""


def small(odd: Odd) -> list[list[bytes]]:
    """Return hundreds of odd messages that no limit of length holds off."""
    return [frames for frames in (odd.frames() for _ in range(300)) if sum(map(len, frames)) < 1 << 14]


def bytes_of(messages: list[list[bytes]]) -> int:
    """Return the bytes of messages."""
    return sum(len(frame) for frames in messages for frame in frames)


def again(odd: Odd, send: Callable[[list[bytes]], object]) -> Callable[[], tuple[int, int]]:
    """Return a function that sends the same odd messages each time that it is called."""
    said = small(odd)

    def repeat() -> tuple[int, int]:
        for frames in said:
            send(frames)
        return len(said), bytes_of(said)

    return repeat


class Consumer:
    """Asks a liar, and an honest producer beside it.

    Attributes:
        taken: how often which answer to a ticket was taken, and how often turns were found.
    """

    def __init__(self, rig: Rig, client: ControlClient, honest_port: int, heard: Callable[[], int]) -> None:
        """Args: heard: returns how many messages the client has heard."""
        self.taken = Counter[str]()
        self._client, self._honest_port, self._heard = client, honest_port, heard
        self._lies, self._prompt = Lies(seed()), TurnContent(CHUNK_TOKENS, KEYS, range(600))
        self._told = small(Odd(seed(), replies()))
        self._there = HOST, rig.hostile(self._lies)

    def ask(self) -> None:
        """Meet the liar anew, redeem a ticket there and look for a turn; redeem the honest one as well."""
        client, there = self._client, self._there
        client.forget(there)
        client.look_up(there, 1)
        asked = client.redeem(there, ticket("x"), TOKENS, CONTENT)
        # Of the next number, which the liar names now and then.
        unanswered = client.redeem(_NOWHERE, ticket("x"), TOKENS, CONTENT)
        question = client.ask_turn({there: 1}, self._prompt)
        wait_for(lambda: not isinstance(client.look_up(there, 1), Pending))
        answer = client.answer(asked, 0.05)
        self.taken[type(answer).__name__] += 1
        lie = client.answer(unanswered)
        assert not isinstance(lie, Redeemed), f"the liar answered for another peer: {lie}"
        client.end(unanswered)
        assert redeem(client, self._honest_port).grant == GRANT, "a lie was taken for another peer's answer"
        client.end(asked)
        if question is not None:
            self._look_at_turns(question)

    def repeat(self) -> tuple[int, int]:
        """Be told the same hundreds of messages; return how many were heard, and how many bytes."""
        while not isinstance(self._client.look_up(self._there, 1), PeerInfo):
            self.ask()
        told = self._lies.more = self._told
        heard = self._heard() + len(told)
        asked = self._client.redeem(self._there, ticket("x"), TOKENS, CONTENT)
        wait_for(lambda: self._heard() >= heard)
        self._lies.more = []
        self._client.end(asked)
        return len(told), bytes_of(told)

    def _look_at_turns(self, question: int) -> None:
        (found,) = wait_for(lambda: None if (a := self._client.turns(question)) is None else [a])
        assert {address for address, _ in found} <= {self._there}
        assert len(found) <= MAX_TURNS
        assert all(0 <= shared_tokens(self._prompt, kept) <= 600 for _, kept in found)
        self.taken["turns"] += bool(found)


class Reader:
    """Asks a liar to gather.

    Attributes:
        messages, bytes: that the liar has said.
    """

    def __init__(self, rig: Rig) -> None:
        self.messages = self.bytes = 0
        self._rig, self._odd = rig, Odd(seed(), gather_replies())
        self._told, self._repeats = small(Odd(seed(), gather_replies())), False
        self._port = rig.hostile(self._lie)
        self._context = rig.socket(self._port).context
        self._route = GatherRoute(STRIDE, BLOCKS, 64, (PoolCopies((0,), (StridedCopy(0, 0, 64),)),))
        self._reader: GatherClient | None = None
        self._asked: list[int] = []
        rig.stack.callback(self._close)

    def ask(self) -> None:
        """Ask for a chunk; by a new reader now and then, since one that is told too much is done."""
        if self._reader is None or len(self._asked) >= 20:
            self._close()
            self._reader = GatherClient(self._context, HOST, self._port, [self._route], self._rig.keys)
            self._asked.clear()
        reader, asked = self._reader, self._asked
        asked.append(reader.ask(0, LeaseWord(3, 9, 1), np.array([1, 2]), np.zeros(2, np.int64)))
        reader.socket.poll(500 if len(asked) == 1 else 10)
        for chunk in asked[-5:]:
            reader.answer(chunk)
        if len(asked) > 5:
            reader.done(asked[-6])
        assert len(reader._wanted) + len(reader._answers) < 20

    def repeat(self) -> tuple[int, int]:
        """Be told the same hundreds of messages; return how many there were, and how many bytes."""
        self._repeats, messages, size = True, self.messages, self.bytes
        while self.messages < messages + 500:
            self.ask()
        return self.messages - messages, self.bytes - size

    def _lie(self, _: bytes) -> list[list[bytes]]:
        said = self._told[:30] if self._repeats else [self._odd.frames() for _ in range(3)]
        self._told = self._told[len(said) :] + said if self._repeats else self._told
        self.messages += len(said)
        self.bytes += bytes_of(said)
        return said

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
