"""Cells are copied run by run, with the native kernel and without it."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest

import hatch_build
from kvferry.common.errors import TransferError
from kvferry.geometry import Region
from kvferry.memory import copy_kernel
from kvferry.memory.address_space import AddressSpace
from kvferry.memory.host_copy import STREAMED_BYTES, CopyView, copy_cells
from kvferry.memory.pool_cells import PoolCells
from kvferry.planning.cell_copy import ONE_CELL, PoolCopies
from kvferry.planning.strided_copy import Loop, StridedCopy
from support.cells import cell, runs

SOURCE = Path(copy_kernel.__file__).with_name("strided_copy.c")


def test_this_installation_has_the_kernel_if_there_is_a_compiler():
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    assert copy_kernel.KERNEL is not None, copy_kernel.WHY_NO_KERNEL


@pytest.fixture(params=["native", "numpy"])
def kernel(request, monkeypatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(copy_kernel, "KERNEL", None)
    elif copy_kernel.KERNEL is None:
        pytest.skip(copy_kernel.WHY_NO_KERNEL)


def view_of(pool: np.ndarray, copy: StridedCopy, side: str, stride: int) -> CopyView:
    """The view of a strided copy for blocks of `stride` bytes, which fill the pool."""
    address = pool.ctypes.data
    there = copy.at(address, 0) if side == "src" else copy.at(0, address)
    space = AddressSpace([Region(address, pool.size, "DRAM", 0)])
    part = PoolCopies(ONE_CELL, (there,))
    (views,) = PoolCells([part], space, side=side, stride=stride, blocks=pool.size // stride).parts
    return views.copies[0]


@pytest.mark.parametrize("streamed_bytes", [STREAMED_BYTES, 0], ids=["cached", "streamed"])
@pytest.mark.parametrize("seed", range(5))
def test_cells_are_copied_run_by_run(kernel, seed, streamed_bytes):
    draw = random.Random(seed)
    for _ in range(25):
        copy, src_span, dst_span = cell(draw)
        side = draw.choice(["src", "dst"])
        blocks, images = 5, 4
        src_cells, dst_cells = (blocks, images) if side == "src" else (images, blocks)
        lead = draw.randint(0, 65)  # neither side begins at a whole line
        source = np.frombuffer(draw.randbytes(src_span * src_cells + lead), np.uint8)[lead:].copy()
        found = np.frombuffer(draw.randbytes(dst_span * dst_cells), np.uint8).copy()
        expected = found.copy()
        pool, packed = (source, found) if side == "src" else (found, source)
        view = view_of(pool, copy, side, src_span if side == "src" else dst_span)
        places = np.array(draw.sample(range(blocks), 3))
        numbers = np.array(draw.sample(range(images), 3))
        offsets = numbers * (dst_span if side == "src" else src_span)
        copy_cells(view, places, packed, offsets, streamed_bytes)
        for place, number in zip(places.tolist(), numbers.tolist(), strict=True):
            read, written = (place, number) if side == "src" else (number, place)
            for a, b in runs(copy):
                start, end = read * src_span + a, written * dst_span + b
                expected[end : end + copy.run] = source[start : start + copy.run]
        assert (found == expected).all(), (copy, side)


@pytest.mark.parametrize("run", [1, 2, 4, 8])
@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (8, 24), (19, 37), (600, 50), (70, 700)])
@pytest.mark.parametrize("streamed_bytes", [STREAMED_BYTES, 0], ids=["cached", "streamed"])
def test_whole_tiles_are_transposed(kernel, run, rows, columns, streamed_bytes):
    pool = np.frombuffer(random.Random(run).randbytes(rows * columns * run), np.uint8).copy()
    packed = np.zeros_like(pool)
    copy = StridedCopy(0, 0, run, (Loop(columns, run, rows * run), Loop(rows, columns * run, run)))
    copy_cells(view_of(pool, copy, "src", pool.size), np.array([0]), packed, np.array([0]), streamed_bytes)
    assert (packed == pool.reshape(rows, columns, run).transpose(1, 0, 2).reshape(-1)).all()


def test_runs_are_copied_in_the_order_of_the_pool(kernel):
    pool, packed = np.zeros(4096, np.uint8), np.zeros(4096, np.uint8)
    copy = StridedCopy(0, 0, 64, (Loop(4, 64, 1024), Loop(16, 256, 64)))
    assert view_of(pool, copy, "src", 4096).loops.tolist() == [[16, 256, 64], [4, 64, 1024]]
    assert view_of(packed, copy, "dst", 4096).loops.tolist() == [[4, 64, 1024], [16, 256, 64]]


@pytest.mark.parametrize(
    ("places", "offsets", "what"),
    [
        (np.arange(2), np.arange(1), r"offsets of shape \(1,\)"),
        (np.arange(2.0), np.arange(2), "float64 places"),
        (np.arange(2, dtype=np.int32), np.arange(2), "int32 places"),
        (np.zeros((2, 2), np.int64), np.zeros((2, 2), np.int64), r"places of shape \(2, 2\)"),
    ],
)
def test_arrays_that_do_not_name_cells_are_refused(kernel, places, offsets, what):
    pool, packed = np.arange(32, dtype=np.uint8), np.zeros(32, np.uint8)
    view = view_of(pool, StridedCopy(0, 0, 8), "src", 8)
    with pytest.raises(TransferError, match=what):
        copy_cells(view, places, packed, offsets)
    assert not packed.any()


def test_memory_that_cannot_hold_packed_cells_is_refused(kernel):
    pool, packed = np.arange(32, dtype=np.uint8), np.zeros(64, np.uint8)
    view = view_of(pool, StridedCopy(0, 0, 8), "src", 8)
    for memory in (packed[::2], packed[::-1]):
        with pytest.raises(TransferError, match="contiguous, writable"):
            copy_cells(view, np.array([0]), memory, np.array([0]))
    packed.flags.writeable = False
    with pytest.raises(TransferError, match="read-only"):
        copy_cells(view, np.array([0]), packed, np.array([0]))
    backwards = StridedCopy(0, 24, 8, (Loop(2, 8, -8),))
    with pytest.raises(TransferError, match="none below 0"):
        copy_cells(view_of(pool, backwards, "src", 32), np.array([0]), np.zeros(64, np.uint8), np.array([0]))


@pytest.mark.parametrize(
    ("places", "offsets", "what"),
    [
        ([0, 4], [0, 8], "found 0 to 4, expected 0 to 3"),
        ([-1, 0], [0, 8], "found -1 to 0, expected 0 to 3"),
        ([0, 1], [0, 25], "found 0 to 25, expected 0 to 24"),
        ([0, 1], [-1, 8], "found -1 to 8, expected 0 to 24"),
    ],
)
@pytest.mark.parametrize("side", ["src", "dst"])
def test_a_cell_outside_the_memory_is_refused(kernel, side, places, offsets, what):
    pool, packed = np.arange(32, dtype=np.uint8), np.zeros(32, np.uint8)
    view = view_of(pool, StridedCopy(0, 0, 8), side, 8)
    before = pool.copy(), packed.copy()
    with pytest.raises(TransferError, match=what):
        copy_cells(view, np.array(places), packed, np.array(offsets))
    assert (pool == before[0]).all()
    assert (packed == before[1]).all()


def test_no_cells_are_no_copy(kernel):
    pool, packed = np.arange(32, dtype=np.uint8), np.zeros(32, np.uint8)
    copy_cells(
        view_of(pool, StridedCopy(0, 0, 8), "src", 8), np.array([], np.int64), packed, np.array([], np.int64)
    )
    assert not packed.any()


def test_more_loops_than_the_kernel_takes_are_copied_by_numpy():
    count = copy_kernel.MAX_LOOPS + 1
    pool = np.frombuffer(random.Random(1).randbytes(1 << count), np.uint8).copy()
    packed = np.zeros_like(pool)
    copy = StridedCopy(0, 0, 1, tuple(Loop(2, 1 << at, 1 << count - 1 - at) for at in range(count)))
    view = view_of(pool, copy, "src", pool.size)
    assert len(view.loops) == count
    copy_cells(view, np.array([0]), packed, np.array([0]))
    assert (packed == pool.reshape([2] * count).transpose().reshape(-1)).all()


def test_a_library_that_cannot_be_loaded_is_said(tmp_path):
    with pytest.raises(OSError, match="such file"):
        copy_kernel.Kernel(tmp_path / "none.so")
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(OSError, match=r"text\.so"):
        copy_kernel.Kernel(tmp_path / "text.so")


def test_an_installation_without_a_compiler_says_so(tmp_path, monkeypatch):
    library = tmp_path / "found.so"
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    assert hatch_build.compiled(SOURCE, library) == "there is no C compiler (no-such-compiler)"
    monkeypatch.setenv("CC", '"cc')
    assert hatch_build.compiled(SOURCE, library).startswith("CC is '\"cc'")
    monkeypatch.setenv("CC", "false")
    assert hatch_build.compiled(SOURCE, library).startswith("false failed")
    assert not library.exists()


def test_the_kernel_compiles_without_warnings(tmp_path, monkeypatch):
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    monkeypatch.setenv("CC", "cc -Wall -Wextra -Werror")
    assert hatch_build.compiled(SOURCE, tmp_path / "found.so") == ""
    copy_kernel.Kernel(tmp_path / "found.so")
