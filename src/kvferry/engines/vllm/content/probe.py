"""Proof that an adapter is right: the backend writes known values, which must be where the adapter says.

In place of K and V, the probe writes the index of each element along one axis, one digit at a time. An
adapter is right if every element of every field reads as the digit of its own index, for every digit, and if
the operation writes no byte outside of the fields.
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
    """Return the reason why an adapter is wrong about a layer's pages; empty if every element is in place.

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
    """Return a message if the operation writes bytes that belong to no field; empty if it does not."""
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
    """Multiply inputs by the layer's own scales, because a quantising operation divides by them.

    Inputs to a quantised cache are made slightly larger. Then an operation that truncates (vLLM's for CPUs
    does) gives the same codes as one that rounds.
    """
    quantised = not tensor.dtype.is_floating_point or tensor.dtype.itemsize == 1
    dtype = (getattr(layer, "dtype", None) or torch.bfloat16) if quantised else tensor.dtype
    more = 1 + 1 / 64 if quantised else 1
    return {
        name: (value * scale_of(layer, name) * more).to(dtype).contiguous().to(tensor.device)
        for name, value in inputs.items()
    }


def _rounds(s: Strides, *, dynamic: bool) -> Iterator[tuple[str, int, bool]]:
    """Yield (axis, digit, True for inputs with anchors) for each write of the probe.

    If the operation computes scales from the values, a letter that is the same all along a vector only shows
    in the scale. Anchors make all scales equal, so the letters show in the codes. So each digit is then
    written both ways.
    """
    for axis, extent in zip(AXES, (s.block_tokens, s.heads, max(s.k, s.v)), strict=True):
        for digit in range(digits(extent)):
            yield axis, digit, False
            if dynamic:
                yield axis, digit, True


def _factor(layer: Any, one: Written) -> torch.Tensor:
    """Return the factors that turn decoded codes into letters: float32, for (tokens, heads, content).

    The factors broadcast over these axes. Inputs are letters times the layer's scale. If the operation does
    not divide by the scale, the codes still contain it.
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
