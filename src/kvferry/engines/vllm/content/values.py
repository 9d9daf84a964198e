"""Known values for the probe to write, and decoding of the bytes that a write leaves.

The probe writes the index of each token, head or content element digit by digit. A digit is one of five
values, the *letters*. Every KV cache dtype holds them exactly or, if scales are computed from the values
themselves, precisely enough to tell neighbouring letters apart. No letter is zero, so memory that was not
written never looks right.
"""

from __future__ import annotations

import torch

from kvferry.engines.vllm.content.adapters import Code

LETTERS = (1.0, 2.0, 3.0, 4.0, 6.0)
"""Values of a digit. They are exact in float8 e5m2, e4m3 and e2m1. They stay apart if the largest letter of a
group is scaled to the largest number of the format."""

CLOSE = 0.45
"""Maximum error of a decoded letter. Letters are at least 1 apart."""

AXES = ("token", "head", "content")

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of e2m1, by the lower three bits. The fourth bit is the sign."""


def digits(extent: int) -> int:
    """Return the number of digits of indices below `extent`, in base 5.

    >>> [digits(extent) for extent in (1, 5, 6, 25, 26)]
    [1, 1, 2, 2, 3]
    """
    count, reach = 1, len(LETTERS)
    while reach < extent:
        count, reach = count + 1, reach * len(LETTERS)
    return count


def letters(shape: tuple[int, int, int], axis: str, digit: int, shift: int) -> torch.Tensor:
    """Return a tensor whose elements are one digit of their index along `axis`, as letters: float32.

    Args:
        shape: number of tokens, heads, and elements per head and token.
        axis: one of `AXES`.
        digit: position of the digit; 0 is the lowest.
        shift: amount added to every digit (modulo 5), so that K and V differ.
    """
    dim = AXES.index(axis)
    index = (torch.arange(shape[dim]) // len(LETTERS) ** digit + shift) % len(LETTERS)
    view = [1, 1, 1]
    view[dim] = shape[dim]
    return torch.tensor(LETTERS)[index].view(view).expand(shape)


def with_anchors(values: torch.Tensor) -> torch.Tensor:
    """Return a copy in which the first of every 16 elements is the largest letter, so scales are equal."""
    anchored = values.clone()
    anchored[..., ::16] = LETTERS[-1]
    return anchored


def element_types(kv_cache_dtype: str, tensor_dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Return the element types that a cache may hold. The first is the one that its dtype names.

    vLLM hands fp8 caches over as bytes. Backends that know one fp8 type write only that one, for any dtype
    (TRITON_ATTN writes e4m3 for ``fp8_e5m2``). Some AMD GPUs have an e4m3 type of their own.
    """
    if tensor_dtype != torch.uint8 or not kv_cache_dtype.startswith("fp8"):
        return (tensor_dtype,)
    e4m3 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
    return (torch.float8_e5m2, *e4m3) if kv_cache_dtype == "fp8_e5m2" else e4m3


def decode(raw: torch.Tensor, code: Code, element: torch.dtype) -> torch.Tensor:
    """Decode elements to float32.

    Args:
        raw: bytes of the elements, uint8 of shape (..., count, bytes per element).
        code: encoding of the bytes.
        element: element type of the cache.

    Returns:
        float32 of shape (..., count), or (..., 2 * count) for e2m1.
    """
    if code is Code.FP4:
        codes = raw.squeeze(-1)
        both = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).long()
        magnitude = torch.tensor(_FP4, device=raw.device)[both & 7]
        return torch.where(both >= 8, -magnitude, magnitude)
    dtype = {Code.BFLOAT16: torch.bfloat16, Code.E4M3: torch.float8_e4m3fn}.get(code, element)
    return raw.contiguous().view(dtype).squeeze(-1).float()


def decode_scale(raw: torch.Tensor) -> torch.Tensor:
    """Decode scales to float32. A scale of four bytes is float32, a scale of one byte is e4m3."""
    dtype = torch.float32 if raw.shape[-1] == 4 else torch.float8_e4m3fn
    return raw.contiguous().view(dtype).squeeze(-1).float()
