"""Check before engines start that ``/dev/shm`` has room for them.

Estimates: the processes of every engine keep semaphores and locks there. If an engine has several workers,
vLLM's message queues (``vllm/distributed/device_communicators/shm_broadcast.py``) and the buffers of NCCL
are there too. Pages of the queues are allocated when they are first written, so an engine uses less than the
queues' nominal size. The host tier is not there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from kvferry.errors import ConfigError
from kvferry.transport.nixl_requirements import LEAST_BYTES, SHARED_MEMORY
from kvferry.units import format_bytes

# For each worker of an engine that has several.
WORKER_BYTES = 64 << 20


def needed_bytes(workers: Sequence[int]) -> int:
    """Return the bytes of shared memory that engines with these numbers of workers need.

    >>> needed_bytes([1, 1]) >> 20, needed_bytes([1, 2]) >> 20
    (2, 130)
    """
    return sum(LEAST_BYTES + (count * WORKER_BYTES if count > 1 else 0) for count in workers)


def check_shared_memory(
    workers: Sequence[int], stat: Callable[[str], os.statvfs_result] = os.statvfs
) -> None:
    """Check that ``/dev/shm`` has room for engines with these numbers of workers.

    Raises:
        ConfigError: the file system is missing, cannot be written to, or is too small.
    """
    try:
        found = stat(SHARED_MEMORY)
    except OSError as error:
        raise ConfigError(
            f"{SHARED_MEMORY} cannot be used: {os.strerror(error.errno or 0)}; mount a tmpfs there, because "
            "the processes of an engine communicate through it"
        ) from error
    if found.f_flag & os.ST_RDONLY:
        raise ConfigError(f"{SHARED_MEMORY} is mounted read-only; mount a tmpfs there for writing")
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    if (needed := needed_bytes(workers)) > free:
        gibibytes = -(-(needed + total - free) // (1 << 30))
        raise ConfigError(
            f"{SHARED_MEMORY} has {format_bytes(free)} free of {format_bytes(total)}, {len(workers)} engines "
            f"with {sum(workers)} workers need {format_bytes(needed)}; remove unused files there, or enlarge "
            f"it (docker: --shm-size={gibibytes}g, Kubernetes: an emptyDir with "
            f"medium Memory at {SHARED_MEMORY})"
        )
