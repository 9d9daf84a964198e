"""Earlier turns of conversations: find, by content, a peer that still has the blocks of one.

    the peer has finished a request and keeps its blocks ──▶ TurnIndex
    AskTurn(keys of a prompt's chunks)  ──▶  the turns that share most of them
                                        ◀──  Turns(of each a grant, the tokens after the last key)

A turn is found by the keys of its chunks (`keys.chunk`), which digest everything that decides what blocks
hold: tokens, multi-modal items, adapter, tenant. If the turn and the prompt differ inside a chunk, their
tokens are compared. The channel's thread replies without asking the engine's thread, so a reply may be out of
date. The reader detects that from the lease word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, takewhile

from kvferry.transport.handshake import Address
from kvferry.transport.messages import MAX_TURNS, AskTurn, KeptTurn, Turns

ASK_SECONDS = 0.25
"""Timeout of a query."""

SILENT_SECONDS = 10.0
"""Pause before a peer that timed out is asked again; it doubles with every consecutive timeout."""

MAX_SILENT_SECONDS = 320.0
"""Longest pause."""


@dataclass(frozen=True, slots=True)
class TurnContent:
    """The content of blocks, from the first token on.

    Attributes:
        chunk_tokens: tokens of a chunk.
        keys: keys of all whole chunks.
        tokens: token ids, or the prefix of them that is known.
        items: positions of multi-modal items, ascending.
    """

    chunk_tokens: int
    keys: tuple[bytes, ...]
    tokens: Sequence[int]
    items: tuple[int, ...] = ()

    def begins_with(self, other: TurnContent) -> bool:
        """Return whether this content certainly starts with all of `other`."""
        chunks = len(other.keys)
        rest, told = len(other.tokens) - chunks * other.chunk_tokens, other.tokens_after(chunks)
        return (
            self.keys[:chunks] == other.keys
            and len(told) == rest
            and self.tokens_after(chunks)[:rest] == told
        )

    def tokens_after(self, chunks: int) -> Sequence[int]:
        """Return at most one chunk of tokens after `chunks` chunks, up to the next item."""
        first = chunks * self.chunk_tokens
        last = next((at for at in self.items if at >= first), len(self.tokens))
        return self.tokens[first : min(first + self.chunk_tokens, last)]


def shared_tokens(prompt: TurnContent, kept: KeptTurn) -> int:
    """Return how many tokens a prompt and a turn share from the start.

    >>> from kvferry.transport.redeem import Grant
    >>> prompt = TurnContent(4, (b"a", b"b"), range(10))
    >>> shared_tokens(prompt, KeptTurn("P", 1, bytes(16), Grant.of(0, 0, [[1, 2, 3]]), 9, 0, 2, [8, 7]))
    9
    """
    if kept.chunks > len(prompt.keys):
        return 0
    both = zip(prompt.tokens_after(kept.chunks), kept.after, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
    return min(kept.chunks * prompt.chunk_tokens + same, kept.tokens)


class TurnIndex:
    """Index of kept turns by chunk key. One thread changes it while another looks turns up."""

    def __init__(self) -> None:
        self._turns: dict[bytes, tuple[TurnContent, KeptTurn, str]] = {}
        self._by_key: dict[tuple[int, bytes], dict[bytes, None]] = {}

    def __len__(self) -> int:
        """Return the number of turns that can be found."""
        return len(self._turns)

    def publish(self, content: TurnContent, kept: KeptTurn, lease: str) -> None:
        """Add a turn; `lease` is the name of its lease in this engine."""
        self._turns[kept.ticket] = content, kept, lease
        for number, key in enumerate(content.keys):
            self._by_key.setdefault((number, key), {})[kept.ticket] = None

    def withdraw(self, ticket: bytes) -> None:
        """Remove a turn."""
        content, _, _ = self._turns.pop(ticket, (None, None, None))
        for number, key in enumerate(content.keys if content is not None else ()):
            tickets = self._by_key.get((number, key), {})
            tickets.pop(ticket, None)
            if not tickets:
                self._by_key.pop((number, key), None)

    def leases(self, tickets: Iterable[bytes]) -> list[str]:
        """Return the leases of those tickets that belong to turns."""
        known = [self._turns.get(ticket) for ticket in dict.fromkeys(tickets)]
        return [found[2] for found in known if found is not None]

    def find(self, question: AskTurn) -> Turns:
        """Find the turns that share the most chunks from the first on; of many, the latest."""
        for last in range(len(question.keys) - 1, -1, -1):
            tickets = list(self._by_key.get((last, question.keys[last]), ()))
            turns = [turn for ticket in reversed(tickets) if (turn := self._turns.get(ticket)) is not None]
            found = [
                kept.found(last + 1, list(content.tokens_after(last + 1)))
                for content, kept, _ in turns[:MAX_TURNS]
                if content.chunk_tokens == question.chunk_tokens
            ]
            if found:
                return Turns(question.number, found)
        return Turns(question.number, [])


@dataclass(slots=True)
class _TurnQuery:
    """A query to several peers.

    Attributes:
        waiting: peers that have not replied yet, with the incarnations that were asked.
        began: time of the query, seconds of the clock.
        answers: the replies of the others.
    """

    waiting: dict[Address, int]
    began: float
    answers: list[tuple[Address, KeptTurn]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Silence:
    """The pause of a peer that did not reply in time.

    Attributes:
        run: incarnation of the peer.
        until: end of the pause, seconds of the clock.
        seconds: length of the pause.
    """

    run: int
    until: float
    seconds: float = SILENT_SECONDS


class TurnQueries:
    """Queries for turns and their replies. The engine's thread asks; the channel's thread adds replies.

    A silent peer delays every prompt by `ASK_SECONDS`, so it is not asked for a while, and longer after every
    timeout. A new incarnation of the peer, or a ticket that names it, ends the pause.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Create it without queries; `clock` is in seconds."""
        self._clock = clock
        self._open: dict[int, _TurnQuery] = {}
        self._silent: dict[Address, _Silence] = {}
        self._numbers = count()

    def begin(self, peers: Mapping[Address, int]) -> tuple[int, list[Address]]:
        """Open a query; return its number and the peers to ask, without those that are in a pause."""
        now, number = self._clock(), next(self._numbers)
        for gone in self._silent.keys() - peers.keys():
            self._silent.pop(gone, None)
        asked = {one: run for one, run in peers.items() if not self._is_left_alone(one, run, now)}
        self._open[number] = _TurnQuery(asked, now)
        return number, list(asked)

    def note_ticket(self, address: Address) -> None:
        """End a peer's pause, because one of its tickets has arrived."""
        if (silence := self._silent.get(address)) is not None:
            self._silent[address] = replace(silence, until=self._clock())

    def handle_reply(self, address: Address, turns: Turns) -> None:
        """Add a reply; drop it if no query waits for it."""
        question = self._open.get(turns.number)
        if question is not None and address in question.waiting:
            question.answers += [(address, kept) for kept in turns.kept]
            question.waiting.pop(address, None)
            self._silent.pop(address, None)
        elif (silence := self._silent.get(address)) is not None:  # it is there, and slow
            self._silent[address] = _Silence(silence.run, self._clock() + SILENT_SECONDS)

    def answers(self, number: int) -> list[tuple[Address, KeptTurn]] | None:
        """Return all replies and end the query; None while a peer may still reply in time."""
        question, now = self._open[number], self._clock()
        if question.waiting and now < question.began + ASK_SECONDS:
            return None
        del self._open[number]
        for address, run in list(question.waiting.items()):
            self._silent[address] = self._silence(address, run, question.began, now)
        return question.answers

    def drop(self, number: int) -> None:
        """Drop a query."""
        self._open.pop(number, None)

    def _is_left_alone(self, address: Address, run: int, now: float) -> bool:
        silence = self._silent.get(address)
        return silence is not None and silence.run == run and now < silence.until

    def _silence(self, address: Address, run: int, asked: float, now: float) -> _Silence:
        """Return the pause of a peer that has not replied, twice as long as its last one."""
        before = self._silent.get(address)
        if before is None or before.run != run:
            return _Silence(run, now + SILENT_SECONDS)
        if before.until > asked:  # another question that was open at the same time
            return before
        seconds = min(2 * before.seconds, MAX_SILENT_SECONDS)
        return _Silence(run, now + seconds, seconds)
