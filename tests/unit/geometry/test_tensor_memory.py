"""The memory that a layer computes in is told from memory that holds its pages in another way."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import pytest
from hypothesis import assume, given, strategies as st

from kvferry.geometry import Group, GroupKind, Layer, RankGeometry, Region, opaque_page
from kvferry.geometry.tensor_memory import TensorMemory, find_difference, find_unregistered
from support.examples import examples

BASE, ITEM = 4096, 2


def laid_out(order: str, counts: dict[str, int], layer: int = 0, address: int = BASE) -> TensorMemory:
    """A layer's tensor (B, H, N, C) in a buffer whose axes lie in this order, outermost first."""
    strides, stride = {}, ITEM
    for axis in reversed(order):
        strides[axis], stride = stride, stride * counts[axis]
    axes = tuple((counts[axis], strides[axis]) for axis in "HNC")
    first = address + layer * strides["L"]
    return TensorMemory(first, counts["B"], strides["B"], axes, ITEM, (address, stride))


def bytes_of(tensor: TensorMemory) -> list[int]:
    """The address of every byte in the order of the axes."""
    axes = ((tensor.blocks, tensor.block_stride), *tensor.axes, (tensor.item_bytes, 1))
    return [
        tensor.address + sum(index * stride for index, (_, stride) in zip(indices, axes, strict=True))
        for indices in product(*(range(count) for count, _ in axes))
    ]


