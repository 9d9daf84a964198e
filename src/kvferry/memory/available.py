"""Memory that this process can still allocate, on its machine and in its control groups.

A container runs in a control group (cgroup). If the group exceeds its memory limit, the kernel kills a
process without a message, so kvferry reads the limit before it allocates memory. The kernel counts the cached
file pages of a group as used. This module counts them as available, because the kernel reclaims them first.

Formats: ``cgroups(7)``, ``memory.stat`` of the kernel's ``admin-guide/cgroup-v1/memory.rst`` and
``cgroup-v2.rst``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import TypeAlias

Read: TypeAlias = Callable[[str], str | None]

_VERSIONS = (
    (r"^0::(/.*)$", "/sys/fs/cgroup", "memory.max", "memory.current", ""),
    (
        r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:(/.*)$", "/sys/fs/cgroup/memory", "memory.limit_in_bytes",
        "memory.usage_in_bytes", "total_",
    ),
)  # fmt: skip
"""For each cgroup version: how to find the limits of a group.

Pattern of its line in ``/proc/self/cgroup``, root directory, file with the limit, file with the usage, prefix
of the fields of ``memory.stat`` that include child groups.
"""


def read(path: str) -> str | None:
    """Return the text of a file of ``/proc`` or ``/sys``; None if it cannot be read."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return None


def available_memory(read: Read = read) -> tuple[int, str] | None:
    """Return (bytes that this process can still allocate, text that says what limits them); None if unknown.

    Args:
        read: function that returns the text of a file, or None if it cannot be read.
    """
    found = re.search(r"^MemAvailable:\s+(\d+) kB", read("/proc/meminfo") or "", re.MULTILINE)
    room = [(int(found[1]) << 10, "available on this machine")] if found else []
    room += [(left, "left to this control group") for left in _left_to_groups(read)]
    return min(room, default=None)


def _left_to_groups(read: Read) -> Iterator[int]:
    """Yield how many bytes each control group has left of its memory limit, from this process's group up.

    Groups without a limit are skipped. Cached file pages do not count as used.

    Args:
        read: function that returns the text of a file, or None if it cannot be read.
    """
    told = read("/proc/self/cgroup") or ""
    for line, root, limit, used, prefix in _VERSIONS:
        path = found[1] if (found := re.search(line, told, re.MULTILINE)) else "/"
        # A container may see its own group as the root, although the path is the one that the host uses.
        for above in (PurePosixPath(path), *PurePosixPath(path).parents):
            group = root + str(above).rstrip("/")
            most, now = read(f"{group}/{limit}") or "", read(f"{group}/{used}") or ""
            if most.isdigit() and now.isdigit():
                cached = _cached(read(f"{group}/memory.stat") or "", prefix)
                yield max(0, int(most) - max(0, int(now) - cached))


def _cached(stat: str, prefix: str) -> int:
    """Return the bytes of cached file pages in a control group. The kernel reclaims such pages first.

    Args:
        stat: text of the group's ``memory.stat``.
        prefix: prefix of the fields that include child groups: ``total_`` for cgroup version 1, else empty.
    """
    return sum(int(size) for size in re.findall(rf"^{prefix}(?:in)?active_file (\d+)$", stat, re.MULTILINE))
