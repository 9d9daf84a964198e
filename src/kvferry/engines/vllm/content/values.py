"""Known values that the probe writes, and functions that decode the bytes which a write leaves in the cache.

The probe writes the index of each token, head or content element, one base-5 digit at a time. Each digit is
written as one of five floating-point values, the *letters*. Most KV cache dtypes hold the letters exactly. If
scales are computed from the input, the dtype still holds the letters precisely enough to tell them apart. No
letter is zero, so memory that was never written does not decode to a letter.
"""

from __future__ import annotations

import torch

from kvferry.engines.vllm.content.adapters import Code

LETTERS = (1.0, 2.0, 3.0, 4.0, 6.0)
"""Floating-point values that stand for the digits 0 to 4. They are exact in float8 e5m2, e4m3 and e2m1. They
can still be told apart if a scale maps the largest of them to the largest number of the format."""

CLOSE = 0.45
"""Maximum error of a decoded letter. The difference between two letters is at least 1."""

AXES = ("token", "head", "content")

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Absolute values of the 4-bit format e2m1, by its lower three bits. The fourth bit is the sign."""


def digits(extent: int) -> int:
    """Return how many base-5 digits are needed to write every index below `extent`.

    >>> [digits(extent) for extent in (1, 5, 6, 25, 26)]
    [1, 1, 2, 2, 3]
    """
    count, reach = 1, len(LETTERS)
    while reach < extent:
        count, reach = count + 1, reach * len(LETTERS)
    return count


def letters(shape: tuple[int, int, int], axis: str, digit: int, shift: int) -> torch.Tensor:
    """Return a float32 tensor in which each element is the letter of one digit of its index along `axis`.

    Args:
        shape: shape of the tensor: (tokens, heads, elements per head and token).
        axis: ``token``, ``head`` or ``content``.
        digit: position of the digit in the index; 0 is the lowest.
        shift: number added to every digit, modulo 5.
    """
    dim = AXES.index(axis)
    index = (torch.arange(shape[dim]) // len(LETTERS) ** digit + shift) % len(LETTERS)
    view = [1, 1, 1]
    view[dim] = shape[dim]
    return torch.tensor(LETTERS)[index].view(view).expand(shape)


def with_anchors(values: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor in which the first of every 16 elements is the largest letter."""
    # All groups of 16 elements then have the same maximum. So an operation that computes scales from the
    # maximum gives all groups the same scale.
    anchored = values.clone()
    anchored[..., ::16] = LETTERS[-1]
    return anchored


def element_types(kv_cache_dtype: str, tensor_dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Return the element types that a cache may hold. The first is what the KV cache dtype names."""
    # vLLM hands over fp8 caches as uint8 tensors.
    if tensor_dtype != torch.uint8 or not kv_cache_dtype.startswith("fp8"):
        return (tensor_dtype,)
    # Some AMD GPUs use the second type. A backend that supports only one fp8 type writes it whatever the
    # KV cache dtype is: TRITON_ATTN writes e4m3 for `fp8_e5m2`.
    e4m3 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
    return (torch.float8_e5m2, *e4m3) if kv_cache_dtype == "fp8_e5m2" else e4m3


def decode(raw: torch.Tensor, code: Code, element: torch.dtype) -> torch.Tensor:
    """Decode elements of shape (..., count, bytes per element) to float32 of shape (..., count).

    `element` is the type of `Code.ELEMENT`. e2m1 packs two numbers into a byte, so it gives (..., 2 * count).
    """
    if code is Code.FP4:
        codes = raw.squeeze(-1)
        both = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).long()
        magnitude = torch.tensor(_FP4, device=raw.device)[both & 7]
        return torch.where(both >= 8, -magnitude, magnitude)
    dtype = {Code.BFLOAT16: torch.bfloat16, Code.E4M3: torch.float8_e4m3fn}.get(code, element)
    return raw.contiguous().view(dtype).squeeze(-1).float()


def decode_scale(raw: torch.Tensor) -> torch.Tensor:
    """Decode scale factors of shape (..., count, bytes per factor) to float32 of shape (..., count).

    Factors of four bytes are float32, and those of one byte are e4m3.
    """
    dtype = torch.float32 if raw.shape[-1] == 4 else torch.float8_e4m3fn
    return raw.contiguous().view(dtype).squeeze(-1).float()
