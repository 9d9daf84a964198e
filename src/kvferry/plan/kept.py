"""A forecast of what an engine's tiers keep: chunks in the canonical form, and the storage of a prompt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.errors import ConfigError, GeometryError
from kvferry.geometry import GroupKind
from kvferry.geometry.canonical import CanonicalGroup, canonical_form_of
from kvferry.geometry.canonical.length import check_windows, chunk_length, first_prefix, snapshot_interval
from kvferry.geometry.layout import lay_out
from kvferry.geometry.models import ModelReading
from kvferry.plan.choices import StorageChoice, StoredPrompt
from kvferry.plan.side import EngineSide, block_tokens, shape
from kvferry.plan.snapshots import LAST_ONLY, STEP_TOKENS, SnapshotSteps
from kvferry.tiers.format.body import chunk_group
from kvferry.tiers.format.chunk import NAMESPACE_BYTES, Chunk

PROMPT_TOKENS = 128 << 10
_NAME = bytes(NAMESPACE_BYTES)


@dataclass(frozen=True, slots=True)
class KeptSettings:
    """Settings of the engine and of the tiers.

    Attributes:
        step_tokens, retention: as in `SnapshotSteps`.
        chunk_tokens, snapshot_tokens: settings of the connector, in tokens; None for its defaults.
        prompt: length in tokens of the prompt that is kept.
    """

    step_tokens: int = STEP_TOKENS
    retention: int | None = LAST_ONLY
    chunk_tokens: int | None = None
    snapshot_tokens: int | None = None
    prompt: int = PROMPT_TOKENS

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "snapshot_tokens", "prompt"):
            value = getattr(self, name)
            if value is not None and value < 1:
                flag = "kept-tokens" if name == "prompt" else name.replace("_", "-")
                raise ConfigError(f"--{flag} is {value}, it must be at least 1")


@dataclass(frozen=True, slots=True)
class KeptGroup:
    """A chunk of one group, or a snapshot.

    Attributes:
        group: the group, in the canonical form.
        layers: number of layers.
        file_bytes: bytes of its file, with header and padding.
    """

    group: CanonicalGroup
    layers: int
    file_bytes: int

    @property
    def is_state(self) -> bool:
        """True for a snapshot of recurrent state."""
        return self.group.kind is GroupKind.STATE


@dataclass(frozen=True, slots=True, kw_only=True)
class TierForecast:
    """The forecast of what the tiers keep.

    Attributes:
        prompt: length of the prompt in tokens.
        chunk_tokens: tokens of a chunk; 0 if nothing can be kept.
        first_tokens: tokens of the shortest prefix that can be loaded.
        groups: the chunk of each group.
        choices: the storage under the requested settings, then under alternatives.
        why_not: the reason why nothing is kept; empty if something is.
    """

    prompt: int
    chunk_tokens: int
    first_tokens: int
    groups: tuple[KeptGroup, ...]
    choices: tuple[StorageChoice, ...]
    why_not: str = ""


def keep(reading: ModelReading, side: EngineSide, asked: KeptSettings) -> TierForecast:
    """Return the forecast of what the tiers of an engine keep.

    Args:
        reading: the model.
        side: the engine.
        asked: the requested settings.

    Raises:
        ConfigError: vLLM or the connector would refuse the settings.
    """
    kinds = {store.kind for store in reading.cache.layers}
    _check_retention(kinds, asked.retention)
    steps = SnapshotSteps(block_tokens(reading, side)[0], asked.step_tokens, asked.retention)
    apart = snapshot_interval(*([steps.block_tokens] if GroupKind.STATE in kinds else []))
    block = steps.block_tokens if kinds & {GroupKind.SLIDING, GroupKind.CHUNKED} else 1
    chunk = chunk_length(asked.chunk_tokens, apart, block)
    check_windows(chunk, block)
    first = first_prefix(chunk, apart)
    try:
        canonical = canonical_form_of(lay_out(reading.cache, shape(reading, side, num_blocks=1)), chunk)
    except GeometryError as error:
        return TierForecast(
            prompt=asked.prompt, chunk_tokens=0, first_tokens=0, groups=(), choices=(), why_not=str(error)
        )
    groups = tuple(_group(group) for group in canonical.groups)
    prompt = StoredPrompt(canonical, tuple(group.file_bytes for group in groups), asked.prompt)
    choices = prompt.choices(steps, _every(asked.snapshot_tokens, chunk))
    if first > asked.prompt:
        why = f"the shortest loadable prefix has {first:,} tokens, the prompt has {asked.prompt:,}"
        return TierForecast(
            prompt=asked.prompt,
            chunk_tokens=chunk,
            first_tokens=first,
            groups=groups,
            choices=choices,
            why_not=why,
        )
    return TierForecast(
        prompt=asked.prompt, chunk_tokens=chunk, first_tokens=first, groups=groups, choices=choices
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


def _every(asked: int | None, chunk: int) -> int:
    every = asked or chunk
    if every % chunk:
        raise ConfigError(f"--snapshot-tokens is {every}; it must be a multiple of a chunk's {chunk} tokens")
    return every
