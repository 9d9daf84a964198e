"""Earlier turns of conversations: find a peer that still has the KV of one that a prompt continues.

A turn is a finished request whose blocks its engine keeps for the next turn of the conversation.

    the peer has finished a request and keeps its blocks ──▶ TurnIndex
    AskTurn(keys of a prompt's chunks)  ──▶  looks up the turns that share most chunks
                                        ◀──  Turns(for each turn: a grant, the tokens after the shared chunks)

Turns are found by content, not by conversation: by chunk keys, and after the last shared chunk by the tokens
themselves. The thread of the control channel replies without asking the engine's thread, so a reply may be
out of date. The reader detects that, because the lease's word has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, takewhile

from msgspec import structs

from kvferry.transport.handshake import Address
from kvferry.transport.messages import MAX_TURNS, AskTurn, KeptTurn, Turns

ASK_SECONDS = 0.25  # timeout of a query in seconds

# Seconds for which a peer that timed out is not asked. They double with every consecutive timeout.
SILENT_SECONDS = 10.0

MAX_SILENT_SECONDS = 320.0  # maximum seconds for which a peer that timed out is not asked


@dataclass(frozen=True, slots=True)
class TurnContent:
    """The content of a prompt, or of the blocks of a turn.

    Attributes:
        keys: key of each whole chunk, in order.
        tokens: ids of the tokens, in order, as far as they are known.
        items: token positions at which multi-modal items start, ascending.
    """

    chunk_tokens: int
    keys: tuple[bytes, ...]
    tokens: Sequence[int]
    items: tuple[int, ...] = ()

    def begins_with(self, other: TurnContent) -> bool:
        """Return whether this content verifiably starts with all of another content."""
        chunks = len(other.keys)
        # Ids do not identify multi-modal items, so an item among the last tokens makes the lengths differ.
        rest, rest_ids = len(other.tokens) - chunks * other.chunk_tokens, other.tokens_after(chunks)
        return (
            self.keys[:chunks] == other.keys
            and len(rest_ids) == rest
            and self.tokens_after(chunks)[:rest] == rest_ids
        )

    def tokens_after(self, chunks: int) -> Sequence[int]:
        """Return the ids after the first `chunks` chunks: at most `chunk_tokens`, up to the next item."""
        first = chunks * self.chunk_tokens
        last = next((at for at in self.items if at >= first), len(self.tokens))
        return self.tokens[first : min(first + self.chunk_tokens, last)]


def shared_tokens(prompt: TurnContent, kept: KeptTurn) -> int:
    """Return the number of tokens at the start of a prompt whose KV a turn holds.

    >>> from kvferry.transport.lease import LeaseWord
    >>> from kvferry.transport.redeem import Grant
    >>> prompt, grant = TurnContent(4, (b"a", b"b"), range(10)), Grant.of(LeaseWord(0, 0, 1), 9, [[1, 2, 3]])
    >>> # 2 common chunks of 4 tokens. Then the prompt has tokens 8 and 9, the turn 8 and 7: 1 more in common.
    >>> shared_tokens(prompt, KeptTurn("P", bytes(16), grant, 0, 2, [8, 7]))
    9
    """
    if kept.chunks > len(prompt.keys):
        return 0
    both = zip(prompt.tokens_after(kept.chunks), kept.next_tokens, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
    return min(kept.chunks * prompt.chunk_tokens + same, kept.grant.tokens)


class TurnIndex:
    """An index of the turns that this engine keeps. One thread may change it while another looks up turns."""

    def __init__(self) -> None:
        self._turns: dict[bytes, tuple[TurnContent, KeptTurn, str]] = {}
        self._by_key: dict[tuple[int, bytes], dict[bytes, None]] = {}

    def __len__(self) -> int:
        return len(self._turns)

    def publish(self, content: TurnContent, kept: KeptTurn, lease: str) -> None:
        """Add a turn of a lease, named as in this engine. `find` sets the fields that depend on the query."""
        self._turns[kept.ticket] = content, kept, lease
        for number, key in enumerate(content.keys):
            self._by_key.setdefault((number, key), {})[kept.ticket] = None

    def withdraw(self, ticket: bytes) -> None:
        if (turn := self._turns.pop(ticket, None)) is None:
            return
        for number, key in enumerate(turn[0].keys):
            tickets = self._by_key.get((number, key), {})
            tickets.pop(ticket, None)
            if not tickets:
                self._by_key.pop((number, key), None)

    def leases(self, tickets: Iterable[bytes]) -> list[str]:
        """Return this engine's names of the leases of these tickets, as far as the index has them."""
        known = [self._turns.get(ticket) for ticket in dict.fromkeys(tickets)]
        return [found[2] for found in known if found is not None]

    def find(self, question: AskTurn) -> Turns:
        """Find the turns that share the most leading chunks with a prompt, the latest turn first."""
        for last in range(len(question.keys) - 1, -1, -1):
            # The other thread may withdraw a turn at any moment, so both lookups may fail.
            tickets = list(self._by_key.get((last, question.keys[last]), ()))
            turns = [turn for ticket in reversed(tickets) if (turn := self._turns.get(ticket)) is not None]
            found = [
                structs.replace(kept, chunks=last + 1, next_tokens=list(content.tokens_after(last + 1)))
                for content, kept, _ in turns[:MAX_TURNS]
                if content.chunk_tokens == question.chunk_tokens
            ]
            if found:
                return Turns(question.number, found)
        return Turns(question.number, [])


