"""Strides of one layer's tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Shard:
    """The KV heads of this rank.

    Attributes:
        rank, ranks: tensor-parallel rank, and the number of ranks.
        start, total: first head held, and number of heads in all; total is 0 if the heads are not certain.
    """

    rank: int
    ranks: int
    start: int
    total: int


@dataclass(frozen=True, slots=True)
class Strides:
    """Shape and strides of one layer's tensor, in bytes.

    Attributes:
        item: bytes of an element.
        heads: KV heads of this rank.
        slots: head slots of a kernel block: one per head, or K and V of each head, or K and V of all heads.
        tokens: tokens of a kernel block.
        content: elements per slot and token.
        kernel_blocks: kernel blocks per manager block.
        kernel, slot, token: bytes from one kernel block, slot and token to the next.
        k, v: elements of K and of V per head and token, as the model computes them.
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
        """Tokens of a manager block."""
        return self.kernel_blocks * self.tokens


def strides_of(tensor: torch.Tensor, spec: Any, num_blocks: int) -> Strides:
    """Return the strides of a tensor of shape (kernel blocks, head slots, tokens, content)."""
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
