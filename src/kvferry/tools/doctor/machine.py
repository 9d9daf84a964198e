"""Check the limits of the operating system: memory, files, threads, huge pages. List file systems."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from kvferry.common.errors import ConfigError
from kvferry.common.machine import resource
from kvferry.common.units import format_bytes
from kvferry.memory import read_kernel_file, sealed_file
from kvferry.tools.doctor.finding import Finding, bad, from_error, note, ok
from kvferry.transport import LEAST_BYTES, SHARED_MEMORY

# vLLM raises its own limit to this, if the hard limit allows it.
_ENOUGH_FILES = 65_535
_FEW_FILES = 1024
# An engine with one rank had 115 threads on two cores.
_ENGINES_THREADS = 256
_LITTLE_SHM = 1 << 30
# The first Linux that can move shared memory in use, such as that of the host tier, to huge pages.
_COLLAPSES_SINCE = (6, 1)
_LARGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"


def devices(folder: str = "/sys/class/infiniband") -> list[str]:
    """Return the names of this machine's RDMA devices (InfiniBand, RoCE, EFA); empty if it has none."""
    try:
        return sorted(entry.name for entry in Path(folder).iterdir())
    except OSError:
        return []


def locked_memory(limit: int, rdma: list[str]) -> Finding:
    """Check whether a process can lock all its memory: RDMA devices access only locked memory.

    `limit` is in bytes, negative for none.
    """
    subject = "locked memory"
    may = "unlimited" if limit < 0 else f"up to {format_bytes(limit)}"
    if not rdma:
        return ok(subject, f"{may}; no RDMA device here needs it")
    if limit < 0:
        return ok(subject, f"{may}, as {', '.join(rdma)} requires")
    return bad(
        subject,
        f"{may} (ulimit -l), but {', '.join(rdma)} must lock the whole KV cache",
        "set ulimit -l unlimited for the user that starts engines (docker: --ulimit memlock=-1)",
    )


def open_files(soft: int, hard: int) -> Finding:
    """Check whether a process can open enough sockets and files for many requests.

    A negative `hard` limit is none.
    """
    subject = "open files"
    most = _ENOUGH_FILES if hard < 0 else hard
    if most <= _FEW_FILES:
        return bad(
            subject,
            f"{soft:,}, at most {most:,} (ulimit -Hn): a router opens two sockets per request",
            f"raise both limits to {_ENOUGH_FILES:,}",
        )
    if soft < 4 * _FEW_FILES:
        return note(
            subject,
            f"{soft:,} (ulimit -n): kvferry router opens two sockets per request, and does not raise the "
            "limit",
            f"run ulimit -n {min(most, _ENOUGH_FILES)} before kvferry router if it serves hundreds of "
            "requests at once",
        )
    return ok(subject, f"up to {soft:,} at a time")


def threads(limit: int, used: int, user: int) -> Finding:
    """Check whether a user, who has `used` threads, may start enough threads for engines.

    A negative `limit` is none.
    """
    subject = "threads"
    if limit < 0 or user == 0:  # the kernel does not limit root
        return ok(subject, "unlimited")
    has = f"{used:,} in use, of {limit:,} that this user may have (ulimit -u)"
    if limit - used < _ENGINES_THREADS:
        return bad(
            subject,
            f"{has}: an engine with one rank has over a hundred, and more on a machine with many cores",
            f"set ulimit -u {used + 4096} for the user that starts engines",
        )
    return ok(subject, has)


def threads_of(user: int) -> int:
    """Return the number of threads of a user."""
    processes = psutil.process_iter(["uids", "num_threads"])
    theirs = (each.info for each in processes if each.info["uids"] and each.info["uids"].effective == user)
    return sum(each["num_threads"] or 0 for each in theirs)


