"""Forecast of the storage in an engine's tiers: the size of chunks, and the storage that a prompt takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from kvferry.common.errors import ConfigError, GeometryError
from kvferry.geometry import GroupKind
from kvferry.geometry.canonical import (
    CanonicalForm,
    CanonicalGroup,
    canonical_form_of,
    check_blocks,
    chunk_length,
    first_prefix,
    snapshot_interval,
    whole_block_tokens,
)
from kvferry.planning import (
    Bools,
    ChunkedPrompt,
    bytes_of_snapshots,
    chunks_to_load,
    chunks_to_store,
    first_snapshot,
    keeps_snapshot,
    last_prefix_ends,
    snapshot_interval_of,
    snapshot_positions,
)
from kvferry.tiers import NAMESPACE_BYTES, Chunk, chunk_group
from kvferry.tools.models import ModelReading
from kvferry.tools.plan.blocks import LAST_ONLY, STEP_TOKENS, SnapshotSteps
from kvferry.tools.plan.contents import lay_out_engine
from kvferry.tools.plan.side import EngineSide, block_tokens, shape

# Default length in tokens of the prompt whose storage is forecast.
PROMPT_TOKENS = 128 << 10
# Lengths in tokens of the shared prefixes in the forecast.
SHARED_TOKENS = (2048, 8192, 32_768)
# Distances in chunks between the positions at which windows are stored, for alternatives with fewer.
_THINNED = (16, 128)
_NAME = bytes(NAMESPACE_BYTES)


@dataclass(frozen=True, slots=True)
class KeptSettings:
    """The requested settings of an engine and its tiers, for a forecast of what the tiers store."""

    step_tokens: int = STEP_TOKENS
    # Number of tokens between the snapshots that the engine retains (``prefix_cache_retention_interval``); 0
    # to retain only the last snapshot, None to retain all.
    retention: int | None = LAST_ONLY
    chunk_tokens: int | None = None  # None for the connector's default
    # Number of tokens between the positions at which windows and snapshots are stored; None to store them at
    # the end of every chunk.
    snapshot_tokens: int | None = None
    prompt: int = PROMPT_TOKENS
    # First position of a snapshot for shared prefixes; 0 for none, None for the connector's default.
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
    """The format of a stored chunk of one KV cache group, and its file's size with header and padding."""

    group: CanonicalGroup
    layers: int
    file_bytes: int

    @property
    def is_state(self) -> bool:
        return self.group.kind is GroupKind.STATE


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredForm:
    """The form in which an engine's tiers store a model's KV, and the settings that decide it."""

    canonical: CanonicalForm
    steps: SnapshotSteps
    snapshot_tokens: int
    first_tokens: int
    # Requested first position of a snapshot for shared prefixes; None for the connector's default.
    requested_first: int | None = None

    @property
    def groups(self) -> tuple[KeptGroup, ...]:
        return tuple(map(_kept_group, self.canonical.groups))

    @property
    def has_state(self) -> bool:
        return any(group.kind is GroupKind.STATE for group in self.canonical.groups)

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


def _kept_group(group: CanonicalGroup) -> KeptGroup:
    layers = {part.layer for section in group.sections for part in section.parts}
    tokens = max(section.tokens for section in group.sections)
    return KeptGroup(group, len(layers), Chunk(_NAME, _NAME, (chunk_group(group, tokens),)).file_bytes)


