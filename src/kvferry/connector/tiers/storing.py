"""Stores: which chunks of running requests the ranks copy to host memory, and the copies under way.

A chunk is ordered in the step that computes its last token: its blocks are pinned, and ranks copy them after
the forward pass (`StoreOrders`). It is not stored if host memory has it already, if its tokens have left the
attention window, or if there is no room. If the engine computes a chunk although a slow tier has it, host
memory gets a copy, and that tier is not written again (`TierQueue.enqueue`). `planning.retention` says which
chunks and snapshots are worth storing.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import lcm
from operator import attrgetter

import numpy as np

from kvferry.cache.chunk_cache import ChunkCache, PromptChunk
from kvferry.cache.prompt_chunks import PromptChunks
from kvferry.common.limited_log import LimitedLog
from kvferry.connector.blocks import PartBlocks, Transfer, TransferBook
from kvferry.connector.content import Prompts
from kvferry.connector.engine import BlockIds, BlockPool, Request, Step
from kvferry.connector.events import EventStream, StoreBegan, StoreEnded, short_id
from kvferry.connector.messages import Piece, StepReports, StoreOrder
from kvferry.connector.tiers.events import BlockEvents
from kvferry.connector.tiers.milestones import Milestones
from kvferry.geometry import Group, GroupKind
from kvferry.geometry.canonical import CanonicalForm, CanonicalGroup
from kvferry.geometry.canonical.derive import content_alignment, snapshot_interval
from kvferry.planning.chunk_cells import TableSlice, slice_table
from kvferry.planning.retention import (
    MAX_CHUNKS_PER_ORDER,
    chunks_to_store,
    keeps_snapshot,
    last_prefix_ends,
)
from kvferry.planning.select import NULL_BLOCK, first_attended, first_needed_token
from kvferry.tiers.host.tier import Slot
from kvferry.transport.redeem import MAX_TOKENS

logger = logging.getLogger(__name__)

MOST_PINNED = 0.25
"""Maximum share of the engine's blocks that stores may pin."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Store(Transfer):
    """A store under way, with the slot of each chunk in host memory."""

    request_id: str
    prompt_tokens: int
    began: StoreBegan
    slots: list[tuple[Slot, PromptChunk]]


