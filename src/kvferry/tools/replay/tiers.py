"""The simulated tiers of one engine: host memory and the storage behind it.

The rules are those of the serving code (`cache.chunk_cache`): every chunk passes through host memory, new
chunks are written to all slow tiers, and a chunk that was read from one slow tier is written to the faster
ones. Nothing is written to the host memory of other engines.

Copies, reads and writes end within the step that begins them. In an engine they may end later, and then a
request does not yet find a chunk, or a held chunk is ranked as the latest used at another time. The order of
evictions also differs slightly if one step stores or loads more than 16 chunks into host memory that cannot
hold the request, because a slow tier accepts only as many writes at a time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

from kvferry.geometry import GroupKind
from kvferry.geometry.canonical import content_alignment
from kvferry.planning import (
    MAX_CHUNKS_PER_ORDER,
    chunks_to_store,
    first_attended,
    first_needed_token,
    keeps_snapshot,
    last_prefix_ends,
    needed_chunks,
)
from kvferry.tiers import WriteFilter
from kvferry.tools.replay.content import RequestKeys
from kvferry.tools.replay.lookup import ReadableTier, SimulatedTier, Wanted
from kvferry.tools.replay.settings import ADMIT_ALL, AdmissionSetting, ServedModel
from kvferry.tools.replay.trace.base import MAX_TOKENS


class Run(NamedTuple):
    """Chunks of one KV cache group that a step of an engine completes."""

    group: int
    keys: Sequence[bytes]
    # Number of chunks, from the first one, that the engine has not computed anew. They need not be stored
    # where any tier has them.
    unchanged: int


class SimulatedTiers:
    """The tiers of one engine.

    Attributes:
        host: host memory.
        tiers: host memory, then the slow tiers, the fastest first. Engines may share slow tiers.
        has_asked: True if the engine has asked other engines for the chunks of the running request.
    """

    def __init__(
        self, host: SimulatedTier, slow: Sequence[ReadableTier], admission: AdmissionSetting = ADMIT_ALL
    ) -> None:
        self.tiers: tuple[ReadableTier, ...] = (host, *slow)
        self.host, self.has_asked = host, False
        # Tiers that store chunks, by number.
        self._storing = {n: tier for n, tier in enumerate(self.tiers) if isinstance(tier, SimulatedTier)}
        self._slow = {n: tier for n, tier in self._storing.items() if n}
        self._admission = admission
        self._filters = {
            n: WriteFilter[int](admission.min_uses, admission.min_prompt_tokens) for n in self._slow
        }

    def set_time(self, now: float) -> None:
        """Tell the slow tiers the time, in seconds since the start of the trace."""
        for tier in self._slow.values():
            tier.now = now

    def load(self, wanted: Wanted) -> tuple[int, ...]:
        """Count the reads of a prefix, and copy chunks of slow tiers into host memory."""
        keys, groups, tiers = wanted
        here = keys if not any(tiers) else [key for key, tier in zip(keys, tiers, strict=True) if not tier]
        self.host.policy.touch_all(here[::-1])
        sizes, sources = [0] * len(self.tiers), list(zip(groups, tiers, strict=True))
        for group, tier in set(sources):
            one = (group, tier)
            each = [key for key, source in zip(keys, sources, strict=True) if source == one]
            sizes[tier] += self.tiers[tier].count_reads(each, group)
        if len(here) < len(keys):
            self._fetch(here[::-1], [one for one in zip(keys, groups, tiers, strict=True) if one[2]])
        return tuple(sizes)

    def _fetch(self, here: Sequence[bytes], wanted: list[tuple[bytes, int, int]]) -> None:
        """Copy the chunks of a load from slow tiers into host memory, and into all faster slow tiers.

        Args:
            here: keys of chunks that the load reads from host memory.
            wanted: (key, group, tier) of the other chunks, in the order of the prompt.
        """
        host = self.host
        host.pin_all(here)
        # If host memory has no room for all, the ranks first copy what it has room for to the engine's
        # blocks. Then these chunks can be evicted to make room for the others.
        while wanted or here:
            sizes = [host.chunk_bytes[group] for _, group, _ in wanted]
            fitting = host.reserve([key for key, _, _ in wanted], sizes)
            if not (fitting or here):
                return
            written: list[bytes] = []
            arriving = sorted(wanted[:fitting], key=itemgetter(2))
            for (tier, group), each in groupby(arriving, itemgetter(2, 1)):
                names = [key for key, _, _ in each]
                host.admit(names, group)
                host.pin_all(names)
                for number in self._slow:
                    if number < tier:
                        written += self._write(number, group, self._admitted(number, group, names, None))
            host.unpin_all([key for key, _, _ in reversed(arriving)])
            host.unpin_all(here)
            host.policy.make_newest(written)
            here, wanted = [], wanted[fitting:]

    def _admitted(
        self, number: int, group: int, keys: Sequence[bytes], prompt_tokens: int | None
    ) -> list[bytes]:
        """Return the chunks, of those new in host memory, that the filter of a slow tier lets be written."""
        tier = self._slow[number]
        new = [(key, group) for key in tier.lacks(keys)]
        admitted = self._filters[number].admit(new, prompt_tokens, tier.budget_left)
        tier.counts[group].declined += len(new) - len(admitted)
        return [key for key, _ in admitted]

    def _write(
        self, number: int, group: int, keys: Sequence[bytes], cold: Collection[bytes] = ()
    ) -> list[bytes]:
        """Write admitted chunks to a slow tier. Return the keys of those within its budget."""
        written = self._slow[number].write(keys, group, cold)
        if len(written) < len(keys):
            for key in self._slow[number].lacks(keys):
                self._filters[number].put_back(key, group)
        return written

    def bring(self, key: bytes, group: int) -> None:
        """Copy a chunk from the fastest tier that has it into host memory, unless there is no room for it."""
        number = next((n for n, tier in enumerate(self.tiers) if key in tier.held), 0)
        if number:
            self.tiers[number].count_reads([key], group)
            self._fetch([], [(key, group, number)])

    def store(self, runs: Iterable[Run], prompt_tokens: int, cold: Collection[bytes] = ()) -> None:
        stored = self.host.store(self._pieces(runs), cold)
        for number in self._slow:
            # Before any is written, which may evict another one.
            each = [(group, self._admitted(number, group, keys, prompt_tokens)) for group, keys in stored]
            for group, admitted in each:
                written = self._write(number, group, admitted, cold)
                # A write pins the chunk while it lasts, and the end of the pin ranks it as the latest used.
                self.host.pin_all(written)
                self.host.unpin_all(written)

    def store_at_once(self, runs: Sequence[Run]) -> bool:
        """Store the chunks of all steps of a prompt, if the result is that of `store` for each step.

        Return False, and change nothing, if it is not.
        """
        if self._slow and self._admission != ADMIT_ALL:
            return False
        # It is if every tier has room and evicts by `LRU`, and no step evicts a chunk that a later step might
        # store. The order of stores makes no difference, because the caller calls `mark_used` next.
        new, kept = list(map(self._new, runs)), [run.keys for run in runs]
        stores = []
        for tier in self._storing.values():
            lacking = new if tier is self.host else list(map(tier.lacks, new))
            size = sum(
                [tier.chunk_bytes[run.group] * len(keys) for run, keys in zip(runs, lacking, strict=True)]
            )
            if not tier.fits_beside(size, kept):
                return False
            stores.append((tier, size, lacking))
        for tier, size, lacking in stores:
            tier.make_room(size)
            for run, keys in zip(runs, lacking, strict=True):
                tier.admit(keys, run.group)
        return True

    def _new(self, run: Run) -> list[bytes]:
        """Return the keys of a run that must be stored in host memory."""
        if len(self.tiers) == 1 or not run.unchanged:
            return self.host.lacks(run.keys)
        unchanged = self.host.lacks(run.keys[: run.unchanged])
        for tier in self.tiers[1:]:
            if unchanged and (self.has_asked or not tier.is_searched):
                unchanged = tier.lacks(unchanged)
        return [*unchanged, *self.host.lacks(run.keys[run.unchanged :])]

    def _pieces(self, runs: Iterable[Run]) -> Iterator[tuple[int, Sequence[bytes]]]:
        """Yield the new keys of each run in pieces, as an engine orders their stores."""
        for run in runs:
            new = self._new(run)
            for first in range(0, len(new), MAX_CHUNKS_PER_ORDER):
                yield run.group, new[first : first + MAX_CHUNKS_PER_ORDER]

    def mark_used(
        self, keys: Sequence[bytes], tokens: int, prompt_tokens: int, cold: Sequence[bytes] = ()
    ) -> None:
        """Rank the chunks of a request's first tokens as the latest used in every tier."""
        for tier in self._storing.values():
            tier.policy.mark_used(keys, tokens)
        if cold:
            self.host.policy.make_cold(cold)
        for number, tier in self._slow.items():
            for key, group in self._filters[number].use(keys, prompt_tokens, tier.budget_left):
                if key in self.host.held:
                    written = self._write(number, group, [key])
                    self.host.pin_all(written)
                    self.host.unpin_all(written)


