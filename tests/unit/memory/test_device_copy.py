"""Cells on a GPU are copied run by run, by the kernel and by the copy engine.

There is no GPU here: memory of the CPU stands for a GPU's. torch executes the copy engine's copies on a CPU
as well, and Triton's interpreter executes the kernel, in a process of its own.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvferry.common.errors import TransferError
from kvferry.geometry import Region
from kvferry.memory import device_copy, device_kernel
from kvferry.memory.address_space import AddressSpace
from kvferry.memory.pool_cells import PoolCells
from kvferry.planning.cell_copy import PoolCopies
from kvferry.planning.strided_copy import Loop, StridedCopy
from support.apart import apart, needs
from support.cells import cell, runs

ROOT = Path(__file__).parents[3]
WHERE = str(apart("triton"))
BLOCKS, IMAGES = 5, 4

ON_THE_GPU = (
    "tests/unit/memory/test_device_copy.py",
    "tests/unit/memory/test_staging_copies.py",
    "tests/unit/connector/worker/test_chunk_routes.py",
    "tests/unit/transport/test_staged_local.py::test_bytes_come_through_areas_of_any_size",
)
"""Tests whose copies the kernel executes: every shape that is planned, staged reads, and chunks."""

LEFT_OUT = (
    *("what_torch_copies", "compiles", "staged-3", "over-read-3", "direct", "many"),
    *("4-2", "1-4", "2-1", "mover", "behind", *(f"run_by_run[{seed}" for seed in range(2, 6))),
)
"""Parts of names: other seeds and ranks, and threads. The interpreter is slow."""


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr(AddressSpace, "on_host", False)


def scaled(copy: StridedCopy, by: int) -> StridedCopy:
    loops = tuple(Loop(loop.count, loop.src * by, loop.dst * by) for loop in copy.loops)
    return StridedCopy(copy.src * by, copy.dst * by, copy.run * by, loops)


@pytest.mark.parametrize("scale", [1, 2, 8, 16])
@pytest.mark.parametrize("seed", range(6))
def test_cells_are_copied_run_by_run(seed, scale):
    draw = random.Random(seed)
    for _ in range(8):
        copy, src_span, dst_span = cell(draw)
        copy, src_span, dst_span = scaled(copy, scale), src_span * scale, dst_span * scale
        side = draw.choice(["src", "dst"])
        span, packed_span = (src_span, dst_span) if side == "src" else (dst_span, src_span)
        stride, at = 2 * span, (0, draw.randint(0, span // scale) * scale)
        pool, packed = (
            np.frombuffer(draw.randbytes(size), np.uint8).copy()
            for size in (stride * BLOCKS, packed_span * IMAGES)
        )
        address = pool.ctypes.data
        there = copy.at(address, 0) if side == "src" else copy.at(0, address)
        cells = PoolCells(
            [PoolCopies(at, (there,))],
            AddressSpace([Region(address, pool.size)]),
            side=side,
            stride=stride,
            blocks=BLOCKS,
            alignments=[packed_span],
        )
        blocks, numbers = (np.array(draw.sample(range(n), 3)) for n in (BLOCKS, IMAGES))
        (part,) = cells.parts
        expected = {"src": packed, "dst": pool}[side].copy()
        cells.copy(part, part.places(blocks, numbers), torch.from_numpy(packed), numbers * packed_span)
        for block, number in zip(blocks.tolist(), numbers.tolist(), strict=True):
            begins = block * stride + at[number % 2], number * packed_span
            for src, dst in runs(copy):
                a, b = (src, dst) if side == "src" else (dst, src)
                here, packed_at = begins[0] + a, begins[1] + b
                if side == "src":
                    expected[packed_at : packed_at + copy.run] = pool[here : here + copy.run]
                else:
                    expected[here : here + copy.run] = packed[packed_at : packed_at + copy.run]
        assert ({"src": packed, "dst": pool}[side] == expected).all(), (copy, side, at)


def pool_of(size: int, copy: StridedCopy) -> tuple[np.ndarray, PoolCells]:
    pool = np.arange(size * 4, dtype=np.uint8)
    there = replace(copy, src=copy.src + pool.ctypes.data)
    space = AddressSpace([Region(pool.ctypes.data, pool.size)])
    return pool, PoolCells([PoolCopies((0,), (there,))], space, side="src", stride=size, blocks=4)


@pytest.mark.parametrize(
    ("places", "offsets", "says"),
    [
        ([4], [0], "exceeds the places of the block pool: found 4 to 4, expected 0 to 3"),
        ([0], [48], "exceeds the bytes of the packed memory: found 48 to 48, expected 0 to 32"),
        ([0], [4], "do not begin at whole words of 8 bytes"),
    ],
)
def test_copies_outside_of_memory_or_words_are_refused(places, offsets, says):
    _, cells = pool_of(64, StridedCopy(0, 0, 32))
    memory = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(TransferError, match=says):
        cells.copy(cells.parts[0], np.array(places), memory, np.array(offsets))
    assert not memory.any()


def test_sixteen_bytes_are_copied_at_a_time_only_where_everything_is_a_multiple():
    units = []
    for copy in (
        StridedCopy(0, 0, 32, (Loop(2, 64, 32),)),
        StridedCopy(0, 0, 24, (Loop(2, 64, 32),)),
        StridedCopy(0, 0, 32, (Loop(2, 40, 32),)),
        StridedCopy(0, 8, 32, (Loop(2, 64, 32),)),
    ):
        pool, cells = pool_of(128, copy)
        view = replace(cells.parts[0].copies[0], elements=torch.empty(0))  # its address is 0
        units.append(device_copy.copy_unit(view, 0))
        assert device_copy.copy_unit(view, 8) == 8
        assert pool.size
    assert units == [16, 8, 8, 8]


@pytest.mark.slow
@pytest.mark.timeout(200)
@needs("triton")
def test_the_kernel_copies_what_torch_copies():
    found = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "support.device_by_interpreter", "-p", "no:xdist"),
            *("-p", "no:cacheprovider", "-k", " and ".join(f"not {each}" for each in LEFT_OUT), *ON_THE_GPU),
        ],
        cwd=ROOT,
        env=os.environ
        | {
            "KVFERRY_TEST_EXAMPLES": "0.2",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), str(ROOT), WHERE]),
            "TRITON_INTERPRET": "1",
        },
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-4000:]
    copied = int(found.stdout.partition("the kernel copied ")[2].partition(" cells")[0])
    assert copied > 500, found.stdout


def test_there_is_no_kernel_without_triton():
    if device_kernel.copy_cells_kernel is None:
        assert "install triton" in device_kernel.WHY_NO_KERNEL


@pytest.mark.parametrize(
    ("run", "to_or_from_host", "engine"), [(4096, True, True), (4095, True, False), (1 << 20, False, False)]
)
def test_the_copy_engine_copies_long_runs_to_and_from_the_host(monkeypatch, run, to_or_from_host, engine):
    monkeypatch.setattr(device_kernel, "copy_cells_kernel", object())
    assert device_copy.uses_copy_engine(run, 4096, to_or_from_host=to_or_from_host) is engine
    monkeypatch.setattr(device_kernel, "copy_cells_kernel", None)
    assert device_copy.uses_copy_engine(run, 4096, to_or_from_host=to_or_from_host), "there is no kernel"


@pytest.mark.slow
@needs("triton")
def test_the_kernel_compiles_for_gpus_and_copies_sixteen_bytes_at_a_time(tmp_path):
    found = subprocess.run(
        [sys.executable, "-m", "support.compiled_kernel"],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), WHERE]),
            "TRITON_CACHE_DIR": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-4000:]
    stores = {
        name: [one.removeprefix("st.global.") for one in accesses if one.startswith("st.")]
        for name, accesses in json.loads(found.stdout).items()
    }
    for architecture in (80, 90, 100):
        assert stores[f"16 bytes, {architecture}"] == ["v2.b64"]
        assert stores[f"one run, {architecture}"] == ["v2.b64"]
        assert stores[f"odd offsets, {architecture}"] == ["b64"]
        assert stores[f"one element, {architecture}"] == ["b16"]
        assert stores[f"bytes, {architecture}"] == ["b8"]