class StoreOrders:
    """Orders stores from the ranks, and completes them. Only the engine's thread calls it.

    Attributes:
        dropped: number of chunks that were not stored, by reason.
        most_pinned: maximum number of blocks that stores may pin at a time.
    """

    def __init__(
        self, cache: ChunkCache, pool: BlockPool, workers: int, labels: Sequence[str], events: EventStream
    ) -> None:
        self.dropped: Counter[str] = Counter()
        self.most_pinned = int(MOST_PINNED * len(pool.blocks))
        self._cache, self._pool, self._labels, self._events = cache, pool, labels, events
        self._stores = TransferBook[_Store](workers, pool)
        self._orders: list[StoreOrder] = []
        self._under_way: Counter[str] = Counter()  # stores under way, by request
        self._ended: dict[str, list[Callable[[], None]]] = {}
        self._numbers = count()
        self._log = LimitedLog(logger)

    @property
    def busy(self) -> bool:
        return len(self._stores) > 0

    @property
    def chunks(self) -> int:
        return sum(len(store.slots) for store in self._stores)

    def order(
        self,
        request: Request,
        chunks: Sequence[PromptChunk],
        table_slices: Sequence[TableSlice | None],
        available: range,
    ) -> None:
        """Order the ranks to store chunks. Reserve slots, and pin the blocks until all ranks have copied.

        A chunk is not stored if host memory has it already or has no room for it. No chunk is stored if
        stores would pin more than `most_pinned` blocks.

        Args:
            chunks: one or more of one KV cache group.
            table_slices: as `StoreOrder.tables`.
            available: as `StoreOrder.available`.
        """
        ids = {block for part in table_slices if part for block in part.ids} - {NULL_BLOCK}
        if self._stores.pinned + len(ids) > self.most_pinned:
            self.dropped["too many stores under way"] += len(chunks)
            self._cache.events += 1
            return
        slots: list[tuple[Slot, PromptChunk]] = []
        pieces = []
        for chunk in chunks:
            slot = self._cache.reserve(chunk.key, chunk.group)
            if slot is not None:
                slots.append((slot, chunk))
                pieces.append(Piece(chunk.group, chunk.number, slot.offset))
        if not pieces:
            return
        name = f"store#{next(self._numbers)}"
        label = self._labels[chunks[0].group]
        request_id = request.request_id
        began = StoreBegan(short_id(request_id), time.monotonic(), name, label, len(pieces))
        blocks = [self._pool.blocks[block] for block in ids]
        self._stores.begin(
            _Store(
                key=name,
                holder="stores",
                blocks=blocks,
                request_id=request_id,
                prompt_tokens=request.num_prompt_tokens,
                began=began,
                slots=slots,
            )
        )
        self._under_way[request_id] += 1
        self._events.emit(began)
        self._orders.append(StoreOrder(name, tuple(pieces), tuple(table_slices), available))

    @property
    def agenda(self) -> tuple[Sized, ...]:
        return (self._orders,)

    def take(self) -> list[StoreOrder]:
        """Return, and clear, the orders that were queued since the last call."""
        orders = self._orders.copy()
        self._orders.clear()
        return orders

    def take_reports(self, reports: StepReports) -> None:
        """Complete the stores that all ranks have reported: unpin the blocks, make the chunks available."""
        ended = []
        for key, report in reports.reports.items():
            if key in self._stores and (store := self._stores.add_report(key, report)) is not None:
                ended.append(store)
        self._stores.release(reports.reports, reports.released)
        for store in ended:
            assert store.report is not None
            failure, figures = store.report.failure, store.report.figures
            declined = self._cache.declined
            # In reverse order, so that the end of the prompt is evicted before its start.
            for slot, chunk in reversed(store.slots):
                self._cache.filled(
                    slot, chunk.tokens, failure, cold=chunk.cold, prompt_tokens=store.prompt_tokens
                )
            if failure is not None:
                self._log.say(failure, f"tiers: ranks could not store chunks: {failure}")
            self._under_way[store.request_id] -= 1
            self._call_ended(store.request_id)
            self._events.emit(
                StoreEnded(
                    store.request_id,
                    time.monotonic(),
                    began=store.began,
                    failure=failure or "",
                    size=sum(figures.bytes_by_group),
                    seconds=figures.transfer_seconds,
                    declined=tuple((*of, n) for of, n in (self._cache.declined - declined).items()),
                )
            )

    def when_ended(self, request_id: str, do: Callable[[], None]) -> None:
        """Call `do` when all stores of an ended request have ended, after what was passed before."""
        self._ended.setdefault(request_id, []).append(do)
        self._call_ended(request_id)

    def start_anew(self) -> None:
        """Forget the ended requests whose stores are still under way, because the cache was reset."""
        self._ended.clear()

    def _call_ended(self, request_id: str) -> None:
        if self._under_way[request_id]:
            return
        del self._under_way[request_id]
        for do in self._ended.pop(request_id, ()):
            do()