class ComputedPrompt(NamedTuple):
    """A prompt that an engine has computed, and where it began."""

    tokens: int
    found: int  # number of tokens at its start that the engine had or loaded, less than `tokens`
    # Position up to which the engine had the attention blocks, but not all other blocks, of another prompt; 0
    # if there is none.
    shared: int
    # Length in tokens of the longest prefix whose full-attention chunks the tiers and the engine had at
    # look-up.
    shared_tokens: int
    storable: int = MAX_TOKENS  # number of tokens, from the start, whose chunks may be stored


def snapshots_of(model: ServedModel, prompt: ComputedPrompt) -> list[int]:
    """Return the positions at which the engine takes and retains snapshots; none without recurrent state."""
    if model.state is None:
        return []
    placed = _placed(model, prompt)
    return list(model.form.steps.positions(prompt.tokens, prompt.found, prompt.shared, placed))


def _placed(model: ServedModel, prompt: ComputedPrompt) -> tuple[int, ...]:
    """Return the positions at which the connector has the engine take snapshots, for shared prefixes."""
    # The engine tells the connector the attention blocks that it has, and then uses fewer of them.
    start = max(prompt.found, prompt.shared) if model.completes_prefixes else prompt.found
    return model.form.placed(prompt.tokens, start, prompt.shared_tokens)


