"""Memory that this process can still allocate, on its machine and in its control groups.

If a control group exceeds its memory limit, the kernel kills a process without a message, so kvferry reads
the limit before it allocates memory.

Formats: ``cgroups(7)``, ``memory.stat`` of the kernel's ``admin-guide/cgroup-v1/memory.rst`` and
``cgroup-v2.rst``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import TypeAlias

Read: TypeAlias = Callable[[str], str | None]

# For each cgroup version: pattern of a group's line in /proc/self/cgroup, root directory, file with the
# limit, file with the usage, prefix of the fields of memory.stat that include child groups.
_VERSIONS = (
    (r"^0::(/.*)$", "/sys/fs/cgroup", "memory.max", "memory.current", ""),
    (
        r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:(/.*)$", "/sys/fs/cgroup/memory", "memory.limit_in_bytes",
        "memory.usage_in_bytes", "total_",
    ),
)  # fmt: skip


def read(path: str) -> str | None:
    """Return the text of a file of ``/proc`` or ``/sys``; None if it cannot be read."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return None


def available_memory(read: Read = read) -> tuple[int, str] | None:
    """Return the bytes that this process can still allocate, and what limits them; None if unknown."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", read("/proc/meminfo") or "", re.MULTILINE)
    room = [(int(found[1]) << 10, "available on this machine")] if found else []
    room += [(left, "left to this control group") for left in _left_to_groups(read)]
    return min(room, default=None)


def _left_to_groups(read: Read) -> Iterator[int]:
    """Yield how many bytes each limited control group has left, from this process's group up."""
    told = read("/proc/self/cgroup") or ""
    for line, root, limit, used, prefix in _VERSIONS:
        path = found[1] if (found := re.search(line, told, re.MULTILINE)) else "/"
        # A container may see its own group as the root, although the path is the one that the host uses.
        for above in (PurePosixPath(path), *PurePosixPath(path).parents):
            group = root + str(above).rstrip("/")
            most, now = read(f"{group}/{limit}") or "", read(f"{group}/{used}") or ""
            if most.isdigit() and now.isdigit():
                # The kernel counts cached file pages of a group as used, but reclaims them first.
                cached = _cached(read(f"{group}/memory.stat") or "", prefix)
                yield max(0, int(most) - max(0, int(now) - cached))


def _cached(stat: str, prefix: str) -> int:
    """Return the bytes of cached file pages in a control group, from its ``memory.stat``."""
    return sum(int(size) for size in re.findall(rf"^{prefix}(?:in)?active_file (\d+)$", stat, re.MULTILINE))
