"""The settings of the engine that recorded a trace, from the header of the trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from kvferry.errors import ConfigError
from kvferry.replay.model import ServedModel


class RecordedEngine(msgspec.Struct, frozen=True):
    """The settings of an engine that recorded a trace. A value is None if the header does not have it.

    Attributes:
        block_tokens: number of tokens per block, for each KV cache group.
        step_tokens: maximum number of tokens per step.
        chunk_tokens: number of tokens per chunk; None also for an engine without tiers.
        snapshot_tokens: distance in tokens between kept windows and snapshots; None as for `chunk_tokens`.
        first_snapshot_tokens: first position of a snapshot for shared prefixes; 0 for none; None as for
            `chunk_tokens`.
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
    """Read the settings of an engine from the header of its trace.

    Args:
        name: name of the trace, for messages.
        header: header of the trace; empty for a trace that no engine recorded.

    Raises:
        ConfigError: a setting has another type.
    """
    try:
        return msgspec.convert(header, RecordedEngine)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: the header of the trace is damaged ({error}); record it again") from error


def with_blocks(model: ServedModel, block_tokens: int) -> ServedModel:
    """Return a model with the block size that an engine really had, in all its block tables.

    vLLM for CPUs chooses the blocks of models with recurrent state by other rules than on a GPU.

    Args:
        model: model and settings of an engine.
        block_tokens: number of tokens per block.
    """
    groups = tuple(replace(group, block_tokens=block_tokens) for group in model.block_groups)
    steps = replace(model.form.steps, block_tokens=block_tokens)
    return replace(model, block_groups=groups, form=replace(model.form, steps=steps))