def stored_form(reading: ModelReading, side: EngineSide, settings: KeptSettings) -> StoredForm:
    """Return the form in which an engine's tiers store a model's KV. `KeptSettings.prompt` has no effect."""
    kinds = {cache.kind for cache in reading.cache.layers}
    if settings.retention and not kinds & {GroupKind.SLIDING, GroupKind.STATE}:
        raise ConfigError(
            f"--retention is {settings.retention}; vLLM takes 0 or None for a model without windows or "
            "recurrent state"
        )
    steps = SnapshotSteps(block_tokens(reading, side)[0], settings.step_tokens, settings.retention)
    # vLLM uses one block size for all groups of a model with recurrent state.
    interval = snapshot_interval(*([steps.block_tokens] if GroupKind.STATE in kinds else []))
    # The form does not depend on the pool, so the smallest one will do.
    ranks = lay_out_engine(reading, side, num_blocks=1)
    block = whole_block_tokens(ranks)
    chunk = chunk_length(settings.chunk_tokens, interval, block)
    check_blocks(chunk, block)
    every = settings.snapshot_tokens or chunk
    if every % chunk:
        raise ConfigError(f"--snapshot-tokens is {every}; it must be a multiple of a chunk's {chunk} tokens")
    return StoredForm(
        canonical=canonical_form_of(ranks, chunk),
        steps=steps,
        snapshot_tokens=every,
        first_tokens=first_prefix(chunk, interval),
        requested_first=settings.first_snapshot_tokens,
    )


