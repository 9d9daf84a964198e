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
from kvferry.engines.vllm.content.adapters import WrittenField, fields_of
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


def find_mismatch(
    layer: Any, tensor: torch.Tensor, s: Strides, written: tuple[WrittenField, ...], element: torch.dtype
) -> str:
    """Check that a description of a layer's pages is right.

    The check writes known values to a scratch cache with the layer's cache-write operation, and looks for
    each value at the position that the description gives.

    Args:
        layer: the engine's attention layer, for its cache-write operation and scales.
        tensor: cache tensor of the layer; not changed.
        s: shape and strides of the cache tensor.
        written: fields of the description, with the part of K or V that each stores.
        element: element type to decode the cache with.

    Returns:
        Reason why the description is wrong; empty if it is right.
    """
    try:
        dynamic = any(one.scale is not None for one in written)
        for axis, digit, anchored in _probe_writes(s, dynamic=dynamic):
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
    """Check that a layer's cache-write operation writes no bytes outside of the given fields of a page.

    Args:
        layer: the engine's attention layer.
        tensor: cache tensor of the layer; not changed.
        s: shape and strides of the cache tensor.
        fields: fields that should contain all bytes that are written.

    Returns:
        Message with the number of other bytes that are written; empty if there are none.
    """
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
    """Compute the inputs with which a layer's cache-write operation stores the given values in the cache.

    The values are multiplied by the layer's scales of K and V, because the operation divides its inputs by
    these scales. Values for a quantised cache are also multiplied by 1 + 1/64. Otherwise, a rounding error
    could make a quotient slightly too small, and an operation that truncates (as on CPUs) would store the
    next smaller number. A value that is exact in the cache's element type is then stored unchanged, whether
    the operation rounds or truncates.

    Args:
        layer: the engine's attention layer.
        tensor: cache tensor of the layer. Only its dtype and device matter.
        inputs: values by name: ``k`` and, for layers with V, ``v``.

    Returns:
        Inputs for the operation by name, in the layer's dtype and on the cache's device.
    """
    quantised = not tensor.dtype.is_floating_point or tensor.dtype.itemsize == 1
    dtype = (getattr(layer, "dtype", None) or torch.bfloat16) if quantised else tensor.dtype
    more = 1 + 1 / 64 if quantised else 1
    return {
        name: (value * scale_of(layer, name) * more).to(dtype).contiguous().to(tensor.device)
        for name, value in inputs.items()
    }


def _probe_writes(s: Strides, *, dynamic: bool) -> Iterator[tuple[str, int, bool]]:
    """Yield the writes that are needed to check where a cache-write operation puts each value.

    In each write, the value of an element encodes one base-5 digit of the element's index along one axis.
    There is one write for each axis and digit. If the operation computes scales from its input, a second
    write has anchors, which are elements that always have the largest value:

    - Without anchors, all elements of a vector may be equal. Their value then determines only the vector's
      scale, so this write checks the positions of the scales.
    - With anchors, all scales are equal, so this write checks the positions of the scaled elements.

    Args:
        s: shape and strides of the layer's cache tensor.
        dynamic: True if the operation computes scales from its input.

    Yields:
        (axis, digit, anchored) of each write. `anchored` is True for a write with anchors.
    """
    for axis, extent in zip(AXES, (s.block_tokens, s.heads, max(s.k, s.v)), strict=True):
        for digit in range(digits(extent)):
            yield axis, digit, False
            if dynamic:
                yield axis, digit, True


def _factor(layer: Any, written: WrittenField) -> torch.Tensor:
    """Return the factor that converts decoded elements of a field to the values given to `scaled`.

    `scaled` multiplies the values by the layer's scale before they are written. If `written.scaled` is True,
    the cache-write operation divides them by the scale again, and the factor is 1. Otherwise, the factor is
    the inverse of the scale.

    Args:
        layer: the engine's attention layer.
        written: the field, with the part of K or V that it stores.

    Returns:
        float32 of shape (1,) or (1, heads, 1), which broadcasts over (tokens, heads, content).
    """
    return torch.ones(1) if written.scaled else 1 / scale_of(layer, written.source)


def _found(
    memory: torch.Tensor,
    written: WrittenField,
    s: Strides,
    expected: torch.Tensor,
    element: torch.dtype,
    factor: torch.Tensor,
) -> bool:
    value = decode(scratch.read(memory, written.field, s), written.code, element)
    if written.scale is not None:
        scales = decode_scale(scratch.read(memory, written.scale, s))
        value = value * scales.repeat_interleave(value.shape[-1] // scales.shape[-1], dim=-1)
    expected = expected[..., written.first : written.first + value.shape[-1]].to(value.device)
    if value.shape[-1] != expected.shape[-1]:
        return False
    return bool(((value * factor.to(value.device) - expected).abs() < CLOSE).all())
