"""Memory that processes share: seen by all, of one owner, and gone with the last of them."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvferry.common.errors import ConfigError, TransferError
from kvferry.geometry import Region
from kvferry.memory import pages
from kvferry.memory.address_space import AddressSpace
from kvferry.memory.copies import StagingCopies
from kvferry.planning.cell_copy import ONE_CELL, PoolCopies
from kvferry.planning.strided_copy import StridedCopy
from kvferry.tiers.eviction import EVICTION_POLICIES
from kvferry.tiers.host.arena import Arena
from kvferry.tiers.host.tier import HostTier
from support.arena_worker import CHUNK_BYTES, owner_process, rank_process

pytestmark = pytest.mark.slow

SIZE = 4 << 20
SPAWN = multiprocessing.get_context("spawn")


@contextmanager
def arena_of(size=SIZE):
    arena = Arena.create(size)
    try:
        yield arena
    finally:
        arena.close()


@contextmanager
def started(target, *arguments):
    """A process and the pipe to it."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        ours.close()
        process.kill()
        process.join()


def ask(pipes, verb, *arguments):
    for pipe in pipes:
        pipe.send((verb, *arguments))
    assert all(pipe.poll(60) for pipe in pipes)
    return [pipe.recv() for pipe in pipes]


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def shared_files(handle):
    """Files of ours that others could find, and how often this process maps the arena."""
    maps = Path("/proc/self/maps").read_text(encoding="ascii")
    named = [path.name for path in Path("/dev/shm").iterdir() if "kvferry" in path.name]
    return named, maps.count(handle.token)


def test_ranks_in_other_processes_store_and_load_through_one_arena():
    host = HostTier(SIZE, [CHUNK_BYTES], EVICTION_POLICIES["lru"])
    with (
        arena_of() as arena,
        started(rank_process, arena.handle, 0) as (_, one),
        started(rank_process, arena.handle, 1) as (_, other),
    ):
        for number in range(30):
            slot = host.reserve(b"chunk %d" % number, 0)
            ask((one, other), "fill", slot.offset, slot.key)
            assert host.commit(slot)
        assert host.counters.evicted == 30 - len(host) > 0
        for number in range(30):
            if slot := host.open(b"chunk %d" % number):
                assert ask((one, other), "check", slot.offset, slot.key) == [True, True]
                host.close(slot)
        assert host.counters.hits == len(host) > 0
        slot = host.open(b"chunk 29")
        arena.memory[slot.offset + CHUNK_BYTES - 1] ^= 1
        assert ask((one, other), "check", slot.offset, slot.key) == [False, False]
    assert shared_files(arena.handle) == ([], 0)


def test_a_killed_rank_leaves_nothing_behind_and_another_takes_its_place():
    host = HostTier(SIZE, [CHUNK_BYTES], EVICTION_POLICIES["lru"])
    with (
        arena_of() as arena,
        started(rank_process, arena.handle, 0) as (_, one),
        started(rank_process, arena.handle, 1) as (process, other),
    ):
        slot = host.reserve(b"chunk", 0)
        ask([one], "fill", slot.offset, slot.key)
        other.send(("die",))
        process.join(60)
        assert process.exitcode == -9
        assert ask([one], "check", slot.offset, slot.key) == [False]
        host.abort(slot)
        with started(rank_process, arena.handle, 1) as (_, again):
            slot = host.reserve(b"chunk", 0)
            ask((one, again), "fill", slot.offset, slot.key)
            assert host.commit(slot)
            assert ask((one, again), "check", slot.offset, slot.key) == [True, True]
    assert shared_files(arena.handle) == ([], 0)


def test_a_killed_owner_leaves_nothing_behind_and_a_new_one_starts_clean():
    with started(owner_process, SIZE) as (process, pipe):
        assert pipe.poll(60)
        name = pipe.recv()
        arena = Arena.attach(name)
        process.kill()
        process.join()
        assert (arena.memory == 7).all(), "who has attached keeps what there is"
        with pytest.raises(TransferError, match="no shared memory"):
            Arena.attach(name)
        arena.close()
    assert shared_files(name) == ([], 0)
    with arena_of() as arena:
        assert not arena.memory.any()


