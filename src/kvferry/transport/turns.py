"""Earlier turns of conversations: how an engine finds, by content, a peer that still has the blocks of one.

    the peer has finished a request and keeps its blocks ──▶ TurnIndex
    AskTurn(keys of a prompt's chunks)  ──▶  the turns that share most of them
                                        ◀──  Turns(of each a grant, the tokens after the last key)

A turn is found by the keys of its chunks (`keys.chunk`), which say all that decides what blocks hold: tokens,
what stands in place of tokens, adapter, tenant. Where it departs from the prompt inside a chunk, the tokens
themselves are compared. Nobody answers for the engine's thread, so an answer may be out of date when it
comes; the lease word says so to whoever reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, takewhile

from kvferry.transport.handshake import Address
from kvferry.transport.messages import MAX_TURNS, AskTurn, KeptTurn, Turns

ASK_SECONDS = 0.25
"""When peers that have not said what they keep are waited for no more."""

SILENT_SECONDS = 10.0
"""How long a peer that has not is left alone; twice as long each time that it has not again."""

MAX_SILENT_SECONDS = 320.0
"""How long at most."""


@dataclass(frozen=True, slots=True)
class TurnContent:
    """The content of blocks, from the first token on.

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
    """Index of kept turns by chunk key. One thread changes it, another looks turns up."""

    def __init__(self) -> None:
        self._turns: dict[bytes, tuple[TurnContent, KeptTurn, str]] = {}
        self._by_key: dict[tuple[int, bytes], dict[bytes, None]] = {}

    def __len__(self) -> int:
        """Turns that can be found."""
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
        """Find the turns that share most chunks from the first on; of many, the latest."""
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
    """A question to several peers.

    Attributes:
        waiting: who has not answered yet, and which run of it was asked.
        began: when.
        answers: what others have said.
    """

    waiting: dict[Address, int]
    began: float
    answers: list[tuple[Address, KeptTurn]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Silence:
    """The pause of a peer that did not answer in time.

    Attributes:
        run: which run of it.
        until: when it is asked again.
        seconds: how long it is left alone.
    """

    run: int
    until: float
    seconds: float = SILENT_SECONDS


class TurnQueries:
    """Questions for turns, and their answers. The engine's thread asks; the channel's thread takes answers.

    Who is silent costs every prompt `ASK_SECONDS`, so it is left alone, and longer each time. One that has
    gone for good is hardly asked any more; another run of it, or one that is named by a ticket, is at once.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Nothing was asked yet; `clock` in seconds."""
        self._clock = clock
        self._open: dict[int, _TurnQuery] = {}
        self._silent: dict[Address, _Silence] = {}
        self._numbers = count()

    def begin(self, peers: Mapping[Address, int]) -> tuple[int, list[Address]]:
        """Open a question; return its number and the peers to ask, without those that were silent lately."""
        now, number = self._clock(), next(self._numbers)
        for gone in self._silent.keys() - peers.keys():
            self._silent.pop(gone, None)
        asked = {one: run for one, run in peers.items() if not self._is_left_alone(one, run, now)}
        self._open[number] = _TurnQuery(asked, now)
        return number, list(asked)

    def note_ticket(self, address: Address) -> None:
        """Ask a peer again, because a ticket of it has arrived."""
        if (silence := self._silent.get(address)) is not None:
            self._silent[address] = replace(silence, until=self._clock())

    def handle_reply(self, address: Address, turns: Turns) -> None:
        """Take an answer; drop it if nothing waits for it."""
        question = self._open.get(turns.number)
        if question is not None and address in question.waiting:
            question.answers += [(address, kept) for kept in turns.kept]
            question.waiting.pop(address, None)
            self._silent.pop(address, None)
        elif (silence := self._silent.get(address)) is not None:  # it is there, and slow
            self._silent[address] = _Silence(silence.run, self._clock() + SILENT_SECONDS)

    def answers(self, number: int) -> list[tuple[Address, KeptTurn]] | None:
        """Return all answers and end the question; None while a peer may still answer in time."""
        question, now = self._open[number], self._clock()
        if question.waiting and now < question.began + ASK_SECONDS:
            return None
        del self._open[number]
        for address, run in list(question.waiting.items()):
            self._silent[address] = self._silence(address, run, question.began, now)
        return question.answers

    def drop(self, number: int) -> None:
        """Drop a question."""
        self._open.pop(number, None)

    def _is_left_alone(self, address: Address, run: int, now: float) -> bool:
        silence = self._silent.get(address)
        return silence is not None and silence.run == run and now < silence.until

    def _silence(self, address: Address, run: int, asked: float, now: float) -> _Silence:
        """Return the pause of a peer that has not answered, twice as long as its last one."""
        before = self._silent.get(address)
        if before is None or before.run != run:
            return _Silence(run, now + SILENT_SECONDS)
        if before.until > asked:  # another question that was open at the same time
            return before
        seconds = min(2 * before.seconds, MAX_SILENT_SECONDS)
        return _Silence(run, now + seconds, seconds)
