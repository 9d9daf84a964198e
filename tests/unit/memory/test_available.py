"""How much memory can be had: of the machine, and of every control group that a process is in."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.memory.shared_memory import available_memory

pytestmark = pytest.mark.slow

GIB = 1 << 30
GROUP = "left to this control group"
MACHINE = {"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   16777216 kB\n"}


def group(folder: str, limit: str, used: int, cached: int = 0) -> dict[str, str]:
    """Files of a control group of version 2."""
    stat = f"anon {used - cached}\nfile {cached}\ninactive_file {cached}\nactive_file 0\nshmem 1"
    return {
        f"{folder}/memory.max": limit, f"{folder}/memory.current": str(used), f"{folder}/memory.stat": stat
    }  # fmt: skip


OUTER, INNER = "/sys/fs/cgroup/outer", "/sys/fs/cgroup/outer/inner"
NESTED = {"/proc/self/cgroup": "0::/outer/inner"}
OF_VERSION_1 = {
    "/proc/self/cgroup": "5:cpu,memory:/one\n0::/",
    "/sys/fs/cgroup/memory/one/memory.limit_in_bytes": str(4 * GIB),
    "/sys/fs/cgroup/memory/one/memory.usage_in_bytes": str(3 * GIB),
    "/sys/fs/cgroup/memory/one/memory.stat": f"active_file 1\ntotal_active_file {GIB}\ntotal_inactive_file 0",
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (16 * GIB, "available on this machine")),
        (group("/sys/fs/cgroup", str(6 * GIB), 2 * GIB), (4 * GIB, GROUP)),
        (group("/sys/fs/cgroup", str(6 * GIB), 6 * GIB, cached=5 * GIB), (5 * GIB, GROUP)),
        (group("/sys/fs/cgroup", str(6 * GIB), 7 * GIB), (0, GROUP)),
        (group("/sys/fs/cgroup", "max", 2 * GIB), (16 * GIB, "available on this machine")),
        (NESTED | group(INNER, "max", GIB) | group(OUTER, str(3 * GIB), GIB), (2 * GIB, GROUP)),
        (NESTED | group(INNER, str(2 * GIB), GIB) | group(OUTER, str(9 * GIB), GIB), (GIB, GROUP)),
        (OF_VERSION_1, (2 * GIB, GROUP)),
    ],
    ids=["none", "limit", "cached files", "over", "no limit", "outer", "inner", "version 1"],
)
def test_the_tightest_limit_bounds_what_can_be_had(files, expected) -> None:
    assert available_memory((MACHINE | files).get) == expected


def test_available_memory_is_unknown_without_proc() -> None:
    assert available_memory({}.get) is None


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of 300 MiB below the one of this process."""
    lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    found = next((line.split(":")[2] for line in lines if ":memory:" in line), None)
    path = Path(f"/sys/fs/cgroup/memory{found}/kvferry-test-{os.getpid()}")
    try:
        path.mkdir()
        (path / "memory.limit_in_bytes").write_text(str(300 << 20))
    except OSError as error:
        pytest.skip(f"no control group of version 1 can be made here: {error}")
    yield path
    path.rmdir()


def test_a_host_tier_beyond_a_containers_memory_is_refused_and_not_killed(small_group: Path) -> None:
    lines = (
        "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); "
        "from kvferry.tiers.host.arena import Arena; "
        "Arena.create(8 << 20).close(); print('within'); Arena.create(1 << 30)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", lines, str(small_group / "cgroup.procs")],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ended.stdout == "within\n", ended.stderr
    assert "iB are left to this control group; lower its capacity" in ended.stderr