def shared_memory(stat: Callable[[str], os.statvfs_result]) -> Finding:
    """Check whether the file system for shared memory has room for the queues of vLLM and UCX."""
    subject = SHARED_MEMORY
    try:
        found = stat(subject)
    except OSError as error:
        return bad(
            subject,
            f"cannot be used: {os.strerror(error.errno or 0)}",
            f"mount a tmpfs there: the processes of an engine communicate through {subject}",
        )
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    room = f"{format_bytes(free)} free of {format_bytes(total)}"
    if found.f_flag & os.ST_RDONLY:
        return bad(subject, "is mounted read-only: no engine starts", "mount a tmpfs there for writing")
    if free < LEAST_BYTES:
        return bad(
            subject,
            f"{room}: processes keep semaphores and locks there, so no engine starts",
            "remove unused files there, or enlarge it (docker: --shm-size=1g)",
        )
    if free < _LITTLE_SHM:
        return note(
            subject,
            f"{room}: vLLM and UCX keep queues there; the host tier does not use it",
            "enlarge it for engines with several ranks (docker: --shm-size=8g or --ipc=host)",
        )
    return ok(subject, f"{room}; the host tier does not use it")


def file_size(limit: int) -> Finding:
    """Check that the system does not limit the size of files that a process writes (negative: no limit)."""
    # The limit is one of memory, too: the host tier and UCX's queues are files in memory.
    subject = "size of a file"
    if limit < 0:
        return ok(subject, "unlimited")
    return bad(
        subject,
        f"up to {format_bytes(limit)} (ulimit -f), which also limits the host tier, chunk files and "
        "UCX's queues",
        "set ulimit -f unlimited for the user that starts engines",
    )


def memory_files() -> Finding:
    """Check that memory files (``memfd_create``) can be created and sealed."""
    subject = "memory files"
    # Ranks share the host tier through such a file, and engines of a machine their outgoing files. Some
    # container runtimes do not allow the call.
    try:
        os.close(sealed_file("kvferry-doctor", 4096))
    except ConfigError as error:
        return from_error(subject, error)
    return ok(subject, "can be created and sealed, as the host tier requires")


def large_pages(setting: str, version: str) -> Finding:
    """Check that transparent huge pages are on, and that the kernel can move memory in use to them.

    Args:
        setting: content of the kernel's file about them, with the choice in brackets; empty without them.
    """
    subject = "large pages"
    enabled = re.search(r"\[(\w+)\]", setting)
    numbers = re.match(r"(\d+)\.(\d+)", version)
    collapses = numbers is not None and (int(numbers[1]), int(numbers[2])) >= _COLLAPSES_SINCE
    slow = "reads between processes of one machine are several times slower with small pages"
    if enabled is None:
        return note(
            subject, f"this kernel ({version}) has none: {slow}", "use a kernel with them, if speed matters"
        )
    if enabled[1] == "never":
        later = "memory in use is copied to them" if collapses else f"and Linux {version} cannot copy to them"
        return note(
            subject,
            f"off (transparent_hugepage/enabled is never), {later}: {slow}",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    if not collapses:
        return note(
            subject,
            f"on ({enabled[1]}), but Linux {version} cannot copy memory in use (the host tier) to them",
            "use Linux 6.1 or newer",
        )
    return ok(subject, f"on ({enabled[1]}), for shared memory as well")


def check() -> list[Finding]:
    """Check the limits of the operating system, and return a finding for each."""
    user = os.geteuid()
    return [
        locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], devices()),
        open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        threads(resource.getrlimit(resource.RLIMIT_NPROC)[0], threads_of(user), user),
        file_size(resource.getrlimit(resource.RLIMIT_FSIZE)[0]),
        shared_memory(os.statvfs),
        memory_files(),
        large_pages(read_kernel_file(_LARGE_PAGES) or "", os.uname().release),
    ]


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system: its type as the kernel names it, and the device or server with its files."""

    point: str
    kind: str
    source: str


def list_mounts() -> list[Mount]:
    """Return all mounted file systems that this process can see."""
    return [Mount(one.mountpoint, one.fstype, one.device) for one in psutil.disk_partitions(all=True)]


def mount_of(path: str, among: Iterable[Mount]) -> Mount | None:
    """Return the mounted file system that holds an absolute path; None if there is none.

    >>> among = [Mount("/", "ext4", ""), Mount("/mnt", "nfs", ""), Mount("/mn", "xfs", "")]
    >>> mount_of("/mnt/kv/x", among).kind
    'nfs'
    """
    above = [m for m in among if path == m.point or path.startswith(f"{m.point.rstrip('/')}/")]
    # A later mount at the same point hides the earlier ones, and `max` returns the first of equals.
    return max(reversed(above), key=lambda m: len(m.point), default=None)
