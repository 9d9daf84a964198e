import errno
import os
import threading
from types import SimpleNamespace

import pytest

from kvferry.tools.doctor import machine
from kvferry.tools.doctor.finding import State

GIB = 1 << 30
MADVISE = "always [madvise] never"
NEVER = "always madvise [never]"


@pytest.mark.parametrize(
    ("limit", "rdma", "state"),
    [(8 << 20, [], State.OK), (-1, ["mlx5_0"], State.OK), (8 << 20, ["mlx5_0"], State.BAD)],
)
def test_locked_memory_matters_where_there_are_rdma_devices(limit, rdma, state):
    assert machine.locked_memory(limit, rdma).state is state


@pytest.mark.parametrize(
    ("soft", "hard", "state"),
    [(1024, 1024, State.BAD), (1024, 65_536, State.NOTE), (1024, -1, State.NOTE), (20_000, 20_000, State.OK)],
)
def test_open_files(soft, hard, state):
    assert machine.open_files(soft, hard).state is state


@pytest.mark.parametrize(
    ("limit", "used", "user", "state"),
    [
        (-1, 9, 1000, State.OK),
        (300, 200, 1000, State.BAD),
        (300, 200, 0, State.OK),
        (4096, 200, 1000, State.OK),
    ],
)
def test_threads_of_a_user_are_limited_all_together(limit, used, user, state):
    assert machine.threads(limit, used, user).state is state


def test_the_threads_of_all_processes_of_a_user_are_counted():
    ended = threading.Event()
    waiting = [threading.Thread(target=ended.wait) for _ in range(300)]
    for one in waiting:
        one.start()
    try:
        assert machine.threads_of(os.geteuid()) > 300
    finally:
        ended.set()
        for one in waiting:
            one.join()


def test_a_limit_of_files_is_one_of_memory_too():
    assert machine.file_size(-1).state is State.OK
    limited = machine.file_size(64 << 20)
    assert (limited.state, limited.found.split(" (")[0]) == (State.BAD, "up to 64 MiB")


def test_memory_files_are_tried(monkeypatch):
    assert machine.memory_files().state is State.OK

    def denied(*arguments):
        raise OSError(errno.EPERM, "no")

    monkeypatch.setattr(os, "memfd_create", denied)
    found = machine.memory_files()
    assert found.state is State.BAD
    assert "seccomp profile" in found.advice


def fake_stat(free: int, flags: int = 0):
    return lambda path: SimpleNamespace(f_frsize=1, f_blocks=64 * GIB, f_bavail=free, f_flag=flags)


def test_shared_memory():
    assert machine.shared_memory(fake_stat(8 * GIB)).state is State.OK
    little = machine.shared_memory(fake_stat(64 << 20))
    assert (little.state, little.found.split(":")[0]) == (State.NOTE, "64 MiB free of 64 GiB")

    assert machine.shared_memory(fake_stat(1 << 19)).state is State.BAD
    assert machine.shared_memory(fake_stat(8 * GIB, os.ST_RDONLY)).state is State.BAD

    def gone(path):
        raise OSError(errno.ENOENT, "gone")

    assert machine.shared_memory(gone).state is State.BAD


@pytest.mark.parametrize(
    ("setting", "release", "state", "said"),
    [
        (MADVISE, "6.18.0", State.OK, "for shared memory as well"),
        (MADVISE, "5.15.0-91-generic", State.NOTE, "cannot copy memory in use"),
        (NEVER, "6.1.0", State.NOTE, "memory in use is copied to them"),
        (NEVER, "5.15.0", State.NOTE, "and Linux 5.15.0 cannot"),
        ("", "6.1.0", State.NOTE, "has none"),
    ],
)
def test_large_pages(setting, release, state, said):
    found = machine.large_pages(setting, release)
    assert found.state is state
    assert said in found.found


def test_devices_are_those_of_the_kernel(tmp_path):
    (tmp_path / "mlx5_1").mkdir()
    (tmp_path / "mlx5_0").mkdir()
    assert machine.devices(str(tmp_path)) == ["mlx5_0", "mlx5_1"]
    assert machine.devices(str(tmp_path / "none")) == []


def test_this_machine_can_be_looked_at():
    assert len(machine.check()) == 7
    assert machine.read_kernel_file("/proc/self/stat").split()[0] == str(os.getpid())
    assert machine.read_kernel_file("/nowhere") is None
