"""Shape and strides of one layer's cache tensor, the heads that it holds, and its scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvferry.geometry import Scale


@dataclass(frozen=True, slots=True)
class Shard:
    """Range of a layer's KV heads that a tensor-parallel rank holds."""

    rank: int
    ranks: int
    start: int  # index of its first head among all heads of the layer
    total: int  # number of heads of the layer, without copies; 0 if it is uncertain which the rank holds


@dataclass(frozen=True, slots=True)
class Strides:
    """Shape and strides of one layer's cache tensor.

    A block of vLLM's block tables consists of one or more kernel blocks. A head slot is an entry of the
    tensor's head axis.

    Attributes:
        slots: number of head slots of a kernel block. There is one slot per head, or one for K and one for V
            of each head, or one for K and one for V of all heads.
    """

    item: int  # bytes per element
    heads: int  # number of KV heads on this rank
    slots: int
    tokens: int  # number of tokens of a kernel block
    content: int  # number of elements per head slot and token
    kernel_blocks: int  # number of kernel blocks per block
    kernel: int  # bytes from one kernel block, head slot or token to the next
    slot: int
    token: int
    k: int  # elements of K and V per head and token, before they are packed or quantised; 0 without V
    v: int

    @property
    def block_tokens(self) -> int:
        return self.kernel_blocks * self.tokens

    @property
    def inputs(self) -> dict[str, int]:
        """Elements per head and token of each input of a cache write: ``k`` and, if any, ``v``."""
        return {name: width for name, width in (("k", self.k), ("v", self.v)) if width}


def strides_of(tensor: torch.Tensor, spec: Any, num_blocks: int) -> Strides:
    """Return shape and strides of a cache tensor of (kernel blocks, head slots, tokens, content)."""
    item = tensor.element_size()
    kernel, slot, token, _ = (stride * item for stride in tensor.stride())
    blocks, slots, tokens, content = tensor.shape
    return Strides(
        item=item,
        heads=spec.num_kv_heads,
        slots=slots,
        tokens=tokens,
        content=content,
        kernel_blocks=blocks // num_blocks,
        kernel=kernel,
        slot=slot,
        token=token,
        k=spec.head_size,
        v=spec.head_size_v,
    )


_OWN = ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "nvfp4", "nvfp4_4over6")
"""KV cache dtypes whose codes the layer multiplies by scales of its own, outside of the cache."""


def scale_of(layer: Any, name: str) -> torch.Tensor:
    """Return a layer's scale of ``k`` or ``v`` outside of the cache; 1 if its KV cache dtype uses none.

    Returns:
        float32 on the host, of shape (1,) or (1, heads, 1).
    """
    # Layers have the attribute also if their cache is not quantised.
    found = getattr(layer, f"_{name}_scale", None)
    if found is None or str(getattr(layer, "kv_cache_dtype", "")) not in _OWN:
        return torch.ones(1)
    scale = found.detach().float().cpu().reshape(-1)
    return scale if scale.numel() == 1 else scale.view(1, -1, 1)


def scales_of(layer: Any) -> tuple[Scale, ...]:
    """Return the scales of `scale_of` that are not 1."""
    found = (
        Scale(name, tuple(float(value) for value in scale_of(layer, name).reshape(-1))) for name in ("k", "v")
    )
    return tuple(scale for scale in found if set(scale.factors) != {1.0})
