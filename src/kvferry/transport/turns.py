"""Earlier turns of conversations: find a peer that still has the KV of one that a prompt continues.

A turn is a finished request whose KV blocks its engine keeps for the next turn of the conversation.

    the peer has finished a request and keeps its blocks ──▶ TurnIndex
    AskTurn(keys of a prompt's chunks)  ──▶  looks up the turns that share most chunks
                                        ◀──  Turns(for each turn: a grant, the tokens after the shared chunks)

Turns are found by content, not by conversation. A chunk is a fixed number of tokens. Its key (`keys.chunk`)
digests everything on which its KV depends: tokens, multi-modal items, adapter, tenant. After the last shared
chunk the tokens themselves are compared.

The thread of the control channel replies without asking the engine's thread, so a reply may be out of date.
The reader detects that, because the lease's word has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, takewhile

from kvferry.transport.handshake import Address
from kvferry.transport.messages import MAX_TURNS, AskTurn, KeptTurn, Turns

ASK_SECONDS = 0.25
"""Timeout of a query in seconds."""

SILENT_SECONDS = 10.0
"""Seconds for which a peer that timed out is not asked. They double with every consecutive timeout."""

MAX_SILENT_SECONDS = 320.0
"""Maximum seconds for which a peer that timed out is not asked."""


@dataclass(frozen=True, slots=True)
class TurnContent:
    """The content of a prompt, or of the KV blocks that an engine keeps for the next turn of a conversation.

    Attributes:
        chunk_tokens: number of tokens in a chunk.
        keys: key (digest of the content) of each whole chunk, in order.
        tokens: ids of the tokens, in order, as far as they are known.
        items: token positions at which multi-modal items (such as images) start, ascending.
    """

    chunk_tokens: int
    keys: tuple[bytes, ...]
    tokens: Sequence[int]
    items: tuple[int, ...] = ()

    def begins_with(self, other: TurnContent) -> bool:
        """Return whether this content verifiably starts with all of another content.

        Whole chunks are compared by key. The tokens after the last whole chunk of `other` are compared by id.
        Ids do not identify multi-modal items (such as images), so the result is False if an item starts
        among these tokens.

        Args:
            other: content to look for at the start of this content.
        """
        chunks = len(other.keys)
        rest, rest_ids = len(other.tokens) - chunks * other.chunk_tokens, other.tokens_after(chunks)
        return (
            self.keys[:chunks] == other.keys
            and len(rest_ids) == rest
            and self.tokens_after(chunks)[:rest] == rest_ids
        )

    def tokens_after(self, chunks: int) -> Sequence[int]:
        """Return the token ids after the first `chunks` chunks, at most `chunk_tokens` of them.

        The ids end before the next multi-modal item (such as an image).
        """
        first = chunks * self.chunk_tokens
        last = next((at for at in self.items if at >= first), len(self.tokens))
        return self.tokens[first : min(first + self.chunk_tokens, last)]


def shared_tokens(prompt: TurnContent, kept: KeptTurn) -> int:
    """Return the number of tokens at the start of a prompt whose KV an earlier turn of a conversation holds.

    Args:
        prompt: content of the prompt.
        kept: description of the earlier turn, from an engine's reply to a query.

    >>> from kvferry.transport.redeem import Grant
    >>> prompt = TurnContent(4, (b"a", b"b"), range(10))
    >>> # 2 common chunks of 4 tokens. Then the prompt has tokens 8 and 9, the turn 8 and 7: 1 more in common.
    >>> shared_tokens(prompt, KeptTurn("P", 1, bytes(16), Grant.of(0, 0, [[1, 2, 3]]), 9, 0, 2, [8, 7]))
    9
    """
    if kept.chunks > len(prompt.keys):
        return 0
    both = zip(prompt.tokens_after(kept.chunks), kept.next_tokens, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
    return min(kept.chunks * prompt.chunk_tokens + same, kept.tokens)


class TurnIndex:
    """An index of the finished requests whose KV this engine keeps for the next turn of their conversation.

    The index finds such turns by their chunk keys (digests of the content). One thread may change the index
    while another looks up turns.
    """

    def __init__(self) -> None:
        self._turns: dict[bytes, tuple[TurnContent, KeptTurn, str]] = {}
        self._by_key: dict[tuple[int, bytes], dict[bytes, None]] = {}

    def __len__(self) -> int:
        """Return the number of turns in the index: finished requests whose KV this engine keeps."""
        return len(self._turns)

    def publish(self, content: TurnContent, kept: KeptTurn, lease: str) -> None:
        """Add a turn: a finished request whose KV this engine keeps for the next turn of its conversation.

        Args:
            content: content of the turn's KV blocks.
            kept: description of the turn for replies. `KeptTurn.found` sets the attributes that depend on the
                query.
            lease: name of the turn's lease in this engine.
        """
        self._turns[kept.ticket] = content, kept, lease
        for number, key in enumerate(content.keys):
            self._by_key.setdefault((number, key), {})[kept.ticket] = None

    def withdraw(self, ticket: bytes) -> None:
        """Remove a finished request whose KV this engine keeps. Do nothing if the index has no such request.

        Args:
            ticket: ticket (random id) that names the lease on the request's blocks.
        """
        content, _, _ = self._turns.pop(ticket, (None, None, None))
        for number, key in enumerate(content.keys if content is not None else ()):
            tickets = self._by_key.get((number, key), {})
            tickets.pop(ticket, None)
            if not tickets:
                self._by_key.pop((number, key), None)

    def leases(self, tickets: Iterable[bytes]) -> list[str]:
        """Return this engine's names of the leases to which these tickets (random ids) belong.

        Args:
            tickets: tickets of leases. Those that do not belong to a turn in the index are ignored.
        """
        known = [self._turns.get(ticket) for ticket in dict.fromkeys(tickets)]
        return [found[2] for found in known if found is not None]

    def find(self, question: AskTurn) -> Turns:
        """Find the turns that share the largest number of leading chunks with a prompt.

        A turn is a finished request whose KV this engine keeps for the next turn of the conversation.

        Args:
            question: query with the chunk keys (digests of the content) of the prompt.

        Returns:
            Reply with at most `MAX_TURNS` turns, latest turn first; without turns if none shares a chunk.
        """
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
    """A query that asks several peers for earlier turns of a conversation.

    Attributes:
        waiting: maps the address of each peer that has not replied yet to its incarnation (random number that
            identifies its run).
        began: time at which the query began, in seconds of the clock of `TurnQueries`.
        answers: (address of the peer, turn) for all turns in the replies so far.
    """

    waiting: dict[Address, int]
    began: float
    answers: list[tuple[Address, KeptTurn]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Silence:
    """A pause in which no queries are sent to a peer, because the peer did not reply to a query in time.

    Attributes:
        run: incarnation of the peer (random number that identifies its run).
        until: end of the pause, in seconds of the clock of `TurnQueries`.
        seconds: length of the pause. After the next timeout, the pause is twice as long, but at most
            `MAX_SILENT_SECONDS`.
    """

    run: int
    until: float
    seconds: float = SILENT_SECONDS


class TurnQueries:
    """The queries for earlier turns of conversations, and the replies of peers.

    The engine's thread begins and polls queries. The thread of the control channel adds replies.

    A peer that does not reply would delay every prompt by `ASK_SECONDS`. So after a timeout the peer is not
    asked during a pause, which gets longer with each further timeout. The pause ends early if the peer has a
    new incarnation (random number that identifies its run), or if one of its tickets (random ids of leases)
    arrives.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Create an empty collection of queries.

        Args:
            clock: function that returns the current time in seconds.
        """
        self._clock = clock
        self._open: dict[int, _TurnQuery] = {}
        self._silent: dict[Address, _Silence] = {}
        self._numbers = count()

    def begin(self, peers: Mapping[Address, int]) -> tuple[int, list[Address]]:
        """Begin a query for earlier turns of a conversation. The caller must send it to the returned peers.

        Args:
            peers: maps the address of each peer that may be asked to its incarnation (random number that
                identifies its run).

        Returns:
            (id of the query, addresses of the peers to ask). Peers that recently failed to reply in time are
            left out.
        """
        now, number = self._clock(), next(self._numbers)
        for gone in self._silent.keys() - peers.keys():
            self._silent.pop(gone, None)
        asked = {one: run for one, run in peers.items() if not self._is_paused(one, run, now)}
        self._open[number] = _TurnQuery(asked, now)
        return number, list(asked)

    def note_ticket(self, address: Address) -> None:
        """Allow queries to a peer again, because a ticket (random id of a lease) from the peer has arrived.

        The ticket shows that the peer is alive.
        """
        if (silence := self._silent.get(address)) is not None:
            self._silent[address] = replace(silence, until=self._clock())

    def handle_reply(self, address: Address, turns: Turns) -> None:
        """Add the turns (finished requests of a conversation) in a peer's reply to the query.

        If the query has ended, ignore the turns. The reply still shows that the peer is alive. So if the peer
        has a pause, replace it with the shortest one, which ends `SILENT_SECONDS` from now. During a pause,
        no queries are sent to the peer.

        Args:
            address: (host, port) of the peer.
            turns: reply of the peer, which contains the id of the query.
        """
        question = self._open.get(turns.number)
        if question is not None and address in question.waiting:
            question.answers += [(address, kept) for kept in turns.kept]
            question.waiting.pop(address, None)
            self._silent.pop(address, None)
        elif (silence := self._silent.get(address)) is not None:  # the peer is alive, but slow
            self._silent[address] = _Silence(silence.run, self._clock() + SILENT_SECONDS)

    def answers(self, number: int) -> list[tuple[Address, KeptTurn]] | None:
        """Return the earlier turns of a conversation that a query found, and end the query.

        The query takes at most `ASK_SECONDS`. Peers that have not replied by then are not asked for a while.

        Args:
            number: id of the query, from `begin`.

        Returns:
            (address of the peer, description of the turn) for each turn found; empty if none was found. None
            while peers may still reply; the query then goes on.
        """
        question, now = self._open[number], self._clock()
        if question.waiting and now < question.began + ASK_SECONDS:
            return None
        del self._open[number]
        for address, run in list(question.waiting.items()):
            self._silent[address] = self._next_pause(address, run, question.began, now)
        return question.answers

    def drop(self, number: int) -> None:
        """Forget a query for earlier turns of a conversation. Later replies to the query are ignored.

        Args:
            number: id of the query, from `begin`.
        """
        self._open.pop(number, None)

    def _is_paused(self, address: Address, run: int, now: float) -> bool:
        silence = self._silent.get(address)
        return silence is not None and silence.run == run and now < silence.until

    def _next_pause(self, address: Address, run: int, asked: float, now: float) -> _Silence:
        """Return the pause during which a peer is not asked, because it has not replied to a query in time.

        The first pause takes `SILENT_SECONDS`. Each further pause takes twice as long as the one before, at
        most `MAX_SILENT_SECONDS`. If a concurrent query has already started a pause since this query
        began, return that pause, so that the same silence does not count twice.

        Args:
            address: (host, port) of the peer.
            run: incarnation of the peer (random number that identifies its run).
            asked: time at which the query began, in seconds.
            now: current time, in seconds of the same clock.
        """
        before = self._silent.get(address)
        if before is None or before.run != run:
            return _Silence(run, now + SILENT_SECONDS)
        if before.until > asked:  # the pause began after this query, because of a concurrent one
            return before
        seconds = min(2 * before.seconds, MAX_SILENT_SECONDS)
        return _Silence(run, now + seconds, seconds)
