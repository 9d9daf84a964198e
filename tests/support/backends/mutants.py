"""Adapters that are wrong, made from one that is right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from kvferry.engines.vllm.content.adapters import WrittenField
from kvferry.geometry import Axis, Field

Page = tuple[WrittenField, ...]


def mutants(page: Page) -> Iterator[tuple[str, Page]]:
    """Every way to be wrong that applies to a page: (what is wrong, the page)."""
    if {one.source for one in page} == {"k", "v"}:
        yield "K for V", tuple(replace(one, source="v" if one.source == "k" else "k") for one in page)
    for number, one in enumerate(page):
        for what, wrong in _wrong(one):
            yield f"{one.field.name}: {what}", (*page[:number], wrong, *page[number + 1 :])
    if len(scales := [one.scale for one in page if one.scale]) > 1:
        first, second = scales
        yield (
            "scales exchanged",
            tuple(replace(one, scale=second if one.scale is first else first) for one in page),
        )


def _wrong(written: WrittenField) -> Iterator[tuple[str, WrittenField]]:
    field = written.field
    yield "an element farther", replace(written, field=replace(field, offset=field.offset + field.item_bytes))
    for a, b in pairwise(field.axes):
        if swapped := _exchanged(field, a, b):
            yield f"{a.name} and {b.name} exchanged", replace(written, field=swapped)
    for axis in field.axes:
        if axis.count > 1:
            yield f"{axis.name} backwards", replace(written, field=_backwards(field, axis))
            yield f"{axis.name} at another distance", replace(written, field=_stretched(field, axis))
    if written.scale is not None:
        moved = replace(written.scale, offset=written.scale.offset + written.scale.item_bytes)
        yield "its scale farther", replace(written, scale=moved)
        yield "no scale", replace(written, scale=None)


def _with(field: Field, axis: Axis, loops: tuple[tuple[int, int], ...], offset: int = 0) -> Field:
    axes = tuple(replace(a, loops=loops) if a is axis else a for a in field.axes)
    return replace(field, offset=field.offset + offset, axes=axes)


def _exchanged(field: Field, a: Axis, b: Axis) -> Field | None:
    """The innermost loops of two axes with each other's strides, where both have more than one element."""
    (count_a, stride_a), (count_b, stride_b) = a.loops[-1], b.loops[-1]
    if min(count_a, count_b) < 2:
        return None
    wrong = _with(field, a, (*a.loops[:-1], (count_a, stride_b)))
    (b,) = (axis for axis in wrong.axes if axis.name == b.name)
    return _with(wrong, b, (*b.loops[:-1], (count_b, stride_a)))


def _backwards(field: Field, axis: Axis) -> Field:
    reach = sum((count - 1) * stride for count, stride in axis.loops)
    return _with(field, axis, tuple((count, -stride) for count, stride in axis.loops), reach)


def _stretched(field: Field, axis: Axis) -> Field:
    *outer, (count, stride) = axis.loops
    if count == 1:
        *outer, (count, stride), inner = axis.loops
        return _with(field, axis, (*outer, (count, stride + field.item_bytes), inner))
    return _with(field, axis, (*outer, (count, stride + field.item_bytes)))
