"""Movers, the methods of moving bytes that benchmarks compare: kvferry, raw NIXL, memcpy.

Preparation that does not depend on block ids is not part of the measured time.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np

from kvferry.common.errors import TransferError
from kvferry.planning.strategy import Strategy
from kvferry.tiers.files.chunk_file import read_all, whole_pages, write_all
from kvferry.tools.measuring.raw_reads import PreparedLists, RawReads
from kvferry.tools.measuring.reader import STEP_SECONDS, Reader
from kvferry.tools.measuring.simulated import SimulatedEngine
from kvferry.transport.read_plan import ReadPlan, ReadResult


class Mover(Protocol):
    """A method of moving bytes whose time a benchmark measures, such as kvferry, raw NIXL or memcpy.

    Attributes:
        name: name of the method in reports.
        bytes: number of bytes that each move delivers. Bytes that it reads in excess are not counted.
    """

    name: str
    bytes: int

    def move(self) -> float:
        """Move all bytes once, and return the time in seconds."""


@dataclass(slots=True)
class CallMover:
    """A mover that calls a function."""

    name: str
    bytes: int
    move: Callable[[], float]


def pool_mover(
    name: str, size: int, pool: ThreadPoolExecutor, call: Callable[[Any], object], items: Sequence[Any]
) -> CallMover:
    """Return a mover that calls a function once per item. The threads of a pool share the items.

    Args:
        size: number of bytes that all calls together move.
    """

    def move() -> float:
        started = time.perf_counter()
        for _ in pool.map(call, items):
            pass
        return time.perf_counter() - started

    return CallMover(name, size, move)


class KVFerryMover:
    """A mover that loads a request's KV with kvferry.

    The measured time starts when the block ids are known. It ends when the request may use the blocks.

    Args:
        peer: index of the source engine in the producer process.
        strategy: transfer strategy to use; None for the cheapest.
        poll_seconds: time between two engine steps.

    Attributes:
        strategies: transfer strategy of each KV cache group in the last move; empty before the first.
        stages: seconds of planning, of reading, of the lease check and of the rest, one tuple per move. The
            rest is the hand-over between threads, the wait for the next engine step, and the lease's release.
        plan: read plan of the last move; None before the first move.
    """

    def __init__(
        self,
        name: str,
        reader: Reader,
        source: SimulatedEngine,
        *,
        peer: int = 0,
        strategy: Strategy | None = None,
        poll_seconds: float = STEP_SECONDS,
    ) -> None:
        self.name, self.bytes = name, reader.bytes
        self.strategies: tuple[str, ...] = ()
        self.plan: ReadPlan | None = None
        self.stages: list[tuple[float, float, float, float]] = []
        self._reader, self._source, self._peer = reader, source, peer
        self._strategy, self._poll_seconds = strategy, poll_seconds

    def move(self) -> float:
        """Load the request's KV, check the bytes, and return the seconds until the request may use them.

        Raises:
            TransferError: the load failed, or wrong bytes arrived.
        """
        reader = self._reader
        # Else bytes of the move before would pass the check.
        reader.clear()
        result, seconds = reader.load(self._source, self._peer, self._strategy, self._poll_seconds)
        self.stages.append(_stages(result, seconds))
        self.plan = result.plan
        self.strategies = result.plan.strategy_by_group if result.plan else ()
        # The user waits neither for the check of the bytes, nor for the end of the lease.
        reader.check()
        reader.producer.wait_ended()
        return seconds


def _stages(result: ReadResult, seconds: float) -> tuple[float, float, float, float]:
    planning = result.plan.seconds if result.plan else 0.0
    known = planning, result.transfer_seconds, result.check_seconds
    return (*known, seconds - sum(known))


def raw_nixl(name: str, reads: RawReads, lists: PreparedLists) -> CallMover:
    """Return a mover that creates a READ from prepared descriptor lists, posts it, and polls for its end."""
    return CallMover(name, lists.bytes, partial(reads.read, lists))


def memcpy(reader: Reader) -> CallMover:
    """Return a mover that copies as many bytes as a request's KV has, in host memory with one thread."""
    dst, src = (memory[: reader.bytes].numpy() for memory in reader.buffers)

    def move() -> float:
        started = time.perf_counter()
        np.copyto(dst, src)
        return time.perf_counter() - started

    return CallMover("(c) memcpy", reader.bytes, move)


_PIECE_BYTES = 1 << 20
_PIECES = 8
_PATIENCE_SECONDS = 300.0
_THREADS = "threads, O_DIRECT"


