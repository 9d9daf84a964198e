import errno
import os
from types import SimpleNamespace

import pytest

from kvferry.doctor import machine
from kvferry.doctor.finding import State

GIB = 1 << 30
MADVISE = {"/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never"}
NEVER = {"/sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"}


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


def fake_stat(free: int):
    return lambda path: SimpleNamespace(f_frsize=1, f_blocks=64 * GIB, f_bavail=free)


def test_shared_memory():
    assert machine.shared_memory(stat=fake_stat(8 * GIB)).state is State.OK
    little = machine.shared_memory(stat=fake_stat(64 << 20))
    assert (little.state, little.found.split(":")[0]) == (State.NOTE, "64 MiB free of 64 GiB")

    def gone(path):
        raise OSError(errno.ENOENT, "gone")

    assert machine.shared_memory(stat=gone).state is State.BAD


@pytest.mark.parametrize(
    ("files", "release", "state", "said"),
    [
        (MADVISE, "6.18.0", State.OK, "for shared memory as well"),
        (MADVISE, "5.15.0-91-generic", State.NOTE, "cannot copy to them what is in use"),
        (NEVER, "6.1.0", State.NOTE, "what is in use is copied to them"),
        (NEVER, "5.15.0", State.NOTE, "and Linux 5.15.0 cannot"),
        ({}, "6.1.0", State.NOTE, "has none"),
    ],
)
def test_large_pages(files, release, state, said):
    found = machine.large_pages(files.get, release)
    assert found.state is state
    assert said in found.found


def test_a_control_group_bounds_memory_below_what_the_machine_has():
    files = {
        "/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   16777216 kB\n",
        "/sys/fs/cgroup/memory.max": str(6 * GIB),
        "/sys/fs/cgroup/memory.current": str(2 * GIB),
    }
    assert machine.memory_room(files.get) == (4 * GIB, "left to this control group")
    files["/sys/fs/cgroup/memory.max"] = "max"
    assert machine.memory_room(files.get) == (16 * GIB, "available on this machine")
    assert machine.memory_room({}.get) is None


def test_devices_are_those_of_the_kernel(tmp_path):
    (tmp_path / "mlx5_1").mkdir()
    (tmp_path / "mlx5_0").mkdir()
    assert machine.devices(str(tmp_path)) == ["mlx5_0", "mlx5_1"]
    assert machine.devices(str(tmp_path / "none")) == []


def test_this_machine_can_be_looked_at():
    assert len(machine.check()) == 4
    assert machine.read("/proc/self/stat").split()[0] == str(os.getpid())
    assert machine.read("/nowhere") is None
