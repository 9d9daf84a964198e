"""Blocks of finished requests, kept for a while: the next turn of a conversation begins with the same tokens.

Its prompt goes to an engine that has computed the last prompt, but not the answer; the answer's blocks are
here. So they are pinned in the engine's pool under a lease, and whoever asks finds them by their content
(`transport.turns`); for the engine itself the request has ended, and it may rest. The lease ends when its
time is up, when a longer turn of the same conversation has taken its place, or when the engine needs the
room: kept blocks give way to requests, those that wait for more room than there is included.

    kept ─all steps under way have ended─▶ found ─lease ends─▶ leaving ─all words raised─▶ given back

With steps in flight a request can end before its last forward has run, so a turn is found only after all
steps that were under way have ended.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.connector.blocks_wanted import BlocksWanted, first_to_go
from kvferry.connector.engine import Block, BlockIds, BlockPool, EngineFacts, Request
from kvferry.connector.events import LeaseGranted
from kvferry.connector.peers.turn_names import TurnNames
from kvferry.connector.pins import Pins
from kvferry.connector.stream import EventStream
from kvferry.errors import TransferError
from kvferry.geometry import GroupKind
from kvferry.planning.select import NULL_BLOCK, attends_to_all, first_independent
from kvferry.transport.lease import LeaseBook
from kvferry.transport.messages import KeptTurn
from kvferry.transport.redeem import Grant, new_ticket
from kvferry.transport.turns import TurnContent, TurnIndex

_FREE = 1 / 16
"""Share of the pool below which kept blocks give way."""


@dataclass(slots=True)
class _Turn:
    """A turn that is kept.

    Attributes:
        content, kept: as the index wants them.
        blocks: how many it holds.
        steps: that are still to be begun before it can be found.
    """

    content: TurnContent
    kept: KeptTurn
    blocks: int
    steps: int


class TurnKeeper:
    """The kept turns of an engine. Only the engine's thread calls it."""

    def __init__(
        self,
        engine: EngineFacts,
        *,
        book: LeaseBook,
        names: TurnNames,
        wanted: BlocksWanted,
        events: EventStream,
        seconds: float,
        share: float,
    ) -> None:
        """Begin without any.

        Args:
            engine: facts of the engine.
            book: that grants leases.
            names: what blocks hold.
            wanted: by requests that wait for blocks.
            events: told of leases.
            seconds: how long blocks are kept.
            share: of the pool, that they may be at most.
        """
        self._engine = engine
        self._book, self._names, self._wanted, self._events = book, names, wanted, events
        self._seconds, self._most = seconds, int(share * engine.num_blocks)
        self._least_free = int(_FREE * engine.num_blocks)
        self._turns: dict[str, _Turn] = {}
        self._leaving: dict[str, int] = {}  # leases that have ended, and blocks that are not free yet
        self._over: list[str] = []
        self._index, self._pins = TurnIndex(), Pins[Block](0)
        self._pool: BlockPool | None = None

    def __contains__(self, lease: str) -> bool:
        """Return whether a lease is that of a kept turn."""
        return lease in self._turns

    def start(self, index: TurnIndex, pool: BlockPool, workers: int) -> None:
        """Begin to keep turns.

        Args:
            index: where they are published.
            pool: the engine's block pool.
            workers: how many have lease words.
        """
        self._index, self._pins, self._pool = index, Pins(workers), pool

    @property
    def busy(self) -> bool:
        """Whether the engine must keep stepping: turns wait to be published, or to be given back."""
        return bool(self._over or self._leaving or any(turn.steps > 0 for turn in self._turns.values()))

    @property
    def holds_blocks(self) -> bool:
        """Whether blocks will become free soon."""
        return bool(self._leaving)

    def finished(self, request: Request, block_ids: BlockIds) -> None:
        """Keep the blocks of a request that has ended, if that can be done.

        Args:
            request: the request.
            block_ids: by position per group, up to what was computed.
        """
        tokens = self._tokens(request)
        content = self._names.content(request, tokens) if tokens else None
        if content is None or not content.keys or self._pool is None:
            return
        offered = self._engine.tables(block_ids, tokens)
        least = self._least(offered, tokens)
        blocks = [self._pool.blocks[number] for ids in offered for number in ids if number != NULL_BLOCK]
        if least is None or len(blocks) > self._most:
            return
        try:
            word = self._book.grant(request.request_id, self._seconds)
        except TransferError:
            return
        self._pool.touch(blocks)
        self._pins.hold(request.request_id, "", blocks)
        kept = KeptTurn(
            engine_id=self._engine.engine_id,
            incarnation=word.incarnation,
            ticket=new_ticket(),
            grant=Grant.of(word.slot, word.generation, offered),
            tokens=tokens,
            least=least,
            chunks=0,
            after=[],
        )
        self._over += [name for name, turn in self._turns.items() if content.begins_with(turn.content)]
        self._turns[request.request_id] = _Turn(content, kept, len(blocks), 1 + self._engine.steps_in_flight)
        now = time.monotonic()
        self._events.emit(LeaseGranted(request.request_id, now, tokens, self._seconds, turn=True))

    def step(self) -> list[str]:
        """Begin a step: publish turns that can be read by now; return leases that must end."""
        for lease, turn in self._turns.items():
            turn.steps -= 1
            if turn.steps == 0:
                self._index.publish(turn.content, turn.kept, lease)
        over, self._over = self._over, []
        return over + self._in_the_way(over)

    def give_up(self) -> None:
        """Withdraw all turns; their leases end with the next step."""
        self._over = list(self._turns)
        for turn in self._turns.values():
            turn.steps = 0  # nor published later
            self._index.withdraw(turn.kept.ticket)

    def ended(self, lease: str) -> None:
        """Withdraw the turn of a lease that ends."""
        if (turn := self._turns.pop(lease, None)) is not None:
            self._index.withdraw(turn.kept.ticket)
            self._leaving[lease] = turn.blocks

    def raised(self, lease: str, workers: int) -> bool:
        """Count workers that have raised a lease's word; free its blocks and return True when all have."""
        blocks = self._pins.landed(lease, workers)
        if not blocks:
            return False
        assert self._pool is not None
        self._pool.free_blocks(reversed(blocks))
        del self._leaving[lease]
        return True

    def _in_the_way(self, over: Sequence[str]) -> list[str]:
        """Return the oldest leases, beside `over`, that exceed the share or whose blocks are needed."""
        assert self._pool is not None
        held = {name: turn.blocks for name, turn in self._turns.items() if name not in over}
        if not held:
            return []
        coming = sum(self._leaving.values()) + sum(
            self._turns[name].blocks for name in over if name in self._turns
        )
        free = self._pool.get_num_free_blocks() + coming
        room = min(self._most - sum(held.values()), free - max(self._least_free, self._wanted.blocks()))
        return first_to_go(held, -room)

    def _tokens(self, request: Request) -> int:
        """Return the tokens whose KV the blocks certainly hold; 0 if that is unknown."""
        if not request.is_complete:
            return 0
        computed, tokens = request.num_computed_tokens, request.num_tokens
        if computed < tokens - 1:
            # Preempted with a step in flight, whose token was its last: the blocks are others, half computed.
            return 0
        if not self._engine.has_state:
            return tokens - 1
        return 0 if self._engine.speculates or computed > tokens else computed

    def _least(self, tables: Sequence[Sequence[int]], tokens: int) -> int | None:
        """Return the shortest prefix that can be continued from; None if not even the longest can."""
        least = 1
        for group, ids in zip(self._engine.groups, tables, strict=True):
            if group.kind is GroupKind.STATE:
                least = max(least, tokens if ids[0] != NULL_BLOCK else tokens + 1)
                continue
            whole = list(ids[: -(-tokens // group.block_tokens)])
            gone = len(whole) - whole[::-1].index(NULL_BLOCK) if NULL_BLOCK in whole else 0
            if gone and attends_to_all(group.kind):
                return None
            if gone:
                least = max(
                    least, first_independent(group.kind, group.attention_span, gone * group.block_tokens)
                )
        return least if least <= tokens else None