def has_fio() -> bool:
    """Return whether fio is installed."""
    return shutil.which("fio") is not None


def fio_writes(folder: Path, depth: int, files: int, size: int) -> CallMover:
    """Return a mover that writes new files with fio, in a new subfolder that it removes.

    Args:
        depth: number of fio jobs. Each writes one file at a time, and flushes it to the disk at its end.
        size: size of each file in bytes, a multiple of the page size.
    """

    def move() -> float:
        with TemporaryDirectory(dir=folder) as made:
            names = [str(number) for number in range(files)]
            return _run_fio(Path(made), "write", names, size, depth)

    return CallMover("fio", files * size, move)


def fio_reads(depth: int, files: Sequence[Path]) -> CallMover:
    """Return a mover that reads files of one size and folder with fio jobs, each one file at a time."""
    size, names = files[0].stat().st_size, [file.name for file in files]
    return CallMover("fio", len(files) * size, partial(_run_fio, files[0].parent, "read", names, size, depth))


def _run_fio(folder: Path, direction: str, names: Sequence[str], size: int, depth: int) -> float:
    """Write or read files with fio, and return the time in seconds. Raises TransferError if fio failed."""
    # A mistake in the names must not overwrite the files.
    command = ["fio", "--output-format=json", *(["--readonly"] if direction == "read" else []), "-"]
    done = subprocess.run(
        command,
        input=_job_file(direction, names, size, depth),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=_PATIENCE_SECONDS,
        check=False,
    )
    if done.returncode:
        raise TransferError(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
    # fio may print notes before the JSON.
    (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    # Compute the time from the bandwidth, because fio leaves out a partial piece at the end of a file.
    return size * len(names) / float(job[direction]["bw_bytes"])


def _job_file(direction: str, names: Sequence[str], size: int, depth: int) -> str:
    settings = {
        "rw": direction,
        "direct": 1,
        "ioengine": "libaio",
        "bs": min(size, _PIECE_BYTES),
        "iodepth": _PIECES,
        "filesize": size,
        "thread": 1,
        "group_reporting": 1,
        "file_service_type": "sequential",
        # Like a thread of the file tier, a job handles one file at a time, from its begin to its end.
        "openfiles": 1,
        "fallocate": "none",
    }
    if direction == "write":
        # As chunks: new files with other bytes each time, which are on the disk at the end.
        settings |= {"create_on_open": 1, "fsync_on_close": 1, "refill_buffers": 1}
    lines = ["[global]", *(f"{name}={value}" for name, value in settings.items())]
    for number in range(depth):
        if share := names[number::depth]:
            lines += [f"[job{number}]", f"size={size * len(share)}", f"filename={':'.join(share)}"]
    return "\n".join(lines)


def thread_writes(folder: Path, pool: ThreadPoolExecutor, files: int, size: int) -> CallMover:
    """Return a mover that writes new files with threads, in a new subfolder that it removes.

    Each thread writes one file at a time. The time ends when all data is on the disk.

    Args:
        size: size of each file in bytes, a multiple of the page size.
    """
    content = random_pages(size)

    def move() -> float:
        with TemporaryDirectory(dir=folder) as made:
            paths = [f"{made}/{number}" for number in range(files)]
            write = partial(write_file, content=content)
            return pool_mover(_THREADS, files * size, pool, write, paths).move()

    return CallMover(_THREADS, files * size, move)


def thread_reads(pool: ThreadPoolExecutor, files: Sequence[Path]) -> CallMover:
    """Return a mover that reads files with threads, each one file at a time."""
    into = [(file, whole_pages(file.stat().st_size)) for file in files]
    return pool_mover(_THREADS, sum(len(memory) for _, memory in into), pool, _read, into)


def random_pages(size: int) -> memoryview:
    """Return `size` random bytes in page-aligned memory."""
    pages = whole_pages(size)
    # Storage may compress other content, or skip zeros.
    pages[:] = os.urandom(size)
    return pages


def write_file(path: str, content: memoryview) -> None:
    """Create a file of page-aligned memory, and wait until its data is on the disk."""
    # An old file has its blocks already, and is quicker to write.
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC)
    try:
        write_all(fd, [content])
        os.fdatasync(fd)
    finally:
        os.close(fd)


def _read(what: tuple[Path, memoryview]) -> None:
    fd = os.open(what[0], os.O_RDONLY | os.O_CLOEXEC)
    try:
        read_all(fd, [what[1]])
    finally:
        os.close(fd)
