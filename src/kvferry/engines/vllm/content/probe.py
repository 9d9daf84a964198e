"""Proof that an adapter describes a layer's pages correctly.

The probe lets the backend write known values to scratch pages, and looks for them where the adapter says. The
values stand for the index of each element along one axis (token, head or content), one digit per write. The
adapter is right under two conditions. Every element of every field must decode to the digit of its own index,
in every write. And the cache-write operation must write no byte outside of the fields.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kvferry.engines.vllm.content import scratch
from kvferry.engines.vllm.content.adapters import Written, fields_of
from kvferry.engines.vllm.content.scales import scale_of
from kvferry.engines.vllm.content.strides import Strides
from kvferry.engines.vllm.content.values import (
    AXES,
    CLOSE,
    decode,
    decode_scale,
    digits,
    letters,
    with_anchors,
)


def disproof(
    layer: Any, tensor: torch.Tensor, s: Strides, written: tuple[Written, ...], element: torch.dtype
) -> str:
    """Return the reason why an adapter's description of a layer's pages is wrong; empty if it is right.

    Args:
        layer: the engine's attention layer, for its cache-write operation and scales.
        tensor: cache of the layer; not changed.
        s: strides of the cache.
        written: fields that the adapter has described.
        element: element type of the cache.
    """
    try:
        dynamic = any(one.scale is not None for one in written)
        for axis, digit, anchored in _rounds(s, dynamic=dynamic):
            inputs = {
                name: letters((s.block_tokens, s.heads, width), axis, digit, shift)
                for name, width, shift in (("k", s.k, 0), ("v", s.v, 2))
                if width
            }
            if anchored:
                inputs = {name: with_anchors(value) for name, value in inputs.items()}
            memory = scratch.write(layer, tensor, s, scaled(layer, tensor, inputs))
            for one in written:
                if not _found(
                    memory, one, s=s, expected=inputs[one.source], element=element, factor=_factor(layer, one)
                ):
                    return f"the {axis} axis of {one.field.name!r} is not where its adapter says"
        return unclaimed(layer, tensor, s, fields_of(written))
    except Exception as error:  # noqa: BLE001 - pages that cannot be probed are not proved
        return f"its cache-write operation could not be run: {error}"


def unclaimed(layer: Any, tensor: torch.Tensor, s: Strides, fields: tuple[Any, ...]) -> str:
    """Return a message if the cache-write operation writes bytes outside of `fields`, else an empty one."""
    inputs = {
        name: letters((s.block_tokens, s.heads, width), "content", 0, 1)
        for name, width in (("k", s.k), ("v", s.v))
        if width
    }
    values = scaled(layer, tensor, inputs)
    once, again = (scratch.write(layer, tensor, s, values, fill) for fill in (0x55, 0xAA))
    stray = (once == again) & ~scratch.claimed(once, fields, s)
    count = int(stray.sum())
    return f"{count} of the bytes that are written belong to no field" if count else ""


def scaled(layer: Any, tensor: torch.Tensor, inputs: scratch.Inputs) -> scratch.Inputs:
    """Return inputs multiplied by the layer's own scales, in the dtype and on the device of the layer.

    The cache-write operation of a quantised cache divides its input by these scales, so the known values end
    up in the cache. Inputs to a quantised cache are also increased by 1/64. Then an operation that truncates,
    such as vLLM's for CPUs, writes the same codes as an operation that rounds.
    """
    quantised = not tensor.dtype.is_floating_point or tensor.dtype.itemsize == 1
    dtype = (getattr(layer, "dtype", None) or torch.bfloat16) if quantised else tensor.dtype
    more = 1 + 1 / 64 if quantised else 1
    return {
        name: (value * scale_of(layer, name) * more).to(dtype).contiguous().to(tensor.device)
        for name, value in inputs.items()
    }


def _rounds(s: Strides, *, dynamic: bool) -> Iterator[tuple[str, int, bool]]:
    """Yield (axis, digit, anchored) for each write of the probe.

    `anchored` is True if some elements of the input are replaced by the largest value (`with_anchors`). If
    the operation computes scales from its input, a value that fills a whole vector affects only the scale and
    no code. With anchors all scales are equal, so the values affect the codes. So each digit is written
    without anchors to check the scales, and with anchors to check the codes.

    Args:
        s: strides of the layer's cache.
        dynamic: True if the operation computes scales from its input.
    """
    for axis, extent in zip(AXES, (s.block_tokens, s.heads, max(s.k, s.v)), strict=True):
        for digit in range(digits(extent)):
            yield axis, digit, False
            if dynamic:
                yield axis, digit, True


def _factor(layer: Any, one: Written) -> torch.Tensor:
    """Return the factor by which decoded elements must be multiplied to get the known values of the probe.

    The probe multiplies its known values by the layer's own scale. If the operation does not divide by this
    scale, the decoded elements still contain it, and the factor is 1 / scale. Otherwise the factor is 1.

    Returns:
        float32 of shape (1,) or (1, heads, 1), which broadcasts over (tokens, heads, content).
    """
    return torch.ones(1) if one.scaled else 1 / scale_of(layer, one.source)


def _found(
    memory: torch.Tensor,
    one: Written,
    s: Strides,
    expected: torch.Tensor,
    element: torch.dtype,
    factor: torch.Tensor,
) -> bool:
    value = decode(scratch.read(memory, one.field, s), one.code, element)
    if one.scale is not None:
        scales = decode_scale(scratch.read(memory, one.scale, s))
        value = value * scales.repeat_interleave(value.shape[-1] // scales.shape[-1], dim=-1)
    expected = expected[..., one.first : one.first + value.shape[-1]].to(value.device)
    if value.shape[-1] != expected.shape[-1]:
        return False
    return bool(((value * factor.to(value.device) - expected).abs() < CLOSE).all())
