"""Strided copies do what their runs say, on every device there is."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from kvferry.common.errors import TransferError
from kvferry.geometry import Region
from kvferry.memory.address_space import AddressSpace, largest_word, tensor_over
from kvferry.memory.copies import StagedImages, StagingCopies
from kvferry.memory.pool_cells import PoolCells
from kvferry.planning.cell_copy import ONE_CELL, PoolCopies
from kvferry.planning.strided_copy import Loop, StridedCopy
from support.examples import examples

BLOCKS, STRIDE, IMAGE = 6, 512, 256
DEVICES = ["cpu", *(["cuda:0"] if torch.cuda.is_available() else [])]

words = st.sampled_from((1, 2, 4, 8))


@st.composite
def copies(draw):
    """A copy inside a block of STRIDE bytes and an image of IMAGE bytes, dense in the image."""
    word = draw(words)
    run = word * draw(st.integers(1, 3))
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(2, 3))
    across = run * draw(st.integers(1, 2))
    down = across * columns
    loops = [Loop(columns, across, run * rows)]
    if rows > 1:
        loops.append(Loop(rows, down, run))
    return StridedCopy(word * draw(st.integers(0, 4)), word * draw(st.integers(0, 4)), run, tuple(loops))


def memory(size: int, device: str, seed: int) -> tuple[torch.Tensor, Region]:
    raw = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, np.uint8)).to(device)
    kind, number = ("DRAM", 0) if device == "cpu" else ("VRAM", raw.device.index)
    return raw, Region(raw.data_ptr(), size, kind, number)


@pytest.mark.parametrize("device", DEVICES)
@examples(60)
@given(
    copy=copies(), ids=st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=BLOCKS, unique=True),
    first=st.integers(0, 2), at=st.lists(st.integers(0, 40), min_size=1, max_size=4), cell=st.integers(0, 5),
)  # fmt: skip
def test_gather_and_scatter_are_the_runs_one_by_one(device, copy, ids, first, at, cell):
    pool, region = memory(BLOCKS * STRIDE, device, 1)
    area, area_region = memory(16 * IMAGE, device, 2)
    before = area.cpu().numpy().copy()
    slots = StagedImages(AddressSpace([area_region]), area_region.address, IMAGE)
    blocks, cells = np.array(ids), cell + np.arange(len(ids))
    begins = [block * STRIDE + at[number % len(at)] for block, number in zip(ids, cells, strict=True)]
    part = PoolCopies(tuple(at), (copy.at(region.address, 0),))
    loops = StagingCopies([part], AddressSpace([region]), "src", STRIDE, BLOCKS)
    loops.gather(blocks, cells, slots, first)
    expected, source = before.copy(), pool.cpu().numpy()
    descriptors = copy.descriptors()
    for number, begin in enumerate(begins):
        image = (first + number) * IMAGE
        for a, b, n in zip(descriptors.src, descriptors.dst, descriptors.length, strict=True):
            expected[image + b : image + b + n] = source[begin + a : begin + a + n]
    assert (area.cpu().numpy() == expected).all()

    back, back_region = memory(BLOCKS * STRIDE, device, 3)
    wanted = back.cpu().numpy().copy()
    turned = StridedCopy(copy.dst, copy.src, copy.run, tuple(Loop(x.count, x.dst, x.src) for x in copy.loops))
    part = PoolCopies(tuple(at), (turned.at(0, back_region.address),))
    into = StagingCopies([part], AddressSpace([back_region]), "dst", STRIDE, BLOCKS)
    into.scatter(blocks, cells, slots, first)
    for begin in begins:
        for a, n in zip(descriptors.src, descriptors.length, strict=True):
            wanted[begin + a : begin + a + n] = source[begin + a : begin + a + n]
    assert (back.cpu().numpy() == wanted).all()

    into.clear(blocks[1:], cells[1:])
    for begin in begins[1:]:
        for a, n in zip(descriptors.src, descriptors.length, strict=True):
            wanted[begin + a : begin + a + n] = 0
    assert (back.cpu().numpy() == wanted).all()


def test_a_copy_that_leaves_registered_memory_is_refused():
    _, region = memory(BLOCKS * STRIDE, "cpu", 1)
    inside = StridedCopy(region.address, 0, 8)
    with pytest.raises(TransferError, match="not in registered memory"):
        StagingCopies([PoolCopies(ONE_CELL, (inside,))], AddressSpace([region]), "src", STRIDE, BLOCKS + 1)
    with pytest.raises(TransferError, match="not in registered memory"):
        StagingCopies([PoolCopies((0, STRIDE - 7), (inside,))], AddressSpace([region]), "src", STRIDE, BLOCKS)
    with pytest.raises(TransferError, match="not in registered memory"):
        StagingCopies(
            [PoolCopies(ONE_CELL, (inside.at(-1, 0),))], AddressSpace([region]), "src", STRIDE, BLOCKS
        )


def test_a_view_is_of_the_memory_that_is_there():
    raw, region = memory(64, "cpu", 1)
    tensor_over(region)[3] = 77
    assert raw[3] == 77


def test_words_divide_all_there_is():
    assert largest_word(StridedCopy(0, 0, 24, (Loop(2, 40, 64),)), 16) == 8
    assert largest_word(StridedCopy(0, 0, 24, (Loop(2, 40, 64),)), 6) == 2
    assert largest_word(StridedCopy(0, 0, 3)) == 1


@pytest.mark.parametrize("distance", [12, 10, 9])
def test_blocks_that_are_no_whole_words_apart_are_copied_whole(distance):
    pool, region = memory(5 * distance, "cpu", 1)
    area, area_region = memory(4 * IMAGE, "cpu", 2)
    slots = StagedImages(AddressSpace([area_region]), area_region.address, IMAGE)
    loops = StagingCopies(
        [PoolCopies(ONE_CELL, (StridedCopy(region.address, 0, 8),))],
        AddressSpace([region]),
        "src",
        distance,
        5,
    )
    loops.gather(np.array([1, 3]), np.zeros(2, np.int64), slots, 0)
    for number, block in enumerate((1, 3)):
        assert (area[number * IMAGE :][:8] == pool[block * distance :][:8]).all()


@pytest.mark.parametrize("side", ["src", "dst"])
def test_a_gpu_copies_between_its_blocks_and_host_memory(monkeypatch, side):
    """Memory of the CPU stands for a GPU's, as in `test_device_copy`."""
    (pool, region), (area, area_region) = memory(BLOCKS * STRIDE, "cpu", 1), memory(16 * IMAGE, "cpu", 2)
    on_gpu = AddressSpace([region])
    monkeypatch.setattr(AddressSpace, "on_host", property(lambda space: space is not on_gpu))
    copy = StridedCopy(region.address, 0, 64) if side == "src" else StridedCopy(0, region.address, 64)
    loops = StagingCopies([PoolCopies((0,), (copy,))], on_gpu, side, STRIDE, BLOCKS)
    slots = StagedImages(AddressSpace([area_region]), area_region.address, IMAGE)
    move = loops.gather if side == "src" else loops.scatter
    move(np.array([4, 1]), np.arange(2), slots, 3)
    for image, block in ((3, 4), (4, 1)):
        assert (area[image * IMAGE :][:64] == pool[block * STRIDE :][:64]).all()


def test_copies_that_were_queued_are_awaited_if_a_later_one_is_refused(monkeypatch):
    _, region = memory(BLOCKS * STRIDE, "cpu", 1)
    _, area = memory(16 * IMAGE, "cpu", 2)
    parts = [PoolCopies(ONE_CELL, (StridedCopy(region.address, at, 8),)) for at in (0, 17 * IMAGE)]
    loops = StagingCopies(parts, AddressSpace([region]), "src", STRIDE, BLOCKS)
    waited = []
    monkeypatch.setattr(PoolCells, "wait", lambda _: waited.append(1))
    slots = StagedImages(AddressSpace([area]), area.address, IMAGE)
    with pytest.raises(TransferError, match="exceeds the bytes of the packed memory"):
        loops.gather(np.array([1]), np.zeros(1, np.int64), slots, 0)
    assert waited
