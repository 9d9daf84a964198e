"""Check what NIXL and UCX require of the machine, to explain why an agent does not start.

UCX keeps the queues of each agent in ``/dev/shm``. It writes to them when it creates them, so if space is
lacking, UCX reports an error at once and no signal kills the process later. If there is little space, UCX
does not use shared memory. A limit on file sizes applies to these queues too, but UCX's messages do not
mention it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvferry.operating_system import resource
from kvferry.units import format_bytes

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the directory of shared memory

# Size in bytes of an agent's largest queue, rounded up (4,292,720 with the UCX of NIXL 1.5.1).
AGENT_BYTES = 5 << 20

# Free bytes in ``/dev/shm`` that suffice for the semaphores and locks of Python and vLLM.
LEAST_BYTES = 1 << 20

# By the name of a resource limit: its least sufficient value, and a message with problem and remedy.
_LIMITS = {
    "RLIMIT_FSIZE": (AGENT_BYTES, "files may have {} bytes (ulimit -f unlimited)"),
    "RLIMIT_NOFILE": (256, "{} files may be open (ulimit -n 65535)"),
    "RLIMIT_AS": (1 << 40, "the address space may have {} bytes (ulimit -v unlimited)"),
}


def missing_requirements(
    stat: Callable[[str], Any] | None = None, limits: Mapping[int, int] | None = None
) -> Iterator[str]:
    """Yield the problems of this machine that may prevent a NIXL agent from starting, each with its remedy.

    Args:
        stat: returns the free space of a file system; None for `os.statvfs`.
        limits: value of each resource limit, negative if unlimited; None for those of this process.
    """
    try:
        found = (stat or os.statvfs)(SHARED_MEMORY)
    except OSError as error:
        yield f"{SHARED_MEMORY} cannot be used: {os.strerror(error.errno or 0)} (mount a tmpfs there)"
    else:
        free = found.f_bavail * found.f_frsize
        if found.f_flag & os.ST_RDONLY:
            yield f"{SHARED_MEMORY} is mounted read-only (mount a tmpfs there for writing)"
        elif free < LEAST_BYTES:
            yield f"{SHARED_MEMORY} has {format_bytes(free)} free (docker: --shm-size=1g)"
    for name, (least, text) in _LIMITS.items():
        limit = getattr(resource, name)
        allowed = resource.getrlimit(limit)[0] if limits is None else limits.get(limit, -1)
        if 0 <= allowed < least:
            yield text.format(f"{allowed:,}")
