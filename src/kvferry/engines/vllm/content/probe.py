"""Proof that an adapter describes a layer's pages correctly.

The probe lets the backend write known values to scratch pages, and looks for them where the adapter says. The
values stand for the index of each element along one axis (token, head or content), one digit per write. In
every write, every element must decode to the digit of its own index, and no byte outside of the fields may be
written.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kvferry.engines.vllm.content import scratch
from kvferry.engines.vllm.content.adapters import Code, WrittenField, fields_of
from kvferry.engines.vllm.content.strides import Strides, scale_of

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


def _with_anchors(values: torch.Tensor) -> torch.Tensor:
    # The first of every 16 elements is the largest letter, so an operation that computes scales from the
    # maximum gives all groups of 16 elements the same scale.
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

    `element` is the type of `Code.ELEMENT`. e2m1 packs two numbers into a byte.
    """
    if code is Code.FP4:
        codes = raw.squeeze(-1)
        both = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).long()
        magnitude = torch.tensor(_FP4, device=raw.device)[both & 7]
        return torch.where(both >= 8, -magnitude, magnitude)
    dtype = {Code.BFLOAT16: torch.bfloat16, Code.E4M3: torch.float8_e4m3fn}.get(code, element)
    return raw.contiguous().view(dtype).squeeze(-1).float()


def find_mismatch(
    layer: Any, tensor: torch.Tensor, s: Strides, written: tuple[WrittenField, ...], element: torch.dtype
) -> str:
    """Return why a description of a layer's pages is wrong; empty if it is right.

    Args:
        tensor: cache tensor of the layer; not changed.
        element: element type to decode the cache with.
    """
    reader = scratch.Reader(s)
    try:
        dynamic = any(one.scale is not None for one in written)
        for axis, digit, anchored in _probe_writes(s, dynamic=dynamic):
            inputs = _letters(s, axis, digit, v_shift=2)
            if anchored:
                inputs = {name: _with_anchors(value) for name, value in inputs.items()}
            memory = scratch.write(layer, tensor, s, scaled(layer, tensor, inputs))
            for one in written:
                # `scaled` multiplies by the layer's scale, and the operation divides by it, unless it
                # computes scales of its own.
                factor = torch.ones(1) if one.scaled else 1 / scale_of(layer, one.source)
                if not _found(reader, memory, one, inputs[one.source], element, factor):
                    return f"the {axis} axis of {one.field.name!r} is not where its adapter says"
        return unclaimed(layer, tensor, s, fields_of(written))
    except Exception as error:  # noqa: BLE001 - pages that cannot be probed are not proved
        return f"its cache-write operation could not be run: {error}"


def unclaimed(layer: Any, tensor: torch.Tensor, s: Strides, fields: tuple[Any, ...]) -> str:
    """Return how many bytes a layer's cache-write operation writes outside of fields; empty if none."""
    values = scaled(layer, tensor, _letters(s, "content", 0, v_shift=1))
    # A byte that is equal after both writes was written: the two fills differ in every bit.
    once, again = (scratch.write(layer, tensor, s, values, fill) for fill in (0x55, 0xAA))
    stray = (once == again) & ~scratch.claimed(once, fields, s)
    count = int(stray.sum())
    return f"{count} of the bytes that are written belong to no field" if count else ""


def scaled(layer: Any, tensor: torch.Tensor, inputs: scratch.Inputs) -> scratch.Inputs:
    """Return the inputs with which a layer's cache-write operation stores the given values.

    A value that is exact in the cache's element type is stored unchanged, whether the operation rounds or
    truncates. Only the dtype and device of `tensor`, the layer's cache, matter.
    """
    quantised = not tensor.dtype.is_floating_point or tensor.dtype.itemsize == 1
    dtype = (getattr(layer, "dtype", None) or torch.bfloat16) if quantised else tensor.dtype
    # The operation divides by the layer's scale. A rounding error could make the quotient slightly too small,
    # and an operation that truncates (as on CPUs) would store the next smaller number.
    more = 1 + 1 / 64 if quantised else 1
    return {
        name: (value * scale_of(layer, name) * more).to(dtype).contiguous().to(tensor.device)
        for name, value in inputs.items()
    }


def _letters(s: Strides, axis: str, digit: int, v_shift: int) -> scratch.Inputs:
    """Return float32 inputs in which each element is the letter of one digit of its index along `axis`."""
    found, dim = {}, AXES.index(axis)
    for name, width in s.inputs.items():
        shape, view = (s.block_tokens, s.heads, width), [1, 1, 1]
        view[dim] = shape[dim]
        # K and V have different shifts, so that they can be told apart.
        shift = 0 if name == "k" else v_shift
        index = (torch.arange(shape[dim]) // len(LETTERS) ** digit + shift) % len(LETTERS)
        found[name] = torch.tensor(LETTERS)[index].view(view).expand(shape)
    return found


def _probe_writes(s: Strides, *, dynamic: bool) -> Iterator[tuple[str, int, bool]]:
    """Yield (axis, digit, anchored) of each write. `dynamic` is True if the operation computes scales."""
    for axis, extent in zip(AXES, (s.block_tokens, s.heads, max(s.k, s.v)), strict=True):
        for digit in range(digits(extent)):
            # Without anchors, all elements of a vector may be equal. Their value then determines only the
            # vector's scale, so this write checks the positions of the scales.
            yield axis, digit, False
            # With anchors, all scales are equal, so this write checks the positions of the scaled elements.
            if dynamic:
                yield axis, digit, True


def _found(
    reader: scratch.Reader,
    memory: torch.Tensor,
    written: WrittenField,
    expected: torch.Tensor,
    element: torch.dtype,
    factor: torch.Tensor,
) -> bool:
    """Return True if a field decodes to the expected values, of shape (tokens, heads, content)."""
    value = decode(reader.read(memory, written.field), written.code, element)
    if written.scale is not None:
        raw = reader.read(memory, written.scale)
        factors = torch.float32 if raw.shape[-1] == 4 else torch.float8_e4m3fn
        scales = decode(raw, Code.ELEMENT, factors)
        value = value * scales.repeat_interleave(value.shape[-1] // scales.shape[-1], dim=-1)
    expected = expected[..., written.first : written.first + value.shape[-1]].to(value.device)
    # The field claims more elements than the input has.
    if value.shape[-1] != expected.shape[-1]:
        return False
    return bool(((value * factor.to(value.device) - expected).abs() < CLOSE).all())