@dataclass(slots=True)
class _TurnQuery:
    """A query to several peers. `waiting` has the incarnation of each peer that has not replied yet."""

    waiting: dict[Address, int]
    began: float
    answers: list[tuple[Address, KeptTurn]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Silence:
    """A pause in which a run of a peer is not asked, because it did not reply in time."""

    run: int
    until: float
    seconds: float = SILENT_SECONDS


class TurnQueries:
    """The queries for earlier turns, and the replies of peers.

    The engine's thread begins and polls queries. The thread of the control channel adds replies.

    A peer that does not reply would delay every prompt by `ASK_SECONDS`. So after a timeout the peer is not
    asked during a pause, which gets longer with each further timeout. The pause ends early if the peer has a
    new incarnation, or if one of its tickets arrives.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open: dict[int, _TurnQuery] = {}
        self._silent: dict[Address, _Silence] = {}
        self._numbers = count()

    def begin(self, peers: Mapping[Address, int]) -> tuple[int, list[Address]]:
        """Begin a query of peers (address to incarnation); return its id, and those to ask."""
        now, number = self._clock(), next(self._numbers)
        for gone in self._silent.keys() - peers.keys():
            self._silent.pop(gone, None)
        asked = {
            one: run
            for one, run in peers.items()
            if (pause := self._silent.get(one)) is None or pause.run != run or now >= pause.until
        }
        self._open[number] = _TurnQuery(asked, now)
        return number, list(asked)

    def note_ticket(self, address: Address) -> None:
        """End the pause of a peer, because a ticket from it has arrived, which shows that it is alive."""
        if (silence := self._silent.get(address)) is not None:
            self._silent[address] = replace(silence, until=self._clock())

    def handle_reply(self, address: Address, turns: Turns) -> None:
        """Add a peer's reply. A late reply makes the pause of the peer the shortest one, from now on."""
        question = self._open.get(turns.number)
        if question is not None and address in question.waiting:
            question.answers += [(address, kept) for kept in turns.kept]
            question.waiting.pop(address, None)
            self._silent.pop(address, None)
        elif (silence := self._silent.get(address)) is not None:  # the peer is alive, but slow
            self._silent[address] = _Silence(silence.run, self._clock() + SILENT_SECONDS)

    def answers(self, number: int) -> list[tuple[Address, KeptTurn]] | None:
        """Return the turns that a query found and end it; None while peers may still reply."""
        question, now = self._open[number], self._clock()
        if question.waiting and now < question.began + ASK_SECONDS:
            return None
        del self._open[number]
        for address, run in list(question.waiting.items()):
            self._silent[address] = self._next_pause(address, run, question.began, now)
        return question.answers

    def drop(self, number: int) -> None:
        self._open.pop(number, None)

    def _next_pause(self, address: Address, run: int, asked: float, now: float) -> _Silence:
        before = self._silent.get(address)
        if before is None or before.run != run:
            return _Silence(run, now + SILENT_SECONDS)
        if before.until > asked:  # the pause began after this query, because of a concurrent one
            return before
        seconds = min(2 * before.seconds, MAX_SILENT_SECONDS)
        return _Silence(run, now + seconds, seconds)
