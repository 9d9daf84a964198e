"""Selection of the chunks of running requests to store.

A chunk is complete in the step that computes its last token. Its store is ordered in that step
(`store_orders`): its blocks are pinned, and ranks copy them after the forward pass. A chunk is not stored if
host memory has it already, if its tokens have left the attention window, or if there is no room. If the
engine computes a chunk although a slow tier has it, host memory gets a copy, and that tier is not written
again (`Writing.enqueue`).

The engine reports in each step which snapshots the step writes (``boundary_state_offloads``): at a position,
one block of every group of recurrent state. A snapshot at the end of a chunk is stored.

Windows and snapshots are useful only where a prefix ends. With `snapshot_tokens`, prefixes end at its
multiples and at the end of a prompt. Only the chunks and snapshots needed there are kept.

Prefixes are most likely to end where a prompt or an answer ends, or a prefix that was found in a cache.
Chunks of windows that none of these needs are *cold*: tiers evict them before all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import lcm

import numpy as np

from kvferry.cache.chunk_cache import ChunkCache
from kvferry.cache.prompt_chunks import BegunChunk
from kvferry.connector.engine import BlockIds, Request, Step
from kvferry.connector.part_blocks import PartBlocks
from kvferry.connector.tiers.block_events import BlockEvents
from kvferry.connector.tiers.prompts import Prompts
from kvferry.connector.tiers.store_orders import ChunkToStore, Progress, QuietSteps, StoreOrders
from kvferry.geometry import Group, GroupKind
from kvferry.geometry.canonical import CanonicalForm
from kvferry.geometry.canonical.derive import content_alignment, snapshot_interval
from kvferry.planning.chunk_cells import TableSlice, slice_table
from kvferry.planning.retention import (
    MAX_CHUNKS_PER_ORDER,
    keeps_chunk,
    keeps_snapshot,
    last_prefix_ends,
)
from kvferry.planning.select import NULL_BLOCK, first_attended

_ANY_NUMBER_OF_STEPS = 1 << 62

Resolve = Callable[[str], BlockIds]


class Storing:
    """Selects the chunks of running requests to store, and has the ranks store them.

    Only the engine's thread calls it.
    """

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
        """Prepare to store the chunks of one engine. No request is recorded yet.

        Args:
            cache: chunks in host memory and in the slower tiers.
            prompts: chunk keys of the engine's requests.
            canonical: format in which chunks are stored.
            groups: the engine's KV cache groups, as one rank describes them.
            parts: blocks that loads fill only in part. They are not stored.
            orders: stores under way.
            snapshot_tokens: distance in tokens between the positions for which windows and snapshots are
                stored; a multiple of the chunk length. They are also stored for the end of a prompt.
            block_events: receives the blocks of each complete chunk; None if no events about blocks are
                published.
        """
        self._block_events = block_events
        self._orders = orders
        self._cache, self._prompts, self._part_blocks = cache, prompts, parts
        self._groups, self._chunk, self._every = tuple(groups), canonical.chunk_tokens, snapshot_tokens
        self._parts = [
            [number for number, group in enumerate(groups) if group.label == one.label]
            for one in canonical.groups
        ]
        self._canonical = canonical.groups
        self._alignments = [content_alignment(one, self._chunk) for one in canonical.groups]
        self._state = next((n for n, g in enumerate(canonical.groups) if g.kind is GroupKind.STATE), None)
        states = [] if self._state is None else self._parts[self._state]
        self._block = snapshot_interval(*(groups[number].block_tokens for number in states)) if states else 0
        self._progress: dict[str, Progress] = {}
        self._quiet = QuietSteps()

    def on_new_request(self, request: Request) -> None:
        """Prepare to store the chunks of a new request.

        Args:
            request: request whose chunk keys are known or still being computed.
        """
        self._progress[request.request_id] = Progress(request, tail=self._state is not None)
        self._quiet.stop()

    def schedule(self, step: Step) -> None:
        """Order the ranks to store the chunks and snapshots that the coming step completes."""
        if not self._quiet.count(step.tokens, step.num_tokens):
            self._quiet.start(step.tokens, self._look_at_requests(step))
        for request_id, snapshots in step.snapshots.items():
            progress = self._progress.get(request_id)
            if progress is not None:
                self._store_snapshots(progress.request, snapshots)

    def _look_at_requests(self, step: Step) -> int:
        """Order the ranks to store the chunks that the coming step completes.

        Returns:
            Number of further steps that complete no chunk, if each computes one token for each of these
            requests; 0 or less if there is none.
        """
        left = _ANY_NUMBER_OF_STEPS
        for request_id, tokens in step.tokens.items():
            if (progress := self._progress.get(request_id)) is not None:
                if progress.step(tokens):
                    self._store_complete_chunks(progress, step.block_ids)
                left = min(left, progress.due - progress.computed - 1)
        return left

    def finished(self, request: Request, block_ids: BlockIds) -> None:
        """Order the ranks to store the last complete chunks of a request that has ended.

        Args:
            request: request that has ended.
            block_ids: its block table for each KV cache group, up to the last computed token.
        """
        progress = self._progress.pop(request.request_id, None)
        if progress is None:
            return
        if progress.end():
            self._store_complete_chunks(progress, lambda _: block_ids)
        if (chunks := self._prompts.get(request)) is not None:
            # The next turn of a conversation begins with this prompt and its answer, so a prefix may end with
            # the last chunk.
            ends = (*self._likely_ends(progress), progress.chunks * self._chunk)
            used, cold = chunks.keys_by_need(request.num_prompt_tokens, ends)
            self._orders.ended(request.request_id, used, cold)

    def start_anew(self) -> None:
        """Store no more chunks of the running requests, because the cache was reset."""
        self._progress.clear()
        self._orders.start_anew()

    def _store_complete_chunks(self, progress: Progress, resolve: Resolve) -> None:
        """Order the ranks to store those chunks of a request that have become complete.

        Args:
            progress: the request. Mutated.
            resolve: returns a request's block table for each KV cache group.
        """
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
        tables = self._part_blocks.masked_tables(request.request_id, resolve(request.request_id))
        ends = last_prefix_ends(prompt, self._chunk, self._block)
        progress.needed = chunks.needed_chunks(self._likely_ends(progress))
        for group, one in enumerate(self._canonical):
            if one.kind is not GroupKind.STATE:
                kept = [n for n in numbers if keeps_chunk(one, n, self._chunk, self._every, ends)]
                keys = [chunks.key(group, number) for number in kept]
                candidates = dict(zip(kept, keys, strict=True))
                self._store(progress, group, candidates, tables, numbers.stop * self._chunk)
                if with_tail:
                    tail = {prompt // self._chunk: chunks.tail(group, prompt)}
                    self._store(progress, group, tail, tables, prompt)

    def _likely_ends(self, progress: Progress) -> tuple[int, ...]:
        """Return the lengths in tokens of the prefixes of a request that later prompts are likely to load."""
        prompt = progress.request.num_prompt_tokens
        return (*last_prefix_ends(prompt, self._chunk, self._block), progress.found)

    def _store(
        self, progress: Progress, group: int, keys: dict[int, bytes], tables: BlockIds, until: int
    ) -> None:
        """Order the ranks to store chunks of one KV cache group.

        Chunks that are stored already, or whose tokens are not in the blocks any more, are left out.

        Args:
            progress: the request.
            group: index of the KV cache group in the storage format.
            keys: key of each candidate chunk by its index in the prompt.
            tables: block table of each KV cache group of the engine.
            until: number of tokens, from the start of the prompt, that the blocks hold.
        """
        if self._block_events is not None:
            for number, key in keys.items():
                self._remember_blocks(self._block_events, progress.request, group, number, key, until)
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
                self._order_stores(
                    progress, group, numbers=[number], keys=keys, tables=tables, available=range(since, until)
                )
        chunks_per_order = self._chunks_per_order(group)
        for first in range(0, len(whole), chunks_per_order):
            some = whole[first : first + chunks_per_order]
            self._order_stores(
                progress,
                group,
                numbers=some,
                keys=keys,
                tables=tables,
                available=range(some[0] * self._chunk, until),
            )

    def _remember_blocks(
        self, events: BlockEvents, request: Request, group: int, number: int, key: bytes, until: int
    ) -> None:
        """Tell the events about blocks which of the engine's blocks a chunk holds.

        Args:
            events: receives the blocks.
            request: request with the chunk's tokens.
            group: index of the KV cache group in the storage format.
            number: index of the chunk in the prompt.
            key: key of the chunk.
            until: number of tokens, from the start of the prompt, that the request has.
        """
        low, high = number * self._chunk, min((number + 1) * self._chunk, until)
        chunks, one = self._prompts.get(request), self._canonical[group]
        is_whole = self._first_needed_token(group, low, high) == low
        ends = events.beginnings.ends(low, min(high, low + self._chunk - 1))
        # Before the window of a prefix that ends with the chunk, the chunk may hold zeros.
        tokens = range(low if is_whole else first_attended(one, high - 1), high)
        events.remember(
            request,
            BegunChunk(key, high - low),
            [(part, tokens) for part in self._parts[group]],
            (chunks.tail(group, end) for end in ends) if is_whole and chunks and self._state is None else (),
        )

    def _first_needed_token(self, group: int, low: int, high: int) -> int:
        """Return the first of the tokens ``[low, high)`` of a chunk that a prefix needs that ends with it."""
        one, alignment = self._canonical[group], self._alignments[group]
        return max(low, first_attended(one, high - 1) // alignment * alignment)

    def _chunks_per_order(self, group: int) -> int:
        """Return the maximum number of chunks per store order for a KV cache group."""
        # An order whose blocks exceed `StoreOrders.most_pinned` is dropped whole. With several small orders,
        # at least a part of a long prompt is stored when this limit is low.
        blocks = sum(-(-self._chunk // self._groups[part].block_tokens) + 1 for part in self._parts[group])
        return max(1, min(MAX_CHUNKS_PER_ORDER, self._orders.most_pinned // blocks))

    def _order_stores(
        self,
        progress: Progress,
        group: int,
        numbers: list[int],
        keys: dict[int, bytes],
        tables: BlockIds,
        available: range,
    ) -> None:
        """Order the ranks to store chunks of a KV cache group, with a single order for all of them.

        Args:
            progress: the request.
            group: index of the KV cache group in the storage format.
            numbers: indices of the chunks in the prompt, ascending.
            keys: key of each of these chunks, by its index.
            tables: block table of each KV cache group of the engine.
            available: range of prompt tokens that the blocks hold.
        """
        low, high = available.start, min((numbers[-1] + 1) * self._chunk, available.stop)
        table_slices = [
            slice_table(tables[number], low, high, one.block_tokens) if number in self._parts[group] else None
            for number, one in enumerate(self._groups)
        ]
        chunks = [
            ChunkToStore(
                number,
                keys[number],
                min((number + 1) * self._chunk, high) - number * self._chunk,
                cold=progress.is_cold(group, number, self._chunk),
            )
            for number in numbers
        ]
        self._orders.order(progress.request.request_id, group, chunks, table_slices, available)

    def _first_storable_token(
        self, group: int, number: int, tables: BlockIds, until: int, found: int
    ) -> int | None:
        """Return the position from which a chunk's KV can be stored; None if the chunk cannot be stored.

        Args:
            group: index of the KV cache group in the storage format.
            number: index of the chunk in the prompt.
            tables: block table of each KV cache group of the engine.
            until: number of tokens, from the start of the prompt, that the blocks hold.
            found: number of tokens, from the start of the prompt, that came from a prefix cache or a load.
        """
        one, low, high = self._canonical[group], number * self._chunk, min((number + 1) * self._chunk, until)
        # The blocks may lack the first tokens of a chunk. It can still be stored if no request that continues
        # from the chunk's end, or from a later position, attends to them.
        needed = self._first_needed_token(group, low, high)
        # A load brings only the last window before `found`. The tokens before that window count as missing.
        looked = first_attended(one, found) if one.attention_span and found else 0
        since = low
        for part in self._parts[group]:
            size = self._groups[part].block_tokens
            ids = slice_table(tables[part], low, high, size).ids
            gone = next((at for at, block in enumerate(ids) if block != NULL_BLOCK), len(ids))
            if NULL_BLOCK in ids[gone:] or len(ids) < -(-high // size) - low // size:
                return None
            since = max(since, (low // size + gone) * size if gone else low, looked // size * size)
        if since > low:  # round up to a block boundary of all parts
            size = lcm(*(self._groups[part].block_tokens for part in self._parts[group]))
            since = -(-since // size) * size
        return since if since <= needed else None

    def _store_snapshots(self, request: Request, snapshots: Iterable[tuple[int, int, int]]) -> None:
        """Order the ranks to store snapshots at the ends of chunks.

        Args:
            request: request to which the snapshots belong.
            snapshots: (index of the engine's KV cache group, block id, number of tokens that the state
                covers) for each snapshot that the step writes.
        """
        assert self._state is not None
        chunks = self._prompts.get(request)
        at: dict[int, dict[int, int]] = {}
        ends = last_prefix_ends(request.num_prompt_tokens, self._chunk, self._block)
        for group, block, tokens in snapshots:
            if keeps_snapshot(tokens, self._chunk, self._every, ends):
                at.setdefault(tokens, {})[group] = block
        for tokens, blocks in at.items():
            number = tokens // self._chunk - 1
            if chunks is None or len(chunks.keys) < tokens:
                continue
            # A chunk of state holds all layers with state. A request cannot continue from some of them.
            if set(blocks) != set(self._parts[self._state]):
                continue
            key = chunks.key(self._state, number)
            if self._block_events is not None:
                # A state stands for the block that ends at its position.
                spans = [(n, range(tokens - self._groups[n].block_tokens, tokens)) for n in blocks]
                self._block_events.remember(request, BegunChunk(key, 0), spans)
            if self._cache.host.contains([key])[0]:
                continue
            table_slices = [
                TableSlice(0, (blocks[n],)) if n in blocks else None for n in range(len(self._groups))
            ]
            self._orders.order(
                request.request_id,
                self._state,
                [ChunkToStore(number, key, tokens=0)],
                table_slices,
                range(tokens),
            )
