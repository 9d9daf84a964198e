"""Strided copies do what the runs of their nests say, on every device there is."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from kvferry.errors import TransferError
from kvferry.geometry import Region
from kvferry.memory.copy import Loops, Slots
from kvferry.memory.space import Space, bytes_of, word_of
from kvferry.planning.nest import Loop, Nest

BLOCKS, STRIDE, IMAGE = 6, 512, 256
DEVICES = ["cpu", *(["cuda:0"] if torch.cuda.is_available() else [])]

words = st.sampled_from((1, 2, 4, 8))


@st.composite
def nests(draw):
    """A nest inside a block of STRIDE bytes and an image of IMAGE bytes, dense in the image."""
    word = draw(words)
    run = word * draw(st.integers(1, 3))
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(2, 3))
    across = run * draw(st.integers(1, 2))
    down = across * columns
    loops = [Loop(columns, across, run * rows)]
    if rows > 1:
        loops.append(Loop(rows, down, run))
    return Nest(word * draw(st.integers(0, 4)), word * draw(st.integers(0, 4)), run, tuple(loops))


def memory(size: int, device: str, seed: int) -> tuple[torch.Tensor, Region]:
    raw = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, np.uint8)).to(device)
    kind, number = ("DRAM", 0) if device == "cpu" else ("VRAM", raw.device.index)
    return raw, Region(raw.data_ptr(), size, kind, number)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    nest=nests(), ids=st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=BLOCKS, unique=True),
    first=st.integers(0, 2), step=st.integers(1, 2),
)  # fmt: skip
def test_gather_and_scatter_are_the_runs_one_by_one(device, nest, ids, first, step):
    pool, region = memory(BLOCKS * STRIDE, device, 1)
    area, area_region = memory(16 * IMAGE, device, 2)
    before = area.cpu().numpy().copy()
    slots = Slots(Space([area_region]), area_region.address, IMAGE)
    blocks = torch.tensor(ids, device=device)
    loops = Loops([nest.at(region.address, 0)], Space([region]), "src", STRIDE, BLOCKS)
    loops.gather(blocks, slots, first, step)
    expected, source = before.copy(), pool.cpu().numpy()
    pieces = nest.pieces()
    for number, block in enumerate(ids):
        at = (first + number * step) * IMAGE
        for a, b, n in zip(pieces.src, pieces.dst, pieces.length, strict=True):
            expected[at + b : at + b + n] = source[block * STRIDE + a : block * STRIDE + a + n]
    assert (area.cpu().numpy() == expected).all()

    back, back_region = memory(BLOCKS * STRIDE, device, 3)
    wanted = back.cpu().numpy().copy()
    turned = Nest(nest.dst, nest.src, nest.run, tuple(Loop(x.count, x.dst, x.src) for x in nest.loops))
    into = Loops([turned.at(0, back_region.address)], Space([back_region]), "dst", STRIDE, BLOCKS)
    into.scatter(blocks, slots, first, step)
    for block in ids:
        for a, n in zip(pieces.src, pieces.length, strict=True):
            at = block * STRIDE + a
            wanted[at : at + n] = source[at : at + n]
    assert (back.cpu().numpy() == wanted).all()

    into.clear(blocks)
    for block in ids:
        for a, n in zip(pieces.src, pieces.length, strict=True):
            wanted[block * STRIDE + a : block * STRIDE + a + n] = 0
    assert (back.cpu().numpy() == wanted).all()


def test_a_nest_that_leaves_registered_memory_is_refused():
    _, region = memory(BLOCKS * STRIDE, "cpu", 1)
    inside = Nest(region.address, 0, 8)
    with pytest.raises(TransferError, match="not in registered memory"):
        Loops([inside], Space([region]), "src", STRIDE, BLOCKS + 1)
    with pytest.raises(TransferError, match="not in registered memory"):
        Loops([inside.at(-1, 0)], Space([region]), "src", STRIDE, BLOCKS)


def test_a_view_is_of_the_memory_that_is_there():
    raw, region = memory(64, "cpu", 1)
    bytes_of(region)[3] = 77
    assert raw[3] == 77


def test_words_divide_all_there_is():
    assert word_of(Nest(0, 0, 24, (Loop(2, 40, 64),)), 16) == 8
    assert word_of(Nest(0, 0, 24, (Loop(2, 40, 64),)), 6) == 2
    assert word_of(Nest(0, 0, 3)) == 1


@pytest.mark.parametrize("distance", [12, 10, 9])
def test_blocks_that_are_no_whole_words_apart_are_copied_whole(distance):
    pool, region = memory(5 * distance, "cpu", 1)
    area, area_region = memory(4 * IMAGE, "cpu", 2)
    slots = Slots(Space([area_region]), area_region.address, IMAGE)
    loops = Loops([Nest(region.address, 0, 8)], Space([region]), "src", distance, 5)
    loops.gather(torch.tensor([1, 3]), slots, 0, 1)
    for number, block in enumerate((1, 3)):
        assert (area[number * IMAGE :][:8] == pool[block * distance :][:8]).all()