def test_another_file_under_the_same_number_is_not_taken_for_the_arena():
    with arena_of() as one, arena_of() as other:
        for name in (replace(other.handle, fd=one.handle.fd), replace(one.handle, size=SIZE // 2)):
            with pytest.raises(TransferError, match="its owner has ended"):
                Arena.attach(name)
        before = open_files()
        with pytest.raises(TransferError):
            Arena.attach(replace(other.handle, fd=one.handle.fd))
        assert open_files() == before


def test_nobody_can_shrink_an_arena_under_its_users():
    with arena_of() as arena, pytest.raises(OSError, match="not permitted") as caught:
        os.ftruncate(arena.handle.fd, 0)
    assert caught.value.errno == errno.EPERM


def test_memory_that_the_machine_has_not_is_refused_in_words():
    with pytest.raises(ConfigError, match=r"1024 TiB .* lower its capacity"):
        Arena.create(1 << 50)


def test_the_memory_is_there_from_the_start():
    with arena_of(SIZE + 1) as arena:
        assert arena.handle.size == SIZE + 4096
        assert os.fstat(arena.handle.fd).st_blocks * 512 >= SIZE


def test_the_memory_takes_no_room_of_dev_shm():
    """Containers have 64 MiB there unless they are told otherwise."""
    with arena_of() as arena:
        assert os.fstat(arena.handle.fd).st_dev != Path("/dev/shm").stat().st_dev


def test_a_closed_arena_is_unmapped_once_nobody_looks_at_it():
    before = open_files()
    arena = Arena.create(SIZE)
    kept = arena.memory[:10]
    arena.close()
    arena.close()
    kept[:] = 1
    handle = arena.handle
    assert shared_files(handle)[1] == 1
    del kept, arena
    assert shared_files(handle)[1] == 0
    assert open_files() == before


def test_gathered_blocks_lie_in_the_slots_of_their_chunks():
    blocks = torch.arange(6 * 64, dtype=torch.uint8)
    pool = AddressSpace([Region(blocks.data_ptr(), 6 * 64, "DRAM", 0)])
    with arena_of() as arena:
        loops = StagingCopies(
            [PoolCopies(ONE_CELL, (StridedCopy(blocks.data_ptr(), 0, 32, ()),))], pool, "src", 64, 6
        )
        loops.gather(np.array([4, 1]), np.zeros(2, np.int64), arena.slots(8192, 4096), first=1)
        found = [bytes(arena.bytes_at(8192 + number * 4096, 32)) for number in (1, 2)]
        assert found == [bytes(blocks[at : at + 32].numpy()) for at in (256, 64)]
        assert np.count_nonzero(arena.memory) == sum(np.count_nonzero(list(piece)) for piece in found)
        del loops


def large_bytes():
    """Shared memory of this process that lies in large pages."""
    lines = Path("/proc/self/smaps").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("ShmemPmdMapped"))


def kernel_copies_to_large_pages():
    version = tuple(int(part) for part in os.uname().release.split(".")[:2])
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return version >= (6, 2) and setting.exists() and "[deny]" not in setting.read_text()


@pytest.mark.skipif(not kernel_copies_to_large_pages(), reason="this kernel has no large pages for this")
def test_the_memory_is_in_large_pages_for_all_who_attach():
    before = large_bytes()
    with arena_of(64 << 20) as arena:
        arena.wait_allocated()
        assert not arena.memory.any()
        arena.memory[:] = 7
        assert large_bytes() - before == 64 << 20
        attached = Arena.attach(arena.handle)
        assert (attached.memory == 7).all()
        assert large_bytes() - before == 128 << 20
        attached.close()


def test_closing_does_not_wait_for_all_of_the_memory(monkeypatch):
    steps = []
    monkeypatch.setattr(pages, "POPULATE_STEP_BYTES", SIZE)
    monkeypatch.setattr(pages, "_advise", lambda *step: steps.append(step) or time.sleep(0.01) or 0)
    with arena_of(1 << 30):
        pass
    collapsed = [step for step in steps if step[2] == pages._COLLAPSE]
    assert len(collapsed) < (1 << 30) // SIZE


def test_memory_that_the_machine_turns_out_to_lack_is_said_and_not_used(monkeypatch, caplog):
    monkeypatch.setattr(pages, "POPULATE_STEP_BYTES", SIZE)
    begin = {}

    def short(address, length, advice):
        first = begin.setdefault("first", address)
        return errno.ENOMEM if address >= first + 2 * SIZE else 0

    monkeypatch.setattr(pages, "_advise", short)
    ended = []
    arena = Arena.create(4 * SIZE, lambda: ended.append(True))
    arena.wait_allocated()
    assert (arena.ready_bytes, arena.is_allocated, ended) == (2 * SIZE, True, [True])
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == (
        "host tier: 16 MiB of shared memory, but only 8 MiB could be allocated (Cannot allocate memory); "
        "lower its capacity"
    )
    arena.close()


def test_an_arena_whose_first_memory_cannot_be_had_is_an_error_at_start(monkeypatch):
    monkeypatch.setattr(pages, "_advise", lambda *_: errno.ENOMEM)
    before = open_files()
    with pytest.raises(ConfigError, match=r"host tier: 4 MiB .*Cannot allocate memory.*; lower its capacity"):
        Arena.create(SIZE)
    assert open_files() == before


@pytest.mark.parametrize(("module", "call"), [(os, "memfd_create"), (fcntl, "fcntl")])
def test_a_container_without_sealed_memory_is_told_what_to_allow(monkeypatch, module, call):
    def denied(*arguments):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    before = open_files()
    monkeypatch.setattr(module, call, denied)
    with pytest.raises(
        ConfigError, match=f"host tier: {call}.* fails here .Operation not permitted.*seccomp"
    ):
        Arena.create(SIZE)
    assert open_files() == before


def test_a_filter_that_denies_memory_files_is_told_as_such():
    """As Docker's seccomp profiles do it, in a process of its own."""
    lines = (
        "from support.seccomp import deny; from kvferry.tiers.host.arena import Arena; deny('memfd_create'); "
        "Arena.create(1)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", lines], capture_output=True, text=True, check=False, env=environment
    )
    assert "ConfigError: host tier: memfd_create fails here (Operation not permitted)" in run.stderr