@dataclass(frozen=True, slots=True)
class StorageChoice:
    """The storage that a prompt's KV takes in a tier under given settings."""

    steps: SnapshotSteps
    snapshot_tokens: int
    snapshots: int
    chunks: int  # of all groups, with the snapshots
    bytes: int
    # Largest distance in tokens between the ends of two successive loadable prefixes, with the start and the
    # end of the prompt. Of a prefix shared with another prompt, the engine recomputes at most this many
    # tokens.
    gap_tokens: int


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The tokens that prompts load of a prefix that they share, from tiers with room for all prompts."""

    tokens: int
    second: int  # number of these tokens that the second prompt with this prefix loads
    third: int  # the same for the third prompt and all later ones
    without: int  # the same for every prompt, if the setting `first_snapshot_tokens` is 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TierForecast:
    """A forecast of the storage that a prompt's KV takes in an engine's tiers.

    Numbers are 0 and tuples are empty if this model's KV cannot be stored.
    """

    prompt: int
    chunk_tokens: int = 0
    first_tokens: int = 0
    groups: tuple[KeptGroup, ...] = ()
    # Storage under the requested settings, followed by the storage under alternative settings.
    choices: tuple[StorageChoice, ...] = ()
    # Tokens that prompts load of a shared prefix, by its length; empty for a model without recurrent state.
    shared: tuple[SharedPrefix, ...] = ()
    first_snapshot_tokens: int = 0
    # Reason why the KV cannot be stored, or why no prefix of the prompt can be loaded; empty if a prefix can
    # be loaded.
    why_not: str = ""


def forecast_tiers(reading: ModelReading, side: EngineSide, settings: KeptSettings) -> TierForecast:
    """Forecast the storage that a prompt's KV takes in an engine's tiers."""
    shape(reading, side, num_blocks=1)  # raises for heads that cannot be distributed
    prompt = settings.prompt
    try:
        form = stored_form(reading, side, settings)
    except GeometryError as error:
        return TierForecast(prompt=prompt, why_not=str(error))
    first, why = form.first_tokens, ""
    if first > prompt:
        why = f"the shortest loadable prefix has {first:,} tokens, the prompt has {prompt:,}"
    return TierForecast(
        prompt=prompt,
        chunk_tokens=form.canonical.chunk_tokens,
        first_tokens=first,
        groups=form.groups,
        choices=_choices(form, prompt),
        shared=tuple(_shared_prefixes(form, prompt)) if form.has_state else (),
        first_snapshot_tokens=form.first_snapshot_tokens,
        why_not=why,
    )


def _choices(form: StoredForm, prompt: int) -> tuple[StorageChoice, ...]:
    """Return the storage that a prompt takes under the given settings, and under alternative settings.

    Under the alternatives, the engine takes more snapshots. Without recurrent state, windows are stored at
    fewer positions instead. An alternative with the same `bytes` and `gap_tokens` as the one before is left
    out.
    """
    forms = [form]
    if form.has_state:
        forms = [replace(form, steps=steps) for steps in settings_with_more_snapshots(form.steps)]
    elif any(group.attention_span for group in form.canonical.groups):
        thinned = (chunks * form.canonical.chunk_tokens for chunks in _THINNED)
        forms += [replace(form, snapshot_tokens=n) for n in thinned if n > form.snapshot_tokens]
    found = [_choice(one, prompt) for one in forms]
    sizes = [(one.bytes, one.gap_tokens) for one in found]
    return tuple(one for n, one in enumerate(found) if n == 0 or sizes[n] != sizes[n - 1])


def settings_with_more_snapshots(steps: SnapshotSteps) -> tuple[SnapshotSteps, ...]:
    """Return the given settings, then settings under which an engine takes more snapshots."""
    dense = replace(steps, retention=None)
    quarter = max(steps.aligned_step_tokens // 4 // steps.block_tokens, 1) * steps.block_tokens
    finer = (replace(dense, step_tokens=tokens) for tokens in (quarter, steps.block_tokens))
    return (steps, dense, *finer)


def _choice(form: StoredForm, prompt: int) -> StorageChoice:
    stored, groups = _stored_chunks(form, prompt), form.groups
    counts = stored.sum(axis=1).tolist()
    tail = 0 if form.has_state or prompt % form.canonical.chunk_tokens == 0 else 1
    each = list(zip(counts, groups, strict=True))
    ends = [0, *_loadable_prefixes(form.canonical, stored), prompt]
    return StorageChoice(
        steps=form.steps,
        snapshot_tokens=form.snapshot_tokens,
        snapshots=sum(count for count, group in each if group.is_state),
        chunks=sum(count + tail for count in counts),
        bytes=sum((count + tail) * group.file_bytes for count, group in each),
        gap_tokens=max(high - low for low, high in pairwise(ends)),
    )


def _shared_prefixes(form: StoredForm, prompt: int) -> Iterator[SharedPrefix]:
    """Yield the tokens that prompts load of each of `SHARED_TOKENS` that is shorter than this prompt."""
    # Without recurrent state, prompts load all whole chunks of a shared prefix.
    ends, alone = (
        list(_loadable_prefixes(form.canonical, _stored_chunks(one, prompt)))
        for one in (form, replace(form, requested_first=0))
    )
    for tokens in SHARED_TOKENS:
        if tokens < prompt:
            # The second prompt continues from the first one's last snapshot in the shared prefix, and
            # leaves one for the third where it departs from the first.
            second, without = (max((end for end in of if end <= tokens), default=0) for of in (ends, alone))
            left = [at for at in form.placed(prompt, second, tokens) if at <= tokens]
            yield SharedPrefix(tokens, second, max(left, default=second), without)


def _stored_chunks(form: StoredForm, prompt: int) -> Bools:
    """Return a mask that is True for a prompt's stored chunks, bool of shape (groups, chunks).

    An incomplete chunk at the prompt's end has no entry. In a group of recurrent state, an entry is that of
    the snapshot at the end of the chunk.
    """
    groups, chunk, every = form.canonical.groups, form.canonical.chunk_tokens, form.snapshot_tokens
    ends = last_prefix_ends(prompt, chunk, form.steps.block_tokens if form.has_state else 0)
    found = np.zeros((len(groups), prompt // chunk), np.bool_)
    for row, group in zip(found, groups, strict=True):
        if group.kind is GroupKind.STATE:
            taken = form.steps.positions(prompt, placed=form.placed(prompt))
            row[[n // chunk - 1 for n in taken if keeps_snapshot(n, chunk, every, ends)]] = True
        else:
            row[chunks_to_store(group, range(len(row)), chunk, every, ends)] = True
    return found


def _loadable_prefixes(canonical: CanonicalForm, stored: Bools) -> Iterator[int]:
    """Yield the lengths of the prefixes whose chunks are stored in every group, shortest first."""
    tokens = stored.shape[1] * canonical.chunk_tokens
    cut = ChunkedPrompt(tokens, canonical.chunk_tokens, tokens + 1)
    for end in cut.boundaries.tolist():
        takes = chunks_to_load(canonical.groups, cut, end)
        if all(row[numbers].all() for row, numbers in zip(stored, takes, strict=True)):
            yield end
