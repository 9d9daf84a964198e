"""Shape and strides of one layer's cache tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Shard:
    """KV heads of a layer that this rank holds.

    Attributes:
        rank, ranks: tensor-parallel rank, and number of ranks.
        start: index of the first head on this rank, over all ranks.
        total: number of heads over all ranks, without copies; 0 if the heads are uncertain.
    """

    rank: int
    ranks: int
    start: int
    total: int


@dataclass(frozen=True, slots=True)
class Strides:
    """Shape and strides of one layer's cache tensor.

    Attributes:
        item: bytes per element.
        heads: number of KV heads on this rank.
        slots: number of head slots of a kernel block: one per head, or K and V of each head, or K and V of
            all heads.
        tokens: number of tokens of a kernel block.
        content: number of elements per slot and token.
        kernel_blocks: number of kernel blocks per manager block.
        kernel, slot, token: bytes from one kernel block, slot or token to the next.
        k, v: number of elements of K and of V per head and token, as the model computes them.
    """

    item: int
    heads: int
    slots: int
    tokens: int
    content: int
    kernel_blocks: int
    kernel: int
    slot: int
    token: int
    k: int
    v: int

    @property
    def block_tokens(self) -> int:
        """Number of tokens of a manager block."""
        return self.kernel_blocks * self.tokens


def strides_of(tensor: torch.Tensor, spec: Any, num_blocks: int) -> Strides:
    """Return the strides of a cache tensor.

    Args:
        tensor: cache of a layer, (kernel blocks, head slots, tokens, content).
        spec: KV cache spec of the layer.
        num_blocks: number of manager blocks in the cache.
    """
    item = tensor.element_size()
    kernel, slot, token, _ = (stride * item for stride in tensor.stride())
    blocks, slots, tokens, content = tensor.shape
    heads, k, v = spec.num_kv_heads, spec.head_size, spec.head_size_v
    return Strides(
        item=item,
        heads=heads,
        slots=slots,
        tokens=tokens,
        content=content,
        kernel_blocks=blocks // num_blocks,
        kernel=kernel,
        slot=slot,
        token=token,
        k=k,
        v=v,
    )
