"""Forecast of the storage in an engine's tiers: the size of chunks, and the storage that a prompt takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.errors import ConfigError, GeometryError
from kvferry.geometry import GroupKind
from kvferry.geometry.canonical import CanonicalForm, CanonicalGroup, canonical_form_of
from kvferry.geometry.canonical.length import check_windows, chunk_length, first_prefix, snapshot_interval
from kvferry.geometry.models import ModelReading
from kvferry.tools.plan.choices import SharedPrefix, StorageChoice, StoredPrompt
from kvferry.tools.plan.engine_memory import lay_out_engine
from kvferry.tools.plan.side import EngineSide, block_tokens, shape
from kvferry.tools.plan.snapshots import LAST_ONLY, STEP_TOKENS, SnapshotSteps
from kvferry.planning.snapshots import (
    bytes_of_snapshots,
    first_snapshot,
    snapshot_interval_of,
    snapshot_positions,
)
from kvferry.tiers.format.body import chunk_group
from kvferry.tiers.format.chunk import NAMESPACE_BYTES, Chunk

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
