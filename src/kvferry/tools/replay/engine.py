"""A simulated engine: its prefix cache, its tiers, and the requests that it computes one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from kvferry.connector import Hints, LocalPrefix, last_boundary_before, saves_computation
from kvferry.geometry import GroupKind
from kvferry.planning import (
    STATE_BLOCKS,
    ChunkedPrompt,
    attends_to_all,
    first_attended,
    longest_prefixes,
)
from kvferry.tiers import EVICTION_POLICIES
from kvferry.tools.replay.arrivals import Arrived
from kvferry.tools.replay.content import RequestKeys, keys_of_each
from kvferry.tools.replay.hinting import EngineHints
from kvferry.tools.replay.lookup import Found, look_up
from kvferry.tools.replay.settings import BlockGroup, ServedModel
from kvferry.tools.replay.tiers import ComputedPrompt, SimulatedTiers, snapshots_of, store_chunks
from kvferry.tools.replay.trace.base import MAX_TOKENS, TraceRequest

# Prefix of a prompt of which the engine has nothing.
NO_PREFIX = LocalPrefix(0, 0)


class EngineCache:
    """The prefix cache of one engine. `num_blocks` is over all KV cache groups; 0 without prefix caching."""

    def __init__(self, model: ServedModel, num_blocks: int, unit_tokens: int) -> None:
        self._model = model
        block = model.block_tokens
        has_tail = model.state is None and unit_tokens % block == 0
        self._run = unit_tokens if has_tail else block
        self._policy, self._sizes, self._used = EVICTION_POLICIES["lru"](num_blocks), dict[bytes, int](), 0
        self._capacity = max(num_blocks - 1, 0)  # without the null block

    def keys_of_each(self, requests: Sequence[TraceRequest]) -> tuple[list[RequestKeys], list[RequestKeys]]:
        """Return the keys of the chunks of each request, and those of its runs of blocks."""
        chunk_tokens, groups = self._model.chunk_tokens, len(self._model.groups)
        if not self._capacity:  # nothing is looked up by runs
            chunks = keys_of_each(requests, chunk_tokens, groups)
            return chunks, chunks
        ends = [last_boundary_before(request.prompt_tokens, self._model.block_tokens) for request in requests]
        runs = keys_of_each(requests, self._run, groups, ends)
        chunks = runs if self._run == chunk_tokens else keys_of_each(requests, chunk_tokens, groups)
        return chunks, runs

    def look_up(self, prompt: int, keys: RequestKeys) -> LocalPrefix:
        """Return the prefix of a prompt that the engine has. The last token is never part of it."""
        model, held = self._model, self._sizes
        tokens = last_boundary_before(prompt, self._model.block_tokens)
        leading = keys.whole[model.widest]
        if not held or not tokens or (model.attention and leading and leading[0] not in held):
            return NO_PREFIX
        # If the tokens end inside a run, a request that has the whole run is looked up by the whole run's
        # key.
        in_whole_run = len(keys.whole[0]) * self._run >= tokens
        rows = keys.rows(-(-tokens // self._run) * self._run if in_whole_run else tokens)
        held_runs = [bytes(map(held.__contains__, row)) for row in rows]
        found = longest_prefixes(model.groups, ChunkedPrompt(tokens, self._run, prompt), held_runs)
        whole = found.tokens
        return LocalPrefix(max(found.attention_tokens, whole) if model.attention else whole, whole)

    def keep(self, request: TraceRequest, keys: RequestKeys, snapshots: Sequence[int], shared: int) -> None:
        """Allocate the blocks of a request, let it run, and keep those that later requests can share.

        Args:
            shared: position up to which the engine had the attention blocks, but not all other blocks, of
                another prompt; 0 if there is none.
        """
        if not self._capacity:
            return
        total = request.prompt_tokens + max(request.output_tokens - 1, 0)  # the last one is not computed
        entries = self._entries(request.prompt_tokens, keys.computed_tokens, keys, snapshots, shared)
        each, sizes = [key for _, some in entries for key in some], self._sizes
        held = [key for key in each if key in sizes]
        needed = sum(self._running_blocks(group, total) for group in self._model.block_groups)
        needed -= sum(map(sizes.__getitem__, held))
        if (missing := self._used + needed - self._capacity) > 0:
            # The request holds the blocks that it shares, so they are not evicted for its new ones.
            self._policy.make_newest(held)
            self._used -= sum(map(sizes.pop, self._policy.evict_bytes(missing)))
        for size, some in entries:
            new = [key for key in some if key not in sizes] if held else some
            new = new[: (self._capacity - self._used) // size]
            if new:
                self._policy.admit_all(new, size)
                sizes.update(dict.fromkeys(new, size))
                self._used += size * len(new)
        # Freed from the last to the first, so the end of a prompt is evicted first.
        self._policy.make_newest(each[::-1])

    def _entries(
        self, prompt: int, known: int, keys: RequestKeys, snapshots: Sequence[int], shared: int
    ) -> list[tuple[int, list[bytes]]]:
        """Return the runs of a request that stay in the cache, from the start of the prompt.

        Args:
            known: number of tokens whose identity is known, at least `prompt`.

        Returns:
            (number of blocks of each run, keys of the runs) of consecutive runs of one size.
        """
        model, run, runs = self._model, self._run, known // self._run
        last = last_boundary_before(prompt, self._model.block_tokens)
        kept: list[Sequence[int]] = []
        for group in model.block_groups:
            if group.kind is GroupKind.STATE:
                kept.append([at // run - 1 for at in snapshots if at % run == 0])
            elif attends_to_all(group.kind):
                kept.append(range(runs))
            else:
                kept.append(self._window_runs(group, runs, {last, shared}))
        if len(kept) == 1:
            group = model.block_groups[0]
            found = [(run // group.block_tokens * group.tables, keys.whole[0][:runs])]
        else:
            order = sorted(
                (number, n) for n, numbers in enumerate(kept) for number in numbers if number < runs
            )
            sizes = [run // group.block_tokens * group.tables for group in model.block_groups]
            found = [
                (size, [keys.whole[n][number] for number, n in some])
                for size, some in groupby(order, lambda one: sizes[one[1]])
            ]
        if last % run and last // run == runs:
            tail = zip(keys.tail(last), model.block_groups, strict=True)
            found += [(last % run // group.block_tokens * group.tables, [key]) for key, group in tail]
        return found

    def _window_runs(self, group: BlockGroup, runs: int, ends: set[int]) -> list[int]:
        # With `prefix_cache_retention_interval` 0, vLLM keeps only the last window before the end of a prompt
        # and before the end of a prefix that another prompt shares.
        retention = self._model.form.steps.retention
        if retention is None:
            return list(range(runs))
        if retention:
            ends = ends | set(range(retention, runs * self._run + 1, retention))
        run, found = self._run, set[int]()
        for end in ends:
            found.update(range(max(int(first_attended(group, end)), 0) // run, -(-end // run)))
        return sorted(found)

    def _running_blocks(self, group: BlockGroup, tokens: int) -> int:
        if group.kind is GroupKind.STATE:
            return STATE_BLOCKS * group.tables
        if group.attention_span:
            tokens = min(tokens, group.attention_span + self._model.form.steps.step_tokens)
        return -(-tokens // group.block_tokens) * group.tables


class Hit(NamedTuple):
    """The tokens of a prompt that a simulated engine did not compute."""

    local_tokens: int
    tier_tokens: tuple[int, ...]
    tier_bytes: tuple[int, ...]
    # Length in tokens of the longest prefix whose full-attention KV was at hand. Tokens beyond `found` were
    # computed again because a window or a snapshot was missing.
    attention_tokens: int
    group_tokens: tuple[int, ...]  # length in tokens of the longest prefix that each group alone could use
    shared_tokens: int = 0  # as in `ComputedPrompt`

    @property
    def found(self) -> int:
        return self.local_tokens + sum(self.tier_tokens)


class Running(NamedTuple):
    """A request that a simulated engine has admitted and not finished. `shared` is as in `ComputedPrompt`."""

    arrived: Arrived
    hit: Hit
    shared: int


@dataclass(slots=True)
class SimulatedEngine:
    """An engine of a replay, which computes one prompt after the other."""

    number: int
    model: ServedModel
    tiers: SimulatedTiers
    cache: EngineCache
    hints: EngineHints | None = None
    # Requests that arrived and have not ended, the running one first.
    queue: deque[Arrived] = field(default_factory=deque)
    # Time in seconds at which the engine would have ended its requests without tiers.
    free_without_tiers: float = 0.0
    # Sums over the engine's counted requests. `hit_tokens` were not computed.
    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0

    def count(self, running: Running) -> None:
        self.requests += 1
        self.prompt_tokens += running.arrived.request.prompt_tokens
        self.hit_tokens += running.hit.found

    def admit(self, arrived: Arrived) -> Running:
        """Look a prompt up in the engine's prefix cache and in its tiers, and load what helps."""
        prompt, self.tiers.has_asked = arrived.request.prompt_tokens, False
        local = self.cache.look_up(prompt, arrived.block_keys)
        hit = self._find(prompt, arrived.keys, local)
        completed = self.model.completes_prefixes and any(hit.tier_tokens)
        shared = local.tokens if local.needs_load and not completed else 0
        return Running(arrived, hit, shared)

    def set_time(self, now: float) -> None:
        """Tell the tiers the time, in seconds since the start of the trace."""
        self.tiers.set_time(now)
        if self.hints is not None:
            self.hints.set_time(now)

    def finish(self, running: Running, hints: Hints | None = None) -> None:
        """Compute the rest of an admitted prompt, store its chunks, keep its blocks, and apply its hints."""
        request, keys, block_keys, _ = running.arrived
        found = min(running.hit.found, request.prompt_tokens - 1)  # the last token is always computed
        storable = MAX_TOKENS if hints is None else hints.stored_tokens(MAX_TOKENS)
        prompt = ComputedPrompt(
            request.prompt_tokens, found, running.shared, running.hit.shared_tokens, storable
        )
        snapshots = snapshots_of(self.model, prompt)
        used = store_chunks(self.model, self.tiers, keys, prompt, snapshots)
        if self.hints is not None and hints is not None:
            self.hints.finished(request, hints, keys, used)
        steps = self.model.form.steps
        loaded_state = self.model.state is not None and any(running.hit.tier_tokens)
        if loaded_state and found % steps.block_tokens == 0 and steps.retains(found):
            snapshots.insert(0, found)  # a loaded snapshot is cached like a computed one
        self.cache.keep(request, block_keys, snapshots, running.shared)

    def _find(self, prompt: int, keys: RequestKeys, local: LocalPrefix) -> Hit:
        """Load the longest usable prefix of a prompt, as `connector.admission` chooses it."""
        if not self.model.completes_prefixes:
            return self._load(prompt, keys, local, local.resumable_tokens)
        hit = self._load(prompt, keys, local, local.tokens)
        if not local.needs_load or any(hit.tier_tokens):
            return hit
        found, begin = self._look_up(prompt, keys, local.resumable_tokens), local.resumable_tokens
        if found is not None and found.tokens > begin:  # then the engine uses fewer of its attention blocks
            begin = last_boundary_before(found.tokens, self.model.block_tokens)
        return self._load(prompt, keys, local, begin)

    def _load(self, prompt: int, keys: RequestKeys, local: LocalPrefix, begin: int) -> Hit:
        """Load the longest usable prefix, if it is longer than what the engine has.

        Args:
            begin: number of tokens of it before the load.
        """
        none = (0,) * len(self.tiers.tiers)
        found = self._look_up(prompt, keys, begin) if saves_computation(prompt - begin) else None
        if found is None:
            each = (local.resumable_tokens,) * len(self.model.groups)
            return Hit(local.resumable_tokens, none, none, local.tokens, each)
        tokens, sizes = none, none
        if found.tokens > begin:
            tokens, sizes = found.tier_tokens, self.tiers.load(found.wanted)
        return Hit(
            local_tokens=begin if found.tokens > begin else local.resumable_tokens,
            tier_tokens=tokens,
            tier_bytes=sizes,
            attention_tokens=max(local.tokens, found.attention_tokens) if self.model.attention else 0,
            group_tokens=found.group_tokens,
            shared_tokens=found.attention_tokens,
        )

    def _look_up(self, prompt: int, keys: RequestKeys, local_tokens: int) -> Found | None:
        self.tiers.has_asked = True
        return look_up(self.model, self.tiers.tiers, prompt, keys, local_tokens)
