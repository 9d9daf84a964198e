"""Digests of cells in a block pool are of the packed bytes, whether they were packed or not."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, strategies as st
from xxhash import xxh3_128_digest

from kvferry.common.errors import TransferError
from kvferry.geometry import Region
from kvferry.memory import copies as copies_module, host_copy
from kvferry.memory.address_space import AddressSpace
from kvferry.memory.copies import StagingCopies
from kvferry.planning.cell_copy import ONE_CELL, PoolCopies
from kvferry.planning.digest_image import LONG_RUN_BYTES
from kvferry.planning.strided_copy import Loop, StridedCopy
from support.examples import examples

BLOCKS, STRIDE, CELL = 6, 512, 256


@st.composite
def copies(draw):
    """A copy inside a block of STRIDE bytes and a packed cell of CELL bytes, dense in the cell."""
    word = draw(st.sampled_from((1, 2, 4, 8)))
    run = word * draw(st.integers(1, 3))
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(2, 3))
    across = run * draw(st.integers(1, 2))
    loops = [Loop(columns, across, run * rows)]
    if rows > 1:
        loops.append(Loop(rows, across * columns, run))
    return StridedCopy(word * draw(st.integers(0, 4)), word * draw(st.integers(0, 4)), run, tuple(loops))


def memory(size: int) -> tuple[np.ndarray, Region]:
    raw = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    return raw, Region(int(raw.ctypes.data), size)


@pytest.mark.parametrize("long_run", [1, 1 << 17], ids=["where they lie", "packed"])
@examples(60)
@given(
    parts=st.lists(copies(), min_size=1, max_size=3), cell=st.integers(0, 5),
    ids=st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=BLOCKS, unique=True),
    at=st.lists(st.integers(0, 40), min_size=1, max_size=4), room=st.integers(CELL, 3 * CELL),
)  # fmt: skip
def test_a_digest_is_of_the_packed_bytes_of_each_copy_cell_after_cell(long_run, parts, cell, ids, at, room):
    pool, region = memory(BLOCKS * STRIDE)
    blocks, cells = np.array(ids), cell + np.arange(len(ids))
    nests = tuple(copy.at(region.address, 0) for copy in parts)
    expected = bytearray()
    for copy in parts:
        descriptors = copy.descriptors()
        for block, number in zip(ids, cells.tolist(), strict=True):
            begin, packed = block * STRIDE + at[number % len(at)], np.zeros(copy.bytes, np.uint8)
            for a, b, n in zip(descriptors.src, descriptors.dst - copy.dst, descriptors.length, strict=True):
                packed[b : b + n] = pool[begin + a : begin + a + n]
            expected += packed.tobytes()
    part = PoolCopies(tuple(at), nests)
    digested = StagingCopies([part], AddressSpace([region]), "src", STRIDE, BLOCKS)
    with (
        mock.patch.object(copies_module, "_SCRATCH_BYTES", room),
        mock.patch.object(host_copy, "LONG_RUN_BYTES", long_run),
    ):
        assert digested.digest(blocks, cells) == xxh3_128_digest(bytes(expected))


def test_a_digest_of_blocks_outside_of_the_pool_is_refused():
    _pool, region = memory(2 * LONG_RUN_BYTES)
    for run in (8, LONG_RUN_BYTES):
        part = PoolCopies(ONE_CELL, (StridedCopy(region.address, 0, run),))
        digested = StagingCopies([part], AddressSpace([region]), "src", LONG_RUN_BYTES, 2)
        with pytest.raises(TransferError, match="a copy exceeds the places of the block pool: found 2 to 2"):
            digested.digest(np.array([2]), np.zeros(1, np.int64))


def test_blocks_on_a_gpu_are_not_digested():
    _pool, region = memory(STRIDE)
    part = PoolCopies(ONE_CELL, (StridedCopy(region.address, 0, 8),))
    digested = StagingCopies([part], AddressSpace([region]), "src", STRIDE, 1)
    digested.on_host = False
    with pytest.raises(TransferError, match="KV blocks in GPU memory cannot be digested"):
        digested.digest(np.array([0]), np.zeros(1, np.int64))
