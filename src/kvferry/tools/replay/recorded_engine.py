"""The settings of the engine that recorded a trace, from the header of the trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from kvferry.errors import ConfigError
from kvferry.tools.replay.model import ServedModel


class RecordedEngine(msgspec.Struct, frozen=True):
    """The settings of an engine that recorded a trace. A value is None if the header does not have it.

    Without tiers, the engine has no values of chunks and snapshots.

    Attributes:
        block_tokens: number of tokens per block, for each KV cache group.
        step_tokens: maximum number of tokens per step.
        snapshot_tokens: distance in tokens between kept windows and snapshots.
        first_snapshot_tokens: first position of a snapshot for shared prefixes; 0 for none.
        num_blocks: number of blocks in the engine's pool.
    """

    block_tokens: tuple[int, ...] | None = None
    step_tokens: int | None = None
    chunk_tokens: int | None = None
    snapshot_tokens: int | None = None
    first_snapshot_tokens: int | None = None
    num_blocks: int | None = None

    @property
    def common_block(self) -> int | None:
        """Number of tokens per block of all KV cache groups; None if unknown, or if the groups differ."""
        sizes = set(self.block_tokens or ())
        return sizes.pop() if len(sizes) == 1 else None


def recorded_engine(name: str, header: Mapping[str, object]) -> RecordedEngine:
    """Read the settings of an engine from the header of its trace, which is empty if no engine recorded it.

    Raises:
        ConfigError: a setting has another type.
    """
    try:
        return msgspec.convert(header, RecordedEngine)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: the header of the trace is damaged ({error}); record it again") from error


def with_blocks(model: ServedModel, block_tokens: int) -> ServedModel:
    """Return a model with the block size that an engine really had, in all its block tables."""
    # vLLM for CPUs chooses the blocks of models with recurrent state by other rules than on a GPU.
    groups = tuple(replace(group, block_tokens=block_tokens) for group in model.block_groups)
    steps = replace(model.form.steps, block_tokens=block_tokens)
    return replace(model, block_groups=groups, form=replace(model.form, steps=steps))
