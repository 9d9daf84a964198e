"""Descriptions of pages in which each head and token has its own bytes, whatever these bytes mean.

Some formats mix the elements of a vector: rotations, packed codes with their scales and offsets. Such pages
can still move between different block sizes and numbers of ranks if all data of a head and token is in one
contiguous range of bytes, here called a *cell*, which does not depend on the token's position in the block.
"""

from __future__ import annotations

from typing import Any

import torch

from kvferry.engines.vllm.content import scratch
from kvferry.engines.vllm.content.probe import scaled, unclaimed
from kvferry.engines.vllm.content.strides import Shard, Strides
from kvferry.geometry import Axis, Field


def cell_field(s: Strides, shard: Shard, name: str) -> Field | None:
    """Return the field of a page made of cells, with single bytes as elements; None if it is not."""
    # K and V may have entries of their own in the head axis.
    if s.slots != s.heads:
        return None
    axes = [
        Axis("token", ((s.kernel_blocks, s.kernel), (s.tokens, s.token))),
        Axis("content", ((s.content * s.item, 1),)),
    ]
    # A layer without V (such as MLA) caches one vector per token for all heads.
    if s.v:
        axes.insert(0, Axis("head", ((s.heads, s.slot),), shard.start, shard.total))
    return Field(name, 1, 0, tuple(axes))


def find_mismatch(layer: Any, tensor: torch.Tensor, s: Strides, field: Field) -> str:
    """Return why a layer's pages do not consist of cells, from writes to scratch blocks; empty if they do.

    The same vectors must produce the same cells for every token of a block. New input for some tokens or
    heads must change their cells and no others. Nothing may be written outside of the cells.
    """
    try:
        return (
            _moves_with_its_token(layer, tensor, s, field)
            or _keeps_to_its_cell(layer, tensor, s, field)
            or unclaimed(layer, tensor, s, (field,))
        )
    except Exception as error:  # noqa: BLE001 - pages that cannot be probed are not proved
        return f"its cache-write operation could not be run: {error}"


def _moves_with_its_token(layer: Any, tensor: torch.Tensor, s: Strides, field: Field) -> str:
    one = {name: value[:1].expand(value.shape) for name, value in _random(s, 0).items()}
    cells = _written(layer, tensor, s, scratch.Reader(s), field, one)
    if not torch.equal(cells, cells[:1].expand(cells.shape)):
        return "what is kept of a token depends on where in its block it stands"
    return ""


def _keeps_to_its_cell(layer: Any, tensor: torch.Tensor, s: Strides, field: Field) -> str:
    first, second = _random(s, 1), _random(s, 2)
    reader = scratch.Reader(s)
    before = _written(layer, tensor, s, reader, field, first)
    for dim, name in enumerate(("token", "head") if s.v else ("token",)):
        extent = (s.block_tokens, s.heads)[dim]
        # Any two tokens differ in a bit of their indices. So two writes per bit tell all of them apart: one
        # with new input where the bit is set, one where it is clear.
        for bit in range((extent - 1).bit_length()):
            for side in (0, 1):
                index = (torch.arange(extent) >> bit & 1) == side
                chosen = index.view((-1, 1, 1) if dim == 0 else (1, -1, 1))
                mixed = {key: torch.where(chosen, second[key], first[key]) for key in first}
                after = _written(layer, tensor, s, reader, field, mixed)
                changed = (after != before).flatten(2).any(dim=2)
                if not torch.equal(changed, chosen[..., 0].to(changed.device).expand(changed.shape)):
                    return f"what is kept of a {name} does not lie in its own bytes alone"
    return ""


def _written(
    layer: Any,
    tensor: torch.Tensor,
    s: Strides,
    reader: scratch.Reader,
    field: Field,
    inputs: scratch.Inputs,
) -> torch.Tensor:
    return reader.read(scratch.write(layer, tensor, s, scaled(layer, tensor, inputs)), field)


def _random(s: Strides, seed: int) -> scratch.Inputs:
    draw = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn((s.block_tokens, s.heads, width), generator=draw)
        for name, width in s.inputs.items()
    }
