"""Forecast of the storage in an engine's tiers: the size of chunks, and the storage that a prompt takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from kvferry.common.errors import ConfigError, GeometryError
from kvferry.geometry import GroupKind
from kvferry.geometry.canonical import CanonicalForm, CanonicalGroup, canonical_form_of
from kvferry.geometry.canonical.derive import check_windows, chunk_length, first_prefix, snapshot_interval
from kvferry.geometry.models import ModelReading
from kvferry.planning.coverage import Bools, ChunkedPrompt, chunks_to_load
from kvferry.planning.retention import (
    bytes_of_snapshots,
    first_snapshot,
    keeps_chunk,
    keeps_snapshot,
    last_prefix_ends,
    snapshot_interval_of,
    snapshot_positions,
)
from kvferry.tiers.format.chunk import NAMESPACE_BYTES, Chunk
from kvferry.tiers.format.decode import chunk_group
from kvferry.tools.plan.blocks import LAST_ONLY, STEP_TOKENS, SnapshotSteps
from kvferry.tools.plan.contents import lay_out_engine
from kvferry.tools.plan.side import EngineSide, block_tokens, shape

# Distances in chunks between the positions at which windows are stored, for alternatives with fewer.
_THINNED = (16, 128)

# Lengths in tokens of the shared prefixes in the forecast.
SHARED_TOKENS = (2048, 8192, 32_768)


@dataclass(frozen=True, slots=True)
class StorageChoice:
    """The storage that a prompt's KV takes in a tier under given settings.

    Attributes:
        snapshot_tokens: number of tokens between the positions at which windows and snapshots are stored.
        snapshots: number of snapshots that are stored.
        bytes: total size of all chunk files.
        gap_tokens: largest distance in tokens between the ends of two successive loadable prefixes, with the
            start and the end of the prompt. Of a prefix shared with another prompt, the engine recomputes at
            most this many tokens.
    """

    steps: SnapshotSteps
    snapshot_tokens: int
    snapshots: int
    bytes: int
    gap_tokens: int


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The tokens that prompts load of a prefix that they share, from tiers with room for all prompts.

    Attributes:
        tokens: length of the shared prefix in tokens.
        second: number of these tokens that the second prompt with this prefix loads.
        third: the same for the third prompt and all later ones.
        without: the same for every prompt, if the setting `first_snapshot_tokens` is 0.
    """

    tokens: int
    second: int
    third: int
    without: int