@dataclass(slots=True)
class Progress:
    """The progress of storing the chunks of one running request."""

    request: Request
    number: int = 0  # of the request in the order of arrival
    # Number of tokens that will have been computed when all steps scheduled so far have run.
    computed: int = 0
    # Number of preemptions when the request was last admitted; -1 before its first step.
    preemptions: int = -1
    found: int = 0  # number of tokens that the request had when it was last admitted: cached or loaded
    chunks: int = 0  # number of whole chunks that `take` has returned
    # True if `take` has returned the shorter last chunk of the prompt, or there is none to store.
    tail: bool = False
    ends: tuple[int, int] = (0, 0)  # result of `last_prefix_ends` for its prompt
    snapshots: set[int] = field(default_factory=set)  # positions of its snapshots that are worth storing
    due: int = 0  # number of computed tokens at which the next chunk is complete
    storable: int = MAX_TOKENS  # number of tokens, from the start of the prompt, that may be stored
    # Result of `PromptChunks.needed_chunks`; empty before the first chunk is stored.
    needed: tuple[Collection[int] | None, ...] = ()

    def step(self, tokens: int) -> bool:
        """Add the tokens that the coming step computes. Return True if the step may complete a chunk."""
        request = self.request
        # The request was admitted anew: what it has now was found in a cache or loaded.
        if self.preemptions != request.num_preemptions:
            self.preemptions, self.found = request.num_preemptions, request.num_computed_tokens
        self.computed = request.num_computed_tokens + tokens
        return self.computed >= self.due

    def end(self) -> bool:
        """Record that the request has ended. Return True if its blocks still hold the computed KV."""
        # While a load is under way, its tokens are not in the blocks yet.
        self.computed = min(self.computed, self.request.num_computed_tokens)
        return self.preemptions == self.request.num_preemptions  # a preemption frees its blocks

    def take(self, chunk_tokens: int) -> tuple[range, bool]:
        """Return the complete chunks that have not been returned before.

        Returns:
            (indices of whole chunks in the request, True if the prompt's shorter last chunk is returned too).
        """
        prompt = self.request.num_prompt_tokens
        # Drafts of the coming step count as computed, but may be rejected.
        until = min(self.computed, self.request.num_tokens, self.storable)
        whole = range(self.chunks, max(self.chunks, until // chunk_tokens))
        self.chunks = whole.stop
        self.tail |= prompt % chunk_tokens == 0
        with_tail = not self.tail and until >= prompt
        self.tail |= with_tail
        self.due = (self.chunks + 1) * chunk_tokens
        if not self.tail:
            self.due = min(self.due, prompt)
        if self.due > self.storable:
            self.due = MAX_TOKENS
        return whole, with_tail


@dataclass(frozen=True, slots=True)
class _StoredGroup:
    """A KV cache group of the storage format."""

    number: int  # its index in the storage format
    form: CanonicalGroup
    parts: tuple[int, ...]  # indices of the engine's KV cache groups that it holds
    alignment: int  # alignment of valid content in its chunks, in tokens
    order_chunks: int  # maximum number of chunks in one order


class Storing:
    """Selects the chunks of running requests to store. Only the engine's thread calls it."""

    def __init__(
        self,
        cache: ChunkCache,
        prompts: Prompts,
        canonical: CanonicalForm,
        groups: Sequence[Group],
        parts: PartBlocks,
        orders: StoreOrders,
        snapshot_tokens: int,
        block_events: BlockEvents | None = None,
    ) -> None:
        """Prepare to store the chunks of one engine.

        Args:
            groups: the engine's KV cache groups, as one rank describes them.
            parts: blocks that loads fill only in part. They are not stored.
            snapshot_tokens: distance in tokens between prefixes whose windows and snapshots are stored,
                beside those of the whole prompt; a multiple of the chunk length.
            block_events: receives the blocks of each complete chunk, if they are published.
        """
        self._cache, self._prompts, self._part_blocks, self._orders = cache, prompts, parts, orders
        self._chunk, self._every, self._block_events = canonical.chunk_tokens, snapshot_tokens, block_events
        self._block_tokens = [group.block_tokens for group in groups]
        self._attention: list[_StoredGroup] = []
        self._state: _StoredGroup | None = None
        for number, form in enumerate(canonical.groups):
            own = tuple(at for at, group in enumerate(groups) if group.label == form.label)
            # An order whose blocks exceed `most_pinned` is dropped whole. With several small orders, at least
            # a part of a long prompt is stored when this limit is low.
            blocks = sum(-(-self._chunk // self._block_tokens[part]) + 1 for part in own)
            most = max(1, min(MAX_CHUNKS_PER_ORDER, orders.most_pinned // blocks))
            stored = _StoredGroup(number, form, own, content_alignment(form, self._chunk), most)
            if form.kind is GroupKind.STATE:
                self._state = stored
            else:
                self._attention.append(stored)
        states = () if self._state is None else self._state.parts
        self._state_block = snapshot_interval(*(self._block_tokens[part] for part in states)) if states else 0
        self._progress: dict[str, Progress] = {}
        self._arrivals = count()
        self._milestones = Milestones()
        # Snapshots of the coming step, as in `Step.snapshots`.
        self._snapshots: dict[str, Iterable[tuple[int, int, int]]] = {}

    @property
    def agenda(self) -> tuple[Sized, ...]:
        """Containers that are all empty if a step needs no call of `schedule`, after `count`."""
        return self._milestones.due, self._snapshots

    def on_new_request(self, request: Request, storable: int = MAX_TOKENS) -> None:
        """Prepare to store the chunks of a new request, from its first `storable` tokens only.

        A request without chunk keys is soon forgotten.
        """
        ends = last_prefix_ends(request.num_prompt_tokens, self._chunk, self._state_block)
        self._progress[request.request_id] = Progress(
            request, next(self._arrivals), tail=self._state is not None, ends=ends, storable=storable
        )

    def count(self, step: Step) -> None:
        """Find the requests that have something to store in the coming step. Call this once per step."""
        self._milestones.count(step)
        if self._state is not None:
            self._snapshots.update(step.snapshots)

    def schedule(self, step: Step, started: Iterable[str]) -> None:
        """Order the ranks to store the chunks and snapshots that the coming step completes.

        `started` are the requests of the step that the engine has admitted since their last step.
        """
        for progress in self._take_due(started):
            if progress.step(step.tokens[progress.request.request_id]):
                self._store_complete_chunks(progress, step.block_ids)
            self._milestones.set(progress.request, progress.due - progress.computed)
        for request_id, snapshots in self._snapshots.items():
            if request_id in self._progress:
                self._store_snapshots(self._progress[request_id], snapshots)
        self._snapshots.clear()

    def _take_due(self, started: Iterable[str]) -> Iterable[Progress]:
        """Return the progress of the requests to look at in the coming step, in the order of arrival."""
        due = {*self._milestones.due, *started}
        self._milestones.due.clear()
        found = [progress for name in due if (progress := self._progress.get(name)) is not None]
        return sorted(found, key=attrgetter("number"))

    def finished(self, request: Request, block_ids: BlockIds) -> list[bytes]:
        """Order the ranks to store the last complete chunks of a request that has ended.

        Return the keys of the chunks that later prompts need, in order, whether they are stored or not.
        """
        self._milestones.forget(request.request_id)
        progress = self._progress.pop(request.request_id, None)
        if progress is None:
            return []
        if progress.end():
            self._store_complete_chunks(progress, lambda _: block_ids)
        if (chunks := self._prompts.get(request)) is None:
            return []
        # The next turn of a conversation begins with this prompt and its answer, so a prefix may end with
        # the last chunk.
        ends = (*progress.ends, progress.found, progress.chunks * self._chunk)
        # A request passes over the snapshots between the one that it continued from and its own.
        snapshots = {progress.found, *progress.snapshots}
        used, cold = chunks.keys_by_need(request.num_prompt_tokens, ends, snapshots)
        tokens = max(request.num_prompt_tokens, progress.chunks * self._chunk)
        # The end of the prompt is to be evicted before its start: the start is useful without the rest, but
        # not the rest without the start. So no store may follow.
        mark_used = partial(self._cache.mark_used, used, cold, tokens, request.num_prompt_tokens)
        self._orders.when_ended(request.request_id, mark_used)
        return used

    def start_anew(self) -> None:
        """Store no more chunks of the running requests, because the cache was reset."""
        self._progress.clear()
        self._milestones.clear()
        self._orders.start_anew()

    def _store_complete_chunks(self, progress: Progress, tables_of: Callable[[str], BlockIds]) -> None:
        """Order the ranks to store those chunks of a request that have become complete."""
        request, prompt = progress.request, progress.request.num_prompt_tokens
        chunks = self._prompts.get(request)
        # Nothing is taken yet, so these chunks are stored once their keys are known.
        if chunks is None and self._prompts.are_pending(request.request_id):
            return
        numbers, with_tail = progress.take(self._chunk)
        if not (numbers or with_tail):
            return
        if chunks is None:
            self._progress.pop(request.request_id, None)
            return
        # A block that a load has filled only in part is masked: it lacks KV of some tokens.
        tables = self._part_blocks.masked_tables(request.request_id, tables_of(request.request_id))
        progress.needed = chunks.needed_chunks((*progress.ends, progress.found))
        for group in self._attention:
            kept = chunks_to_store(group.form, numbers, self._chunk, self._every, progress.ends)
            keys = {number: chunks.key(group.number, number) for number in kept}
            self._store(progress, chunks, group, keys, tables, numbers.stop * self._chunk)
            if with_tail:
                tail = {prompt // self._chunk: chunks.tail(group.number, prompt)}
                self._store(progress, chunks, group, tail, tables, prompt)

    def _store(
        self,
        progress: Progress,
        chunks: PromptChunks,
        group: _StoredGroup,
        keys: Mapping[int, bytes],
        tables: BlockIds,
        until: int,
    ) -> None:
        """Order the ranks to store chunks of one KV cache group, unless they are stored or not in the blocks.

        Args:
            keys: key of each candidate chunk by its index in the prompt.
            tables: block table of each KV cache group of the engine.
            until: number of tokens, from the start of the prompt, that the blocks hold.
        """
        if self._block_events is not None:
            for number, key in keys.items():
                self._remember_blocks(self._block_events, progress.request, chunks, group, number, key, until)
        names, ends = list(keys.values()), np.minimum((np.array(list(keys)) + 1) * self._chunk, until)
        kept = self._cache.host.contains(names)
        # Chunks that a load has brought are in some tier. One more token counts as found: the last one is
        # always computed.
        kept |= (ends <= progress.found + 1) & self._cache.available(names)
        whole: list[int] = []
        for number, here in zip(keys, kept.tolist(), strict=True):
            since = None if here else self._first_storable_token(group, number, tables, until, progress.found)
            if since == number * self._chunk:
                whole.append(number)
            # A chunk without its first tokens has an order of its own, because an order has one range of
            # available tokens.
            elif since is not None:
                self._order(progress, group, {number: keys[number]}, tables, range(since, until))
        for first in range(0, len(whole), group.order_chunks):
            some = {number: keys[number] for number in whole[first : first + group.order_chunks]}
            self._order(progress, group, some, tables, range(whole[first] * self._chunk, until))

    def _remember_blocks(
        self,
        events: BlockEvents,
        request: Request,
        chunks: PromptChunks,
        group: _StoredGroup,
        number: int,
        key: bytes,
        until: int,
    ) -> None:
        """Tell the events about blocks which of the engine's blocks a chunk holds."""
        low, high = number * self._chunk, min((number + 1) * self._chunk, until)
        is_whole = first_needed_token(group.form, low, high, group.alignment) == low
        ends = events.beginnings.ends(low, min(high, low + self._chunk - 1))
        # Before the window of a prefix that ends with the chunk, the chunk may hold zeros.
        tokens = range(low if is_whole else first_attended(group.form, high - 1), high)
        events.remember(
            request,
            PromptChunk(group.number, number, key, high - low),
            [(part, tokens) for part in group.parts],
            (chunks.tail(group.number, end) for end in ends) if is_whole and self._state is None else (),
        )

    def _first_storable_token(
        self, group: _StoredGroup, number: int, tables: BlockIds, until: int, found: int
    ) -> int | None:
        """Return the position from which a chunk's KV can be stored; None if the chunk cannot be stored.

        Args:
            until: number of tokens, from the start of the prompt, that the blocks hold.
            found: number of tokens, from the start of the prompt, that came from a prefix cache or a load.
        """
        form, low, high = group.form, number * self._chunk, min((number + 1) * self._chunk, until)
        # A load brings only the last window before `found`. The tokens before that window count as missing.
        looked = first_attended(form, found) if form.attention_span and found else 0
        since = low
        for part in group.parts:
            size = self._block_tokens[part]
            ids = slice_table(tables[part], low, high, size).ids
            gone = ids.count(NULL_BLOCK)
            if NULL_BLOCK in ids[gone:] or len(ids) < -(-high // size) - low // size:
                return None
            since = max(since, (low // size + gone) * size if gone else low, looked // size * size)
        if since > low:  # round up to a block boundary of all parts
            size = lcm(*(self._block_tokens[part] for part in group.parts))
            since = -(-since // size) * size
        # The blocks may lack the first tokens of a chunk. It can still be stored if no request that continues
        # from the chunk's end, or from a later position, attends to them.
        return since if since <= first_needed_token(form, low, high, group.alignment) else None

    def _order(
        self,
        progress: Progress,
        group: _StoredGroup,
        keys: Mapping[int, bytes],
        tables: BlockIds,
        available: range,
    ) -> None:
        """Order the ranks to store chunks, by their indices in the prompt, with a single order.

        `available` is the range of prompt tokens that the blocks hold.
        """
        low, high = available.start, min((max(keys) + 1) * self._chunk, available.stop)
        table_slices = [
            slice_table(table, low, high, size) if number in group.parts else None
            for number, (table, size) in enumerate(zip(tables, self._block_tokens, strict=True))
        ]
        # A chunk with generated tokens may turn out to be the last one, so it is not cold while the request
        # runs.
        needed, of_prompt = progress.needed[group.number], progress.request.num_prompt_tokens // self._chunk
        chunks = [
            PromptChunk(
                group.number,
                number,
                key,
                min((number + 1) * self._chunk, high) - number * self._chunk,
                cold=number < of_prompt and needed is not None and number not in needed,
            )
            for number, key in keys.items()
        ]
        self._orders.order(progress.request, chunks, table_slices, available)

    def _store_snapshots(self, progress: Progress, snapshots: Iterable[tuple[int, int, int]]) -> None:
        """Order the ranks to store snapshots at the ends of chunks (`Step.snapshots`)."""
        request, state = progress.request, self._state
        chunks = self._prompts.get(request)
        assert state is not None
        at: dict[int, dict[int, int]] = {}
        for group, block, tokens in snapshots:
            if tokens <= progress.storable and keeps_snapshot(
                tokens, self._chunk, self._every, progress.ends
            ):
                at.setdefault(tokens, {})[group] = block
        progress.snapshots.update(at)
        for tokens, blocks in at.items():
            # A chunk of state holds all layers with state. A request cannot continue from some of them.
            if chunks is None or len(chunks.keys) < tokens or blocks.keys() != set(state.parts):
                continue
            number = tokens // self._chunk - 1
            chunk = PromptChunk(state.number, number, chunks.key(state.number, number), tokens=0)
            if self._block_events is not None:
                # A state stands for the block that ends at its position.
                spans = [(n, range(tokens - self._block_tokens[n], tokens)) for n in blocks]
                self._block_events.remember(request, chunk, spans)
            if self._cache.host.contains([chunk.key])[0]:
                continue
            table_slices = [
                TableSlice(0, (blocks[n],)) if n in blocks else None for n in range(len(self._block_tokens))
            ]
            self._orders.order(request, [chunk], table_slices, range(tokens))
