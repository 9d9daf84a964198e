"""Memory that a worker packs cells into and others of its machine map, and bad descriptions of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvferry.common.errors import TransferError
from kvferry.geometry import Region
from kvferry.memory import device_copy as host_registration
from kvferry.memory.shared_memory import SharedFile, sealed_file
from kvferry.transport.staging import UNIT_BYTES, SharedArea, make_outgoing_file
from support.memory import memory
from support.recorded_cuda import RecordedCuda

ON_HOST, ON_GPU = Region(0, 1), Region(0, 1, "VRAM", 3)
SIZE = 2 * UNIT_BYTES


@pytest.fixture
def outgoing() -> Iterator[SharedArea]:
    with closing(SharedArea.create(SIZE, ON_HOST)) as made:
        yield made


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def seen(area: SharedArea) -> np.ndarray:
    found, _ = area.images(64).space.bytes_at(area.images(64).address)
    return found


def test_a_reader_sees_what_the_source_writes_and_cannot_write_itself(outgoing):
    mapped = SharedArea.map(outgoing.file, ON_HOST)
    written = memory(outgoing.region)
    written[:] = np.arange(SIZE) % 251
    assert (seen(mapped) == written).all()
    lines = Path("/proc/self/maps").read_text(encoding="ascii").splitlines()
    rights = sorted(line.split()[1] for line in lines if outgoing.file.token in line)
    assert rights == ["r--s", "rw-s"]


def test_memory_outlives_the_source_while_a_reader_has_it(outgoing):
    """A reader that copies while the source ends sees bytes, and no signal."""
    child = (
        "import sys, kvferry.memory.shared_memory as s, os, time\n"
        "f = s.SharedFile.create(1 << 21); os.pwrite(f.fd, b'x' * 4096, 0)\n"
        "print(f.pid, f.fd, f.token, f.size, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True) as source:
        pid, fd, token, size = source.stdout.readline().split()
        file = SharedFile(int(pid), int(fd), token, int(size))
        mapped = SharedArea.map(file, ON_HOST)
        source.kill()
    assert bytes(seen(mapped)[:4096]) == b"x" * 4096
    assert not seen(mapped)[4096:].any()
    with pytest.raises(TransferError, match=r"no shared memory at /proc/.*its owner has ended, or runs as"):
        SharedArea.map(file, ON_HOST)


def test_a_description_of_other_memory_is_refused_and_nothing_else_is_opened(outgoing, tmp_path, monkeypatch):
    file, before, opened, really = outgoing.file, open_files(), [], os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: opened.append(path) or really(path, *rest))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    pipe = os.open(fifo, os.O_RDWR)
    unsealed = os.memfd_create(f"kvferry-{file.token}", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, SIZE)
    other = sealed_file("kvferry-other", SIZE)
    for wrong, says in (
        (replace(file, token="0" * 32), "expected memory 0"),
        (replace(file, fd=pipe), "its owner has ended"),
        (replace(file, fd=other), "its owner has ended"),
        (replace(file, fd=unsealed), "seals 0x0"),
        (replace(file, size=SIZE * 2), f"has {SIZE} bytes"),
        (replace(file, pid=1 << 22), "no shared memory"),
    ):
        with pytest.raises(TransferError, match=says):
            SharedArea.map(wrong, ON_HOST)
    assert not {f"/proc/{file.pid}/fd/{fd}" for fd in (pipe, other)} & set(opened)
    for each in (pipe, unsealed, other):
        os.close(each)
    assert open_files() == before


def test_a_closed_file_is_mapped_by_nobody_else():
    made = SharedArea.create(SIZE, ON_HOST)
    before = SharedArea.map(made.file, ON_HOST)
    made.close()
    with pytest.raises(TransferError):
        SharedArea.map(made.file, ON_HOST)
    assert not seen(before).any()


def test_a_system_without_memory_files_is_told_in_the_log(monkeypatch, caplog):
    def denied(*arguments):
        raise PermissionError(1, "no")

    caplog.set_level("INFO")
    monkeypatch.setattr(os, "memfd_create", denied)
    assert make_outgoing_file(SIZE, ON_HOST) is None
    assert "memfd_create fails here" in caplog.text


@pytest.fixture
def cuda(monkeypatch) -> RecordedCuda:
    made = RecordedCuda()
    monkeypatch.setattr(host_registration, "torch", SimpleNamespace(cuda=made))
    return made


def test_a_worker_on_a_gpu_registers_the_memory_with_cuda_until_it_is_closed(cuda):
    made = SharedArea.create(SIZE, ON_GPU)
    mapped = SharedArea.map(made.file, ON_GPU)
    here, there = made.region.address, mapped.images(64).address
    assert here % 4096 == there % 4096 == 0
    assert cuda.calls == [f"cudaHostRegister {address} {SIZE} 3" for address in (here, there)]
    mapped.close()
    made.close()
    assert cuda.calls[2:] == [f"cudaHostUnregister {address}" for address in (there, here)]


def test_memory_that_cuda_does_not_register_is_not_used(cuda, caplog):
    caplog.set_level("INFO")
    before = open_files()
    cuda.error = 2
    assert make_outgoing_file(SIZE, ON_GPU) is None
    assert "CUDA cannot register" in caplog.text
    assert open_files() == before