def store_chunks(
    model: ServedModel,
    tiers: SimulatedTiers,
    keys: RequestKeys,
    prompt: ComputedPrompt,
    snapshots: Sequence[int],
) -> list[bytes]:
    """Store the chunks of a request that its engine has computed in `tiers`, and mark its prompt as used.

    Return the keys of the chunks that later prompts need.
    """
    size, state = model.chunk_tokens, model.state
    ends = last_prefix_ends(prompt.tokens, size, 0 if state is None else model.block_tokens)
    kept = [
        at
        for at in snapshots
        if at <= prompt.storable and keeps_snapshot(at, size, model.form.snapshot_tokens, ends)
    ]
    if state is None:
        used = keys.in_order(prompt.tokens)
    else:
        # A request passes over the snapshots between the one that it continued from and its own.
        ends_used = [at // size - 1 for at in {*kept, prompt.found} if at and at % size == 0]
        used = keys.in_order_with(state, ends_used)
    storable = [
        () if one.kind is GroupKind.STATE else _storable_chunks(model, group, keys, prompt.found, ends)
        for group, one in enumerate(model.groups)
    ]

    def runs_of(begin: int, end: int) -> list[Run]:
        runs = _attention_runs(model, keys, prompt, storable, (begin, end))
        if state is not None and (snapshots := [at for at in kept if begin < at <= end]):
            runs.append(Run(state, [keys.whole[state][at // size - 1] for at in snapshots], 0))
        return runs

    stored = min(keys.computed_tokens, prompt.storable) // size * size
    cold, unneeded = set[bytes](), dict[bytes, int]()
    generated = prompt.tokens // size  # number of the first chunk with generated tokens
    if model.has_cold_chunks:
        likely = (*ends, prompt.found, prompt.shared_tokens)
        unneeded = _unneeded(model, keys, (*likely, stored))
        before = unneeded if stored in likely else _unneeded(model, keys, likely)
        cold = {key for key, number in before.items() if number < generated}
    # The steps of a prompt usually leave what a single step would, and one is much faster.
    at_once = not (cold or unneeded)
    if not (at_once and tiers.store_at_once(runs_of(0, max(keys.computed_tokens, prompt.tokens)))):
        for begin, end in pairwise((0, *_step_ends(model, prompt, keys))):
            tiers.store(runs_of(begin, end), prompt.tokens, cold)
    if unneeded:
        used = [key for key in used if key not in unneeded]
    tiers.mark_used(
        used,
        max(keys.computed_tokens, prompt.tokens),
        prompt.tokens,
        cold=[key for key, number in unneeded.items() if number >= generated],
    )
    return used


def _step_ends(model: ServedModel, prompt: ComputedPrompt, keys: RequestKeys) -> Iterator[int]:
    """Yield the positions, in tokens, at which steps end that may complete chunks."""
    steps, size = model.form.steps, model.chunk_tokens
    if model.state is None:
        yield from range(prompt.found + steps.step_tokens, prompt.tokens, steps.step_tokens)
        yield prompt.tokens
    else:
        yield from steps.step_ends(prompt.tokens, prompt.found, prompt.shared, _placed(model, prompt))
    yield from range((prompt.tokens // size + 1) * size, keys.computed_tokens + 1, size)


def _attention_runs(
    model: ServedModel,
    keys: RequestKeys,
    prompt: ComputedPrompt,
    storable: Sequence[Sequence[int]],
    step: tuple[int, int],
) -> list[Run]:
    """Return the chunks that a step completes in groups of attention, for `SimulatedTiers.store`.

    Args:
        storable: chunks of the request that each group may store, ascending.
    """
    size = model.chunk_tokens
    first, last = (min(at, prompt.storable) // size for at in step)
    unchanged = (prompt.found + 1) // size
    tail = (
        prompt.tokens % size
        and step[0] < prompt.tokens <= min(step[1], prompt.storable)
        and model.state is None
    )
    runs: list[Run] = []
    for group, numbers in enumerate(storable):
        if some := numbers[bisect_left(numbers, first) : bisect_left(numbers, last)]:
            whole = keys.whole[group]
            dense = some[-1] - some[0] == len(some) - 1
            names = whole[some[0] : some[-1] + 1] if dense else [whole[number] for number in some]
            runs.append(Run(group, names, bisect_left(some, unchanged)))
        if tail:
            runs.append(Run(group, [keys.tail(prompt.tokens)[group]], int(prompt.tokens <= prompt.found + 1)))
    return runs


def _storable_chunks(
    model: ServedModel, group: int, keys: RequestKeys, found: int, ends: tuple[int, int]
) -> Sequence[int]:
    """Return the chunks of an attention group that are worth storing and in the engine's blocks."""
    one, size, every = model.groups[group], model.chunk_tokens, model.form.snapshot_tokens
    chunks = range(keys.computed_tokens // size)
    if not one.attention_span:
        return chunks
    # Of the first `found` tokens, the engine has only the last window.
    block = model.block_groups[group].block_tokens
    looked = max(int(first_attended(one, found)), 0) // block * block
    alignment = content_alignment(one, size)

    def needed(number: int) -> int:
        return first_needed_token(one, number * size, (number + 1) * size, alignment)

    in_blocks = chunks[bisect_left(chunks, looked, key=needed) if found else 0 :]
    return chunks_to_store(one, in_blocks, size, every, ends)


def _unneeded(model: ServedModel, keys: RequestKeys, ends: Iterable[int]) -> dict[bytes, int]:
    """Return the index of each whole chunk that no likely prefix needs, by key."""
    needed = needed_chunks(model.groups, model.chunk_tokens, ends)
    return {
        key: number
        for whole, some in zip(keys.whole, needed, strict=True)
        if some is not None
        for number, key in enumerate(whole)
        if number not in some
    }
