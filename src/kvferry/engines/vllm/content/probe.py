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
    """Return the reason why a description of a layer's pages is wrong; empty if the description is right.

    The check writes known values to scratch pages with the layer's own operation, and looks for each value at
    the described position.

    Args:
        layer: the engine's attention layer, for its cache-write operation and scales.
        tensor: cache of the layer; not changed.
        s: strides of the cache.
        written: described fields, with the input that is written to each.
        element: element type of the cache.
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
    """Return a message if a layer's cache-write operation writes bytes outside of some fields, else "".

    Args:
        layer: the engine's attention layer.
        tensor: cache of the layer; not changed.
        s: strides of the cache.
        fields: fields of a page that should cover all written bytes.
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
    """Return inputs multiplied by the layer's own scales, in the layer's dtype and on the cache's device.

    The cache-write operation of a quantised cache divides its input by these scales, so the original inputs
    end up in the cache. Inputs to a quantised cache are also multiplied by 1 + 1/64. As a result, an
    operation that truncates (vLLM's for CPUs, for example) writes the same codes as an operation that rounds.

    Args:
        layer: the engine's attention layer.
        tensor: cache of the layer. Only its dtype and device matter.
        inputs: input tensors by name: ``k`` and, for layers with V, ``v``.
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
    Usually there is one write per axis and digit. If the operation computes scales from its input, there are
    two. In the first, all elements of a vector may have the same value, which then shows only in the vector's
    scale: this write checks the scales. The second has anchors (some elements have the largest value), so
    all scales are equal: this write checks the codes.

    Args:
        s: strides of the layer's cache.
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
    """Return the factor by which decoded elements of a field are multiplied to get the values of the check.

    The check multiplies its values by the layer's own scale before it writes them. If the layer's cache-write
    operation does not divide by this scale, the decoded elements are too large by the scale, and the factor
    is the scale's inverse. Otherwise the factor is 1.

    Args:
        layer: the engine's attention layer.
        written: description of the field.

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
