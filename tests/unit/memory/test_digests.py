"""The digest of an image does not depend on how a side's blocks are cut, nor on who computes it."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

import hatch_build
from kvferry.common.errors import TransferError
from kvferry.geometry import Region
from kvferry.memory import copy_kernel, host_copy
from kvferry.memory.address_space import AddressSpace
from kvferry.memory.copies import StagingCopies
from kvferry.memory.host_copy import LONG_RUN_BYTES
from kvferry.memory.image_digest import KEY_BYTES, KEY_WORDS, KEYS, digest_bytes, split_mix
from kvferry.planning.cell_copy import ONE_CELL, PoolCopies
from kvferry.planning.strided_copy import Loop, StridedCopy
from kvferry.transport.messages import PROTOCOL
from support.examples import examples

SOURCE = Path(copy_kernel.__file__).with_name("strided_copy.c")
BLOCKS, STRIDE, IMAGE = 6, 1024, 1024
MASK = (1 << 64) - 1


@pytest.fixture(params=["native", "numpy"])
def kernel(request, monkeypatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(copy_kernel, "KERNEL", None)
    elif copy_kernel.KERNEL is None:
        pytest.skip(copy_kernel.WHY_NO_KERNEL)


@pytest.fixture(params=[1, LONG_RUN_BYTES, 1 << 20], ids=["where they lie", "both", "packed"])
def long_run(request, monkeypatch) -> None:
    monkeypatch.setattr(host_copy, "LONG_RUN_BYTES", request.param)


def defined(image: bytes) -> bytes:
    """The digest by its definition, word by word."""
    digest = 0
    for at in range(0, len(image), 4):
        block = int(split_mix(np.array([at // KEY_BYTES], np.uint64))[0]) | 1
        key = block * int(KEYS[at // 4 % KEY_WORDS])
        digest += int.from_bytes(image[at : at + 4], "little") * key
    return (digest & MASK).to_bytes(8, "little")


def memory(size: int) -> tuple[np.ndarray, Region]:
    raw = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    return raw, Region(int(raw.ctypes.data), size)


@st.composite
def copies(draw):
    """Copies that fill a packed cell without gaps, and the offset in it from which they do."""
    at, found = draw(st.integers(0, 9)), []
    end = at
    for _ in range(draw(st.integers(1, 3))):
        run = draw(st.sampled_from((1, 2, 3, 4, 8, 12, 32, 64, 68)))
        rows, columns = draw(st.sampled_from((1, 2))), draw(st.integers(1, 2))
        across = run + draw(st.integers(0, 5))
        loops = [Loop(columns, across, run * rows)] if columns > 1 else []
        if rows > 1:
            loops.append(Loop(rows, across * columns, run))
        found.append(StridedCopy(draw(st.integers(0, 40)), end, run, tuple(loops)))
        end += found[-1].bytes
    return tuple(found)


@pytest.mark.usefixtures("kernel", "long_run")
@examples(40)
@given(
    parts=copies(), cell=st.integers(0, 5),
    ids=st.lists(st.integers(0, BLOCKS - 2), min_size=1, max_size=BLOCKS, unique=True),
    at=st.lists(st.integers(0, 40), min_size=1, max_size=4),
)  # fmt: skip
def test_a_digest_is_that_of_the_packed_cells(parts, cell, ids, at):
    pool, region = memory(BLOCKS * STRIDE)
    blocks, cells = np.array(ids), cell + np.arange(len(ids))
    images = np.zeros(len(ids) * IMAGE, np.uint8)
    for copy in parts:
        descriptors = copy.descriptors()
        for index, (block, number) in enumerate(zip(ids, cells.tolist(), strict=True)):
            begin = block * STRIDE + at[number % len(at)]
            for a, b, n in zip(descriptors.src, descriptors.dst, descriptors.length, strict=True):
                images[index * IMAGE + b : index * IMAGE + b + n] = pool[begin + a : begin + a + n]
    part = PoolCopies(tuple(at), tuple(copy.at(region.address, 0) for copy in parts))
    digested = StagingCopies([part], AddressSpace([region]), "src", STRIDE, BLOCKS)
    assert digested.digest(blocks, cells, IMAGE) == defined(images.tobytes())


@pytest.mark.usefixtures("kernel")
@examples(60)
@given(
    size=st.integers(0, 5 * KEY_BYTES), position=st.integers(0, 3 * KEY_BYTES),
    cuts=st.lists(st.integers(0, 5 * KEY_BYTES)),
)  # fmt: skip
def test_the_digests_of_the_parts_of_an_image_add_up(size, position, cuts):
    data, _ = memory(size)
    whole = digest_bytes(data[None], np.array([position]))
    cuts = sorted({0, size, *(cut for cut in cuts if cut < size)})
    parts = [digest_bytes(data[None, low:high], np.array([position + low])) for low, high in pairwise(cuts)]
    assert sum(parts) & MASK == whole & MASK
    image = np.zeros(position + size, np.uint8)
    image[position:] = data
    assert (whole & MASK).to_bytes(8, "little") == defined(image.tobytes())


@pytest.mark.usefixtures("kernel")
@examples(200)
@given(data=st.data())
def test_bytes_that_change_move_or_vanish_change_the_digest(data):
    size = 3 * KEY_BYTES
    image, _ = memory(size)
    before = digest_bytes(image[None], np.zeros(1, np.int64)) & MASK
    low = data.draw(st.integers(0, size - 2))
    length = data.draw(st.integers(1, (size - low) // 2))
    here, there = slice(low, low + length), slice(low + length, low + 2 * length)
    spoiled = image.copy()
    match data.draw(st.sampled_from(("bit", "zeroed", "stale", "swapped", "shifted", "negated"))):
        case "bit":
            spoiled[low] ^= 1 << data.draw(st.integers(0, 7))
        case "zeroed":
            spoiled[here] = 0
        case "stale":
            spoiled[here] = image[there]
        case "swapped":
            spoiled[here], spoiled[there] = image[there], image[here]
        case "shifted":
            spoiled[here] = np.roll(image[here], data.draw(st.integers(1, length)))
        case "negated":
            spoiled[low::4] ^= 0x80
    after = digest_bytes(spoiled[None], np.zeros(1, np.int64)) & MASK
    assert (after == before) is bool((spoiled == image).all())


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("stride", [IMAGE, KEY_BYTES, 64])
def test_cells_that_are_exchanged_change_the_digest(stride):
    _pool, region = memory(BLOCKS * STRIDE)
    part = PoolCopies(ONE_CELL, (StridedCopy(region.address, 0, 64),))
    digested = StagingCopies([part], AddressSpace([region]), "src", STRIDE, BLOCKS)
    blocks, cells = np.arange(BLOCKS), np.zeros(BLOCKS, np.int64)
    before = digested.digest(blocks, cells, stride)
    assert before == digested.digest(blocks, cells, stride)
    assert len({before, *(digested.digest(np.roll(blocks, n), cells, stride) for n in range(1, 6))}) == 6


def test_all_keys_are_odd_and_none_is_there_twice():
    assert (KEYS % 2 == 1).all()
    assert len({*KEYS.tolist()}) == len(KEYS)


def test_long_cells_are_packed_a_few_at_a_time(monkeypatch):
    pool, region = memory(64 * STRIDE)
    part = PoolCopies(ONE_CELL, (StridedCopy(region.address, 0, 2, (Loop(100, 4, 2),)),))
    digested = StagingCopies([part], AddressSpace([region]), "src", STRIDE, 64)
    blocks, cells = np.arange(64), np.zeros(64, np.int64)
    expected = digested.digest(blocks, cells, IMAGE)
    for room in (1, 200, 1000):
        monkeypatch.setattr(host_copy, "_SCRATCH_BYTES", room)
        assert digested.digest(blocks, cells, IMAGE) == expected
    pool[5 * STRIDE + 8] ^= 1
    assert digested.digest(blocks, cells, IMAGE) != expected


@pytest.mark.usefixtures("kernel")
def test_a_digest_of_blocks_outside_of_the_pool_is_refused():
    _pool, region = memory(2 * STRIDE)
    for run in (8, LONG_RUN_BYTES):
        part = PoolCopies(ONE_CELL, (StridedCopy(region.address, 0, run),))
        digested = StagingCopies([part], AddressSpace([region]), "src", STRIDE, 2)
        with pytest.raises(TransferError, match="a copy exceeds the places of the block pool: found 2 to 2"):
            digested.digest(np.array([2]), np.zeros(1, np.int64), IMAGE)


def test_blocks_on_a_gpu_are_not_digested():
    _pool, region = memory(STRIDE)
    part = PoolCopies(ONE_CELL, (StridedCopy(region.address, 0, 8),))
    digested = StagingCopies([part], AddressSpace([region]), "src", STRIDE, 1)
    digested.on_host = False
    with pytest.raises(TransferError, match="KV blocks in GPU memory cannot be digested"):
        digested.digest(np.array([0]), np.zeros(1, np.int64), IMAGE)


@pytest.mark.usefixtures("kernel")
def test_a_digest_never_changes_without_the_number_of_the_protocol():
    data = (np.arange(5000) % 251).astype(np.uint8)
    assert PROTOCOL == 12
    assert digest_bytes(data[None], np.array([3])) & MASK == 17361516768945827377


def test_processors_without_wide_instructions_find_the_same_digest(tmp_path, monkeypatch):
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    monkeypatch.setenv("CC", "cc -DKVFERRY_PORTABLE -Wall -Wextra -Werror")
    assert hatch_build.compiled(SOURCE, tmp_path / "found.so") == ""
    data, places = memory(5 * KEY_BYTES)[0], np.array([3])
    expected = digest_bytes(data[None], places)
    monkeypatch.setattr(copy_kernel, "KERNEL", copy_kernel.Kernel(tmp_path / "found.so"))
    assert digest_bytes(data[None], places) == expected