@dataclass(frozen=True, slots=True)
class StoredPrompt:
    """A prompt whose KV the tiers store, in chunks with a fixed number of tokens.

    Attributes:
        file_bytes: size in bytes of a chunk's file, for each KV cache group.
        placed: positions in tokens at which kvferry has the engine take snapshots, for shared prefixes.
    """

    canonical: CanonicalForm
    file_bytes: tuple[int, ...]
    tokens: int
    placed: tuple[int, ...] = ()

    @property
    def has_state(self) -> bool:
        return any(group.kind is GroupKind.STATE for group in self.canonical.groups)

    def loadable_prefixes(self, steps: SnapshotSteps, every: int) -> list[int]:
        """Return the lengths, in tokens, of the prompt's loadable prefixes, ascending."""
        return [*self._loadable_prefixes(self._kept_chunks(steps, every))]

    def choices(self, steps: SnapshotSteps, every: int) -> tuple[StorageChoice, ...]:
        """Return the storage that the prompt takes under the given settings, and under alternative settings.

        Under the alternatives, the engine takes more snapshots. Without recurrent state, windows are stored
        at fewer positions instead. An alternative with the same `bytes` and `gap_tokens` as the one before is
        left out.

        Args:
            every: number of tokens between the positions at which windows and snapshots are stored.
        """
        settings = (
            [(one, every) for one in settings_with_more_snapshots(steps)]
            if self.has_state
            else self._with_fewer_windows(steps, every)
        )
        found = [self._choice(*each) for each in settings]
        sizes = [(one.bytes, one.gap_tokens) for one in found]
        return tuple(one for n, one in enumerate(found) if n == 0 or sizes[n] != sizes[n - 1])

    def shared_prefixes(
        self, steps: SnapshotSteps, every: int, placed: Callable[[int, int, int], Iterable[int]]
    ) -> Iterator[SharedPrefix]:
        """Yield the tokens that prompts load of each of `SHARED_TOKENS` that is shorter than this prompt.

        Nothing without recurrent state: prompts then load all whole chunks of a shared prefix.

        Args:
            every: number of tokens between the positions at which snapshots are stored.
            placed: `StoredForm.placed`.
        """
        if not self.has_state:
            return
        alone = replace(self, placed=()).loadable_prefixes(steps, every)
        ends = self.loadable_prefixes(steps, every)
        for tokens in SHARED_TOKENS:
            if tokens < self.tokens:
                # The second prompt continues from the first one's last snapshot in the shared prefix, and
                # leaves one for the third where it departs from the first.
                second, without = (
                    max((end for end in of if end <= tokens), default=0) for of in (ends, alone)
                )
                left = [at for at in placed(self.tokens, second, tokens) if at <= tokens]
                yield SharedPrefix(tokens, second, max(left, default=second), without)

    def _with_fewer_windows(self, steps: SnapshotSteps, every: int) -> Iterator[tuple[SnapshotSteps, int]]:
        """Yield (steps, every) of the given settings, then of settings that store fewer windows."""
        yield steps, every
        if any(group.attention_span for group in self.canonical.groups):
            thinned = (chunks * self.canonical.chunk_tokens for chunks in _THINNED)
            yield from ((steps, tokens) for tokens in thinned if tokens > every)

    def _choice(self, steps: SnapshotSteps, every: int) -> StorageChoice:
        kept_chunks = self._kept_chunks(steps, every)
        kept = kept_chunks.sum(axis=1).tolist()
        tail = 0 if self.has_state or self.tokens % self.canonical.chunk_tokens == 0 else 1
        total = sum((count + tail) * each for count, each in zip(kept, self.file_bytes, strict=True))
        state = [group.kind is GroupKind.STATE for group in self.canonical.groups]
        snapshots = sum(count for count, is_state in zip(kept, state, strict=True) if is_state)
        ends = [0, *self._loadable_prefixes(kept_chunks), self.tokens]
        return StorageChoice(steps, every, snapshots, total, max(high - low for low, high in pairwise(ends)))

    def _kept_chunks(self, steps: SnapshotSteps, every: int) -> Bools:
        """Return a mask that is True for the prompt's stored chunks, bool of shape (groups, chunks).

        An incomplete chunk at the prompt's end has no entry. In a group of recurrent state, an entry is that
        of the snapshot at the end of the chunk.
        """
        chunk = self.canonical.chunk_tokens
        ends = last_prefix_ends(self.tokens, chunk, steps.block_tokens if self.has_state else 0)
        found = np.zeros((len(self.canonical.groups), self.tokens // chunk), np.bool_)
        for row, group in zip(found, self.canonical.groups, strict=True):
            if group.kind is GroupKind.STATE:
                taken = steps.positions(self.tokens, placed=self.placed)
                left = (n for n in taken if keeps_snapshot(n, chunk, every, ends))
                row[[n // chunk - 1 for n in left]] = True
            else:
                row[:] = [keeps_chunk(group, n, chunk, every, ends) for n in range(len(row))]
        return found

    def _loadable_prefixes(self, kept_chunks: Bools) -> Iterator[int]:
        """Yield the lengths of the prefixes whose chunks are stored in every group, shortest first."""
        tokens = kept_chunks.shape[1] * self.canonical.chunk_tokens
        cut = ChunkedPrompt(tokens, self.canonical.chunk_tokens, tokens + 1)
        for end in cut.boundaries.tolist():
            takes = chunks_to_load(self.canonical.groups, cut, end)
            if all(row[numbers].all() for row, numbers in zip(kept_chunks, takes, strict=True)):
                yield end


def settings_with_more_snapshots(steps: SnapshotSteps) -> tuple[SnapshotSteps, ...]:
    """Return the given settings, then settings under which an engine takes more snapshots."""
    dense = replace(steps, retention=None)
    quarter = max(steps.aligned_step_tokens // 4 // steps.block_tokens, 1) * steps.block_tokens
    finer = (replace(dense, step_tokens=tokens) for tokens in (quarter, steps.block_tokens))
    return (steps, dense, *finer)


# Default length in tokens of the prompt whose storage is forecast.
PROMPT_TOKENS = 128 << 10
_NAME = bytes(NAMESPACE_BYTES)


@dataclass(frozen=True, slots=True)
class KeptSettings:
    """The requested settings of an engine and its tiers, for a forecast of what the tiers store.

    Attributes:
        step_tokens: maximum number of tokens per engine step (``max_num_batched_tokens``).
        retention: number of tokens between the snapshots that the engine retains
            (``prefix_cache_retention_interval``); 0 to retain only the last snapshot, None to retain all.
        chunk_tokens: None for the connector's default.
        snapshot_tokens: number of tokens between the positions at which windows and snapshots are stored;
            None to store them at the end of every chunk.
        prompt: length in tokens of the prompt that is stored.
        first_snapshot_tokens: first position of a snapshot for shared prefixes; 0 for none, None for the
            connector's default.
    """

    step_tokens: int = STEP_TOKENS
    retention: int | None = LAST_ONLY
    chunk_tokens: int | None = None
    snapshot_tokens: int | None = None
    prompt: int = PROMPT_TOKENS
    first_snapshot_tokens: int | None = None

    def __post_init__(self) -> None:
        if (first := self.first_snapshot_tokens) is not None and first < 0:
            raise ConfigError(f"--first-snapshot-tokens is {first}, it must be at least 0")
        for name in ("chunk_tokens", "snapshot_tokens", "prompt"):
            value = getattr(self, name)
            if value is not None and value < 1:
                flag = "kept-tokens" if name == "prompt" else name.replace("_", "-")
                raise ConfigError(f"--{flag} is {value}, it must be at least 1")


@dataclass(frozen=True, slots=True)
class KeptGroup:
    """The format and the file size of a stored chunk of one KV cache group.

    Attributes:
        layers: number of layers in the group.
        file_bytes: size of a chunk's file, with header and padding.
    """

    group: CanonicalGroup
    layers: int
    file_bytes: int

    @property
    def is_state(self) -> bool:
        """True if a chunk of the group is a snapshot."""
        return self.group.kind is GroupKind.STATE


@dataclass(frozen=True, slots=True, kw_only=True)
class TierForecast:
    """A forecast of the storage that a prompt's KV takes in an engine's tiers.

    Numbers are 0 and tuples are empty if this model's KV cannot be stored.

    Attributes:
        prompt: length of the prompt in tokens.
        first_tokens: length in tokens of the shortest prefix that can be loaded.
        choices: storage under the requested settings, followed by the storage under alternative settings.
        shared: tokens that prompts load of a shared prefix, by its length; empty for a model without
            recurrent state.
        first_snapshot_tokens: first position of a snapshot for shared prefixes, in tokens; 0 for none.
        why_not: reason why the KV cannot be stored, or why no prefix of the prompt can be loaded; empty if a
            prefix can be loaded.
    """

    prompt: int
    chunk_tokens: int
    first_tokens: int
    groups: tuple[KeptGroup, ...]
    choices: tuple[StorageChoice, ...]
    shared: tuple[SharedPrefix, ...] = ()
    first_snapshot_tokens: int = 0
    why_not: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredForm:
    """The form in which an engine's tiers store a model's KV, and the settings that decide what they store.

    Attributes:
        snapshot_tokens: number of tokens between the positions at which windows and snapshots are stored.
        first_tokens: length in tokens of the shortest prefix that can be loaded.
        requested_first: requested first position of a snapshot for shared prefixes; None for the connector's
            default.
    """

    canonical: CanonicalForm
    groups: tuple[KeptGroup, ...]
    steps: SnapshotSteps
    snapshot_tokens: int
    first_tokens: int
    requested_first: int | None = None

    @property
    def first_snapshot_tokens(self) -> int:
        """First position of a snapshot for shared prefixes, in tokens; 0 for none."""
        state_bytes, token_bytes = bytes_of_snapshots(self.canonical)
        if not state_bytes:
            return 0
        return first_snapshot(self.requested_first, self._interval, state_bytes, token_bytes)

    @property
    def _interval(self) -> int:
        return snapshot_interval_of(self.steps.block_tokens, self.snapshot_tokens)

    def placed(self, prompt: int, start: int = 0, shared: int = 0) -> tuple[int, ...]:
        """Return the positions at which kvferry has the engine take snapshots (`snapshot_positions`)."""
        return snapshot_positions(prompt, start, shared, self.first_snapshot_tokens, self._interval)


def stored_form(reading: ModelReading, side: EngineSide, settings: KeptSettings) -> StoredForm:
    """Return the form in which an engine's tiers store a model's KV.

    Args:
        settings: requested settings of the engine and the tiers. `KeptSettings.prompt` has no effect.

    Raises:
        ConfigError: vLLM or the connector would reject the settings.
        GeometryError: the heads cannot be distributed evenly over the ranks, or the KV cannot be stored.
    """
    kinds = {cache.kind for cache in reading.cache.layers}
    _check_retention(kinds, settings.retention)
    steps = SnapshotSteps(block_tokens(reading, side)[0], settings.step_tokens, settings.retention)
    # vLLM uses one block size for all groups of a model with recurrent state.
    interval = snapshot_interval(*([steps.block_tokens] if GroupKind.STATE in kinds else []))
    block = steps.block_tokens if kinds & {GroupKind.SLIDING, GroupKind.CHUNKED} else 1
    chunk = chunk_length(settings.chunk_tokens, interval, block)
    check_windows(chunk, block)
    every = _snapshot_tokens(settings.snapshot_tokens, chunk)
    # The form does not depend on the pool, so the smallest one will do.
    canonical = canonical_form_of(lay_out_engine(reading, side, num_blocks=1), chunk)
    return StoredForm(
        canonical=canonical,
        groups=tuple(_group(group) for group in canonical.groups),
        steps=steps,
        snapshot_tokens=every,
        first_tokens=first_prefix(chunk, interval),
        requested_first=settings.first_snapshot_tokens,
    )


def forecast_tiers(reading: ModelReading, side: EngineSide, settings: KeptSettings) -> TierForecast:
    """Forecast the storage that a prompt's KV takes in an engine's tiers.

    Raises:
        ConfigError: vLLM or the connector would reject the settings.
        GeometryError: the heads cannot be distributed evenly over the ranks.
    """
    shape(reading, side, num_blocks=1)  # raises for heads that cannot be distributed
    try:
        form = stored_form(reading, side, settings)
    except GeometryError as error:
        return TierForecast(
            prompt=settings.prompt, chunk_tokens=0, first_tokens=0, groups=(), choices=(), why_not=str(error)
        )
    sizes = tuple(group.file_bytes for group in form.groups)
    prompt = StoredPrompt(form.canonical, sizes, settings.prompt, form.placed(settings.prompt))
    first, why = form.first_tokens, ""
    if first > settings.prompt:
        why = f"the shortest loadable prefix has {first:,} tokens, the prompt has {settings.prompt:,}"
    return TierForecast(
        prompt=settings.prompt,
        chunk_tokens=form.canonical.chunk_tokens,
        first_tokens=first,
        groups=form.groups,
        choices=prompt.choices(form.steps, form.snapshot_tokens),
        shared=tuple(prompt.shared_prefixes(form.steps, form.snapshot_tokens, form.placed)),
        first_snapshot_tokens=form.first_snapshot_tokens,
        why_not=why,
    )


def _check_retention(kinds: Iterable[GroupKind], retention: int | None) -> None:
    if retention and GroupKind.SLIDING not in kinds and GroupKind.STATE not in kinds:
        raise ConfigError(
            f"--retention is {retention}; vLLM takes 0 or None for a model without windows or recurrent state"
        )


def _group(group: CanonicalGroup) -> KeptGroup:
    layers = {part.layer for section in group.sections for part in section.parts}
    tokens = max(section.tokens for section in group.sections)
    return KeptGroup(group, len(layers), Chunk(_NAME, _NAME, (chunk_group(group, tokens),)).file_bytes)


def _snapshot_tokens(requested: int | None, chunk: int) -> int:
    tokens = requested or chunk
    if tokens % chunk:
        raise ConfigError(f"--snapshot-tokens is {tokens}; it must be a multiple of a chunk's {chunk} tokens")
    return tokens
