"""Kept turns: blocks of finished requests, kept for the next turn of their conversation.

The prompt of the next turn begins with the tokens of the last prompt and answer. It goes to a prefill engine,
which has computed the last prompt but not the answer. The answer's KV is here. So the blocks stay pinned in
the engine's pool under a lease, and peers find them by their content (`transport.turns`). For the engine
itself the request has ended. The lease ends when its time is over, when a longer turn of the same
conversation is kept, or when requests of this engine need the blocks.

    kept ─all steps under way have ended─▶ published ─lease ends─▶ leaving ─all words raised─▶ freed
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from kvferry.common.errors import TransferError
from kvferry.connector.content import TurnNames
from kvferry.connector.engine import BlockIds, BlockPool, EngineFacts, Request
from kvferry.connector.events import EventStream, LeaseGranted
from kvferry.connector.peers.offer import MAX_UNWANTED, read_wanted
from kvferry.connector.room import BlocksWanted, choose_leases_to_end
from kvferry.connector.transfer import Transfer, TransferBook
from kvferry.geometry import GroupKind
from kvferry.planning.select import NULL_BLOCK, attends_to_all, first_independent
from kvferry.transport.lease import LeaseBook
from kvferry.transport.messages import KeptTurn
from kvferry.transport.redeem import Grant, new_ticket
from kvferry.transport.turns import TurnContent, TurnIndex

_FREE = 1 / 16
"""Share of free blocks in the pool below which kept turns are released."""


@dataclass(slots=True)
class _Turn:
    """A finished request's KV, kept for the next turn of its conversation.

    Attributes:
        content: digests by which peers find the turn.
        kept: reply to a peer that asks for this content.
        blocks: number of blocks that the turn pins.
        steps: number of engine steps until peers may find the turn; 0 or less if they may find it already.
    """

    content: TurnContent
    kept: KeptTurn
    blocks: int
    steps: int


class TurnKeeper:
    """Keeps the blocks of finished requests for the next turn of their conversation.

    Only the engine's thread calls it.
    """

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
        clock: Callable[[], float],
    ) -> None:
        """Create a keeper that keeps nothing until `start` is called.

        Args:
            engine: properties of the engine.
            book: book of all leases.
            names: computes the digests by which peers find turns.
            wanted: computes the number of blocks that the largest waiting request needs.
            events: receives an event for each granted lease.
            seconds: maximum age of a turn.
            share: maximum part of the block pool that turns may pin, from 0 to 1.
            clock: returns monotonic seconds.
        """
        self._engine, self._clock = engine, clock
        self._book, self._names, self._wanted, self._events = book, names, wanted, events
        self._seconds, self._most = seconds, int(share * engine.num_blocks)
        self._least_free = int(_FREE * engine.num_blocks)
        self._turns: dict[str, _Turn] = {}
        self._over: list[str] = []
        self._index = TurnIndex()
        self._pool: BlockPool | None = None
        # A turn is late from the end of its lease until all workers have confirmed it: peers may still read.
        self._kept: TransferBook[Transfer] | None = None

    def __contains__(self, lease: str) -> bool:
        """Return True if a lease belongs to a turn."""
        return lease in self._turns

    def start(self, index: TurnIndex, pool: BlockPool, workers: int) -> None:
        """Begin to keep turns.

        Args:
            index: index in which peers look up turns.
            pool: the engine's block pool.
            workers: number of workers. All must confirm the end of a lease before its blocks are freed.
        """
        self._index, self._kept, self._pool = index, TransferBook(workers, pool), pool

    @property
    def busy(self) -> bool:
        """True if the engine must run steps without requests, to publish turns and to free their blocks."""
        unseen = any(turn.steps > 0 for turn in self._turns.values())
        return bool(self._over) or self.holds_blocks or unseen

    @property
    def holds_blocks(self) -> bool:
        """True if a turn's lease has ended, but not all workers have confirmed that."""
        return self._leaving_blocks > 0

    @property
    def _leaving_blocks(self) -> int:
        return 0 if self._kept is None else self._kept.late_blocks()

    def finished(self, request: Request, block_ids: BlockIds) -> None:
        """Keep the blocks of a finished request, if a peer can use them and they fit in the turns' share.

        Withdraw the earlier turns that the request continues.

        Args:
            request: request that has ended.
            block_ids: its block table for each KV cache group, up to the last computed token.
        """
        tokens = self._computed_tokens(request)
        content = self._names.content(request, tokens) if tokens else None
        if content is None or not content.keys or self._pool is None or self._kept is None:
            return
        offered = self._engine.tables(block_ids, tokens)
        least = self._shortest_usable_prefix(offered, tokens)
        blocks = [self._pool.blocks[number] for ids in offered for number in ids if number != NULL_BLOCK]
        if least is None or len(blocks) > self._most:
            return
        try:
            word = self._book.grant(request.request_id, self._seconds)
        except TransferError:
            return
        self._kept.begin(Transfer(key=request.request_id, holder="turns", blocks=blocks))
        kept = KeptTurn(
            engine_id=self._engine.engine_id,
            incarnation=word.incarnation,
            ticket=new_ticket(),
            grant=Grant.of(word.slot, word.generation, offered),
            tokens=tokens,
            min_prefix_tokens=least,
            chunks=0,
            next_tokens=[],
        )
        self._over += [name for name, turn in self._turns.items() if content.begins_with(turn.content)]
        # With steps in flight a request can end before its last forward pass has run.
        self._turns[request.request_id] = _Turn(content, kept, len(blocks), 1 + self._engine.steps_in_flight)
        now = self._clock()
        self._events.emit(LeaseGranted(request.request_id, now, tokens, self._seconds, turn=True))

    def step(self) -> list[str]:
        """Publish the turns to whose blocks no step can write any more. Call this once per engine step.

        Returns:
            Names of the leases that must end: of turns that were withdrawn, that a longer turn continues, or
            whose blocks are needed.
        """
        for lease, turn in self._turns.items():
            turn.steps -= 1
            if turn.steps == 0:
                self._index.publish(turn.content, turn.kept, lease)
        over, self._over = self._over, []
        return over + self._leases_to_end_early(over)

    def give_up(self) -> None:
        """Withdraw all turns. Their leases end with the next step."""
        self._over = list(self._turns)
        for turn in self._turns.values():
            turn.steps = 0  # so that it is not published later
            self._index.withdraw(turn.kept.ticket)

    def ended(self, lease: str) -> None:
        """Withdraw the turn whose lease has ended.

        Its blocks stay pinned until all workers have confirmed the end.

        Args:
            lease: name of the lease. A lease of another kind is ignored.
        """
        if (turn := self._turns.pop(lease, None)) is not None:
            self._index.withdraw(turn.kept.ticket)
            if self._kept is not None and lease in self._kept:
                self._kept[lease].late = True

    def on_workers_confirmed(self, lease: str, workers: int) -> bool:
        """Count workers that have raised a turn's lease word. Return True if all have.

        The blocks are free then.

        Args:
            lease: name of the lease.
            workers: number of workers that have confirmed since the last call.
        """
        return self._kept is not None and self._kept.end(lease, workers)

    def _leases_to_end_early(self, over: Sequence[str]) -> list[str]:
        """Return the names of the leases that must end early, the oldest first.

        They end if turns pin more than their share of the pool, or if fewer blocks are free than the largest
        waiting request needs, or than the share `_FREE` of the pool.

        Args:
            over: leases that end now for another reason. They are not returned, and their blocks count as
                free.
        """
        assert self._pool is not None
        held = {name: turn.blocks for name, turn in self._turns.items() if name not in over}
        if not held:
            return []
        coming = self._leaving_blocks + sum(self._turns[name].blocks for name in over if name in self._turns)
        free = self._pool.get_num_free_blocks() + coming
        room = min(self._most - sum(held.values()), free - max(self._least_free, self._wanted.blocks()))
        return choose_leases_to_end(held, -room)

    def _computed_tokens(self, request: Request) -> int:
        """Return how many tokens a finished request's blocks certainly hold KV of; 0 if that is unknown."""
        if not request.is_complete:
            return 0
        computed, tokens = request.num_computed_tokens, request.num_tokens
        if computed < tokens - 1:
            # Preempted while its last step was in flight: the blocks are new ones, only partly computed.
            return 0
        if not self._engine.has_state:
            # The last token was sampled, but no step has computed its KV.
            return tokens - 1
        # State serves one position only, and with drafts that position is not certain.
        return 0 if self._engine.speculates or computed > tokens else computed

    def _shortest_usable_prefix(self, tables: Sequence[Sequence[int]], tokens: int) -> int | None:
        """Return the length in tokens of the shortest prefix that a peer can use; None if there is none.

        Shorter prefixes need KV that the engine has freed already.

        Args:
            tables: block ids of the request for each KV cache group, in token order; `NULL_BLOCK` if freed.
            tokens: number of tokens whose KV the blocks hold.
        """
        least = 1
        for group, ids in zip(self._engine.groups, tables, strict=True):
            if group.kind is GroupKind.STATE:
                # The state is that of one position, the end. Without it, no prefix can be used.
                least = max(least, tokens if ids[0] != NULL_BLOCK else tokens + 1)
                continue
            whole = list(ids[: -(-tokens // group.block_tokens)])
            gone = len(whole) - whole[::-1].index(NULL_BLOCK) if NULL_BLOCK in whole else 0
            # Every prefix needs the freed blocks. In a windowed group, prefixes that end late enough do not.
            if gone and attends_to_all(group.kind):
                return None
            if gone:
                least = max(least, first_independent(group, gone * group.block_tokens))
        return least if least <= tokens else None


_PAUSED_SECONDS = 1.0
"""Minimum age of an unclaimed lease that ends because of a pause: its ticket may be on its way."""


class UnclaimedLeases:
    """Chooses the unclaimed leases that end early. Only the engine's thread calls it.

    Attributes:
        seconds: minimum age of an unclaimed lease that ends because requests wait for blocks.
        paused: True while the engine is paused.
    """

    def __init__(self, book: LeaseBook, wanted: BlocksWanted) -> None:
        """Create an empty collection of leases. `granted` adds a lease.

        Args:
            book: book of all leases.
            wanted: computes the number of blocks that the largest waiting request needs.
        """
        self.seconds = book.seconds / 4
        self.paused = False
        self._book, self._wanted = book, wanted
        self._pool: BlockPool | None = None
        self._blocks: dict[str, int] = {}
        self._leaving: dict[str, int] = {}
        self._names: dict[str, str] = {}  # the router's name of each lease
        self._leases: dict[str, str] = {}  # lease by name
        self._unwanted: dict[str, None] = {}  # names, the latest last

    def start(self, pool: BlockPool) -> None:
        self._pool = pool

    def on_new_request(self, request: Request) -> None:
        """Record the KV that the router no longer wants, according to its request for a prefill."""
        for name in read_wanted(request.kv_transfer_params).remote_unwanted:
            self._unwanted[name] = None
        # A name may be that of a prompt that is still computed, whose lease then ends at once. Routers
        # send more names over time, so the oldest are forgotten.
        for name in list(self._unwanted)[:-MAX_UNWANTED]:
            del self._unwanted[name]

    def granted(self, lease: str, block_ids: BlockIds, name: str | None = None) -> None:
        """Record a new lease and the number of its blocks.

        Args:
            lease: name of the lease.
            block_ids: leased blocks, for each KV cache group.
            name: the router's name for the KV; None without one.
        """
        if name is not None:
            self._names[lease], self._leases[name] = name, lease
        self._blocks[lease] = len({block for ids in block_ids for block in ids} - {NULL_BLOCK})

    def ended(self, leases: Collection[str]) -> None:
        """Record that leases have ended.

        Their blocks become free after every worker has confirmed the end.
        """
        self._leaving.update({name: self._blocks.pop(name) for name in leases if name in self._blocks})
        for lease in leases:
            if (name := self._names.pop(lease, None)) is not None:
                self._leases.pop(name, None)
                self._unwanted.pop(name, None)

    def on_blocks_freed(self, lease: str) -> None:
        """Record that the engine has freed the blocks of an ended lease."""
        self._leaving.pop(lease, None)

    def leases_given_up(self) -> list[str]:
        """Return the names of unclaimed leases that must end because the router or a pause wants it."""
        unwanted = [self._leases[name] for name in self._unwanted if name in self._leases]
        found = {lease for lease in unwanted if self._book.is_unclaimed(lease)}
        if self.paused:
            found.update(self._book.unclaimed(_PAUSED_SECONDS))
        return [lease for lease in found if lease in self._blocks]

    def leases_to_end(self) -> list[str]:
        """Return the unclaimed leases that must end now because requests wait for blocks.

        These are the oldest, and only as many as are needed to free enough blocks.
        """
        unclaimed = self._book.unclaimed(self.seconds)
        held = {name: self._blocks[name] for name in unclaimed if name in self._blocks}
        return choose_leases_to_end(held, self._lacking_blocks()) if held else []

    def leases_block(self) -> bool:
        """Return whether requests wait for more blocks than will soon be free, while any lease keeps some."""
        # Without leases, requests wait only for running requests, which end by themselves.
        return bool(self._blocks) and self._lacking_blocks() > 0

    def _lacking_blocks(self) -> int:
        """Return how many more blocks the largest waiting request needs than are free or will soon be."""
        if self._pool is None:
            return 0
        return self._wanted.blocks() - self._pool.get_num_free_blocks() - sum(self._leaving.values())
