"""Known values to write, and decoding of the bytes that the write left.

A coordinate (a token, head or content element) is written digit by digit. A digit is one of five letters.
Every KV cache dtype holds them exactly or, where scales are computed from the values themselves, precisely
enough to tell neighbours apart. Zero is none of them, so memory that nothing wrote is never right.
"""

from __future__ import annotations

import torch

from kvferry.engines.vllm.content.adapters import Code

LETTERS = (1.0, 2.0, 3.0, 4.0, 6.0)
"""Exact in float8 e5m2, e4m3 and e2m1; and a group's largest letter may be scaled to any format's largest
number."""

CLOSE = 0.45
"""Letters are at least 1 apart."""

AXES = ("token", "head", "content")

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of e2m1; the fourth bit is the sign."""


def digits(extent: int) -> int:
    """Count the digits of indices below `extent`.

    >>> [digits(extent) for extent in (1, 5, 6, 25, 26)]
    [1, 1, 2, 2, 3]
    """
    count, reach = 1, len(LETTERS)
    while reach < extent:
        count, reach = count + 1, reach * len(LETTERS)
    return count


def letters(shape: tuple[int, int, int], axis: str, digit: int, shift: int) -> torch.Tensor:
    """Return float32 of `shape`: every element is one digit of its index along `axis`.

    Args:
        shape: tokens, heads, elements per head and token.
        axis: one of `AXES`.
        digit: number of the digit; 0 is the lowest.
        shift: amount added to every digit, so that inputs differ.
    """
    dim = AXES.index(axis)
    index = (torch.arange(shape[dim]) // len(LETTERS) ** digit + shift) % len(LETTERS)
    view = [1, 1, 1]
    view[dim] = shape[dim]
    return torch.tensor(LETTERS)[index].view(view).expand(shape)


def with_anchors(values: torch.Tensor) -> torch.Tensor:
    """Return a copy whose first of every 16 elements is the largest letter, so that scales are all alike."""
    anchored = values.clone()
    anchored[..., ::16] = LETTERS[-1]
    return anchored


def element_types(kv_cache_dtype: str, tensor_dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Return the element types that a cache may hold; the one that its dtype names is the first.

    vLLM hands fp8 caches over as bytes. Backends that know one fp8 type write only that one, for any dtype
    (TRITON_ATTN writes e4m3 for ``fp8_e5m2``), and some AMD GPUs have an e4m3 of their own.
    """
    if tensor_dtype != torch.uint8 or not kv_cache_dtype.startswith("fp8"):
        return (tensor_dtype,)
    e4m3 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
    return (torch.float8_e5m2, *e4m3) if kv_cache_dtype == "fp8_e5m2" else e4m3


def decode(raw: torch.Tensor, code: Code, element: torch.dtype) -> torch.Tensor:
    """Decode elements to float32.

    Args:
        raw: uint8 of shape (..., count, bytes of an element).
        code: encoding of the bytes.
        element: the cache's element type.

    Returns:
        float32 of shape (..., count), or (..., 2 * count) of e2m1.
    """
    if code is Code.FP4:
        codes = raw.squeeze(-1)
        both = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).long()
        magnitude = torch.tensor(_FP4, device=raw.device)[both & 7]
        return torch.where(both >= 8, -magnitude, magnitude)
    dtype = {Code.BFLOAT16: torch.bfloat16, Code.E4M3: torch.float8_e4m3fn}.get(code, element)
    return raw.contiguous().view(dtype).squeeze(-1).float()


def decode_scale(raw: torch.Tensor) -> torch.Tensor:
    """Decode scales: float32, or e4m3 where a scale is one byte."""
    dtype = torch.float32 if raw.shape[-1] == 4 else torch.float8_e4m3fn
    return raw.contiguous().view(dtype).squeeze(-1).float()