ORDERS = st.sampled_from(["LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
COUNTS = st.fixed_dictionaries({axis: st.integers(1, 4) for axis in "LBHNC"})


@st.composite
def tensors(draw: st.DrawFn) -> TensorMemory:
    counts = draw(COUNTS)
    return laid_out(draw(ORDERS), counts, draw(st.integers(0, counts["L"] - 1)))


@examples(60)
@given(tensors())
def test_a_tensor_is_the_same_as_itself_and_as_its_views(handed: TensorMemory) -> None:
    assert find_difference(handed, handed) == ""
    squeezed = tuple(axis for axis in handed.axes if axis[0] != 1)
    as_bytes = (*handed.axes, (ITEM, 1))
    for axes, item in ((squeezed, ITEM), (as_bytes, 1)):
        view = replace(handed, axes=axes, item_bytes=item)
        assert bytes_of(view) == bytes_of(handed)
    assert find_difference(handed, replace(handed, axes=squeezed)) == ""
    *outer, (count, _) = handed.axes
    if count > 1:
        in_bytes = replace(handed, axes=(*outer, (count * ITEM, 1)), item_bytes=1)
        assert find_difference(handed, in_bytes) == ""


@examples(60)
@given(COUNTS, ORDERS, ORDERS, st.data())
def test_other_strides_are_found_wherever_they_lead_to_other_bytes(
    counts: dict[str, int], order: str, other: str, data: st.DataObject
) -> None:
    layers = st.integers(0, counts["L"] - 1)
    handed, computed = laid_out(order, counts, data.draw(layers)), laid_out(other, counts, data.draw(layers))
    assert (find_difference(handed, computed) == "") is (bytes_of(handed) == bytes_of(computed))


@examples(60)
@given(tensors(), st.data())
def test_every_change_is_found_and_named(handed: TensorMemory, data: st.DataObject) -> None:
    start, length = handed.storage
    moved = replace(handed, address=handed.address + 64, storage=(start + 64, length))
    other_allocation = replace(handed, storage=(start, length + 64))
    more = replace(handed, blocks=handed.blocks + 1)
    for computed in (moved, other_allocation, more, (), (handed, handed)):
        found = find_difference(handed, computed)
        assert f"expected {handed}" in found
        assert "the layer computes in" in found
    changeable = [index for index, (count, _) in enumerate(handed.axes) if count > 1]
    assume(changeable)
    index = data.draw(st.sampled_from(changeable))
    axes = [list(axis) for axis in handed.axes]
    axes[index][1] += data.draw(st.integers(1, 64))
    assert find_difference(handed, replace(handed, axes=tuple(map(tuple, axes))))


@examples(60)
@given(COUNTS, st.integers(2, 4), st.integers(1, 3), st.integers(1, 3))
def test_blocks_may_be_split_into_kernel_blocks(
    counts: dict[str, int], kernel_blocks: int, rows: int, layers: int
) -> None:
    """As vLLM does with compressed caches in packed blocks: other layers' pages lie between the blocks."""
    counts = {**counts, "L": layers, "H": 1, "N": rows * kernel_blocks}
    handed = laid_out("BLHNC", counts)
    page = rows * counts["C"] * ITEM
    apart = handed.block_stride // page
    split = replace(
        handed,
        blocks=(counts["B"] - 1) * apart + kernel_blocks,
        block_stride=page,
        axes=((1, page), (rows, counts["C"] * ITEM), (counts["C"], ITEM)),
    )
    kernel = [
        bytes_of(replace(split, address=split.address + n * page, blocks=1)) for n in range(split.blocks)
    ]
    for block in range(counts["B"]):
        whole = bytes_of(replace(handed, address=handed.address + block * handed.block_stride, blocks=1))
        assert [one for n in range(kernel_blocks) for one in kernel[block * apart + n]] == whole
    assert find_difference(handed, split) == ""
    assert find_difference(handed, replace(split, blocks=split.blocks - 1))
    assert find_difference(handed, replace(split, block_stride=page + ITEM))


def states_of(page: int, *sizes: int, stride: int = 0) -> tuple[TensorMemory, tuple[TensorMemory, ...]]:
    handed = TensorMemory(BASE, 8, stride or page, ((1, page), (1, page), (page, 1)), 1, (BASE, 8 * page))
    starts = [BASE + sum(sizes[:index]) for index in range(len(sizes))]
    states = [
        replace(handed, address=start, axes=((size // 4, 4),), item_bytes=4)
        for start, size in zip(starts, sizes, strict=True)
    ]
    return handed, tuple(states)


@pytest.mark.parametrize("sizes", [(64,), (128,), (64, 64), (32, 16, 64)])
def test_states_divide_the_pages_among_them(sizes: tuple[int, ...]) -> None:
    handed, states = states_of(128, *sizes)
    assert find_difference(handed, states) == ""


@pytest.mark.parametrize(
    "change",
    [
        lambda states: states[:0],
        lambda states: states[1:],
        lambda states: states[::-1],
        lambda states: (states[0], replace(states[1], address=states[1].address - 4)),
        lambda states: (states[0], replace(states[1], address=states[1].address + 4)),
        lambda states: (states[0], replace(states[1], block_stride=132)),
        lambda states: (states[0], replace(states[1], blocks=9)),
        lambda states: (states[0], replace(states[1], storage=(0, 1 << 20))),
        lambda states: tuple(replace(state, address=state.address - 4) for state in states),
    ],
    ids=["none", "second", "swapped", "overlap", "past the page", "stride", "blocks", "allocation", "before"],
)
def test_states_that_do_not_are_found(change: Any) -> None:
    handed, states = states_of(128, 64, 64)
    assert f"expected {handed}" in find_difference(handed, change(states))


def rank(tensor: TensorMemory, blocks: int, **changes: Any) -> RankGeometry:
    kernel_blocks = tensor.blocks // blocks
    layer = Layer("a", tensor.address, tensor.block_stride * kernel_blocks, opaque_page("", 16, 2, 0, 1))
    group = Group(GroupKind.FULL, 16, 0, (replace(layer, **changes),))
    return RankGeometry(0, 1, 0, 1, blocks, (group,), (Region(*tensor.storage),))


@examples(60)
@given(tensors(), st.integers(1, 4))
def test_registered_memory_must_match_the_tensor(tensor: TensorMemory, kernel_blocks: int) -> None:
    blocks, tensor = tensor.blocks, replace(tensor, blocks=tensor.blocks * kernel_blocks)
    sound = rank(tensor, blocks)
    assert find_unregistered(sound, {"a": tensor}) == ""
    wrong = [
        rank(tensor, blocks, address=tensor.address + 2),
        rank(tensor, blocks, block_stride=tensor.block_stride * kernel_blocks + 2),
        replace(sound, num_blocks=tensor.blocks + 1),
        replace(sound, regions=()),
        replace(sound, regions=(Region(tensor.storage[0], tensor.storage[1] - 1),)),
    ]
    for geometry in wrong:
        found = find_unregistered(geometry, {"a": tensor})
        assert found.startswith("layer a: ")
        assert found.endswith(f"are registered; expected {tensor}")
    assume(blocks > 1)
    odd = replace(tensor, blocks=tensor.blocks + 1)
    assert find_unregistered(sound, {"a": odd}), "its blocks cannot be put together to the pool's"
    assume(blocks > 1)
    odd = replace(tensor, blocks=tensor.blocks + 1)
    assert find_unregistered(sound, {"a": odd}), "no whole number of its blocks is a block"


def test_blocks_are_all_bytes_from_the_first_to_the_last() -> None:
    for order in ("LBNHC", "LHBNC"):
        tensor = laid_out(order, {"L": 2, "B": 3, "H": 4, "N": 5, "C": 6})
        block = bytes_of(replace(tensor, blocks=1))
        assert tensor.block_bytes == max(block) - min(block) + 1
        assert len(set(block)) == prod((4, 5, 6, ITEM))
