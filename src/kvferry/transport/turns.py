"""Earlier turns of conversations: how an engine finds, by content, a peer that still has the blocks of one.

    the peer has finished a request and keeps its blocks ──▶ TurnIndex
    AskTurn(keys of a prompt's chunks)  ──▶  the turns that share most of them
                                        ◀──  Turns(of each tables, lease, the tokens after the last key)

A turn is found by the keys of its chunks (`keys.chunk`), which say all that decides what blocks hold: tokens,
what stands in place of tokens, adapter, tenant. Where it departs from the prompt inside a chunk, the tokens
themselves are compared. Nobody answers for the engine's thread, so an answer may be out of date when it
comes; the lease word says so to whoever reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile

from kvferry.transport.handshake import Address
from kvferry.transport.messages import MOST_TURNS, AskTurn, KeptTurn, Turns

ASK_SECONDS = 0.25
"""When peers that have not said what they keep are waited for no more."""

SILENT_SECONDS = 10.0
"""How long a peer that has not is left alone."""


@dataclass(frozen=True, slots=True)
class Content:
    """What blocks hold, from the first token on.

    Attributes:
        chunk_tokens: tokens of a chunk.
        keys: of all whole chunks.
        tokens: token ids, or what has been looked at of them.
        items: positions at which something stands in place of tokens, ascending.
    """

    chunk_tokens: int
    keys: tuple[bytes, ...]
    tokens: Sequence[int]
    items: tuple[int, ...] = ()

    def begins_with(self, other: Content) -> bool:
        """Whether this is the other, or goes on from it, for certain."""
        chunks = len(other.keys)
        rest, told = len(other.tokens) - chunks * other.chunk_tokens, other.after(chunks)
        return self.keys[:chunks] == other.keys and len(told) == rest and self.after(chunks)[:rest] == told

    def after(self, chunks: int) -> Sequence[int]:
        """Tokens that follow so many chunks, a chunk of them at most, up to what is not told by tokens."""
        first = chunks * self.chunk_tokens
        last = next((at for at in self.items if at >= first), len(self.tokens))
        return self.tokens[first : min(first + self.chunk_tokens, last)]


def shared_tokens(prompt: Content, kept: KeptTurn) -> int:
    """Tokens from the start that a prompt and a turn have in common.

    >>> prompt = Content(4, (b"a", b"b"), range(10))
    >>> shared_tokens(prompt, KeptTurn("P", "r", 0, 0, 1, 9, 0, 2, [8, 7], [[1, 2, 3]]))
    9
    """
    if kept.chunks > len(prompt.keys):
        return 0
    both = zip(prompt.after(kept.chunks), kept.after, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
    return min(kept.chunks * prompt.chunk_tokens + same, kept.tokens)


class TurnIndex:
    """Turns that are kept, by their chunks. One thread changes it, another looks."""

    def __init__(self) -> None:
        self._turns: dict[str, tuple[Content, KeptTurn]] = {}
        self._by_key: dict[tuple[int, bytes], dict[str, None]] = {}

    def __len__(self) -> int:
        """Turns that can be found."""
        return len(self._turns)

    def publish(self, content: Content, kept: KeptTurn) -> None:
        """From now on it is found."""
        self._turns[kept.lease] = content, kept
        for number, key in enumerate(content.keys):
            self._by_key.setdefault((number, key), {})[kept.lease] = None

    def withdraw(self, lease: str) -> None:
        """It is not found any more."""
        content, _ = self._turns.pop(lease, (None, None))
        for number, key in enumerate(content.keys if content is not None else ()):
            leases = self._by_key.get((number, key), {})
            leases.pop(lease, None)
            if not leases:
                self._by_key.pop((number, key), None)

    def find(self, question: AskTurn) -> Turns:
        """The turns that have most of these chunks, from the first on; of many, the last."""
        for last in range(len(question.keys) - 1, -1, -1):
            leases = list(self._by_key.get((last, question.keys[last]), ()))
            turns = [self._turns[lease] for lease in reversed(leases) if lease in self._turns]
            found = [
                kept.found(last + 1, list(content.after(last + 1)))
                for content, kept in turns[:MOST_TURNS]
                if content.chunk_tokens == question.chunk_tokens
            ]
            if found:
                return Turns(question.number, found)
        return Turns(question.number, [])


@dataclass(slots=True)
class _Question:
    """Attributes: who has not answered yet, how long they are waited for, and what others have said."""

    waiting: set[Address]
    until: float
    answers: list[tuple[Address, KeptTurn]] = field(default_factory=list)


class Questions:
    """What peers were asked, and have answered. The engine's thread asks, the channel's hears."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Nothing was asked yet; `clock` in seconds."""
        self._clock = clock
        self._open: dict[int, _Question] = {}
        self._silent: dict[Address, float] = {}
        self._numbers = count()

    def begin(self, addresses: Sequence[Address]) -> tuple[int, list[Address]]:
        """A question, and whom to ask: who was silent lately is not asked."""
        now, number = self._clock(), next(self._numbers)
        asked = [one for one in addresses if now - self._silent.get(one, -SILENT_SECONDS) >= SILENT_SECONDS]
        self._open[number] = _Question(set(asked), now + ASK_SECONDS)
        return number, asked

    def hear(self, address: Address, turns: Turns) -> None:
        """An answer; one that nobody waits for is dropped."""
        question = self._open.get(turns.number)
        if question is None or address not in question.waiting:
            return
        question.answers += [(address, kept) for kept in turns.kept]
        question.waiting.discard(address)

    def answers(self, number: int) -> list[tuple[Address, KeptTurn]] | None:
        """What peers keep; None while some of them may still say. Ends the question."""
        question, now = self._open[number], self._clock()
        if question.waiting and now < question.until:
            return None
        del self._open[number]
        self._silent.update(dict.fromkeys(question.waiting, now))
        return question.answers

    def drop(self, number: int) -> None:
        """Nobody wants to know any more."""
        self._open.pop(number, None)
