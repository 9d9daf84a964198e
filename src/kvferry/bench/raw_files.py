"""Movers that write and read raw files with threads or fio, to measure a directory's speed without kvferry.

Each thread or fio job handles one file at a time. Writes create new files and wait until their data is on the
disk. fio bypasses the page cache. Threads bypass it if the file system allows it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from kvferry.bench.movers import PoolMover
from kvferry.errors import TransferError
from kvferry.tiers.files.direct_io import read_all, whole_pages, write_all

_PIECE_BYTES = 1 << 20
_PIECES = 8
_PATIENCE_SECONDS = 300.0
_THREADS = "threads, O_DIRECT"


class FioWrites:
    """A mover (benchmarked method of moving bytes) that writes new files with fio.

    fio flushes each file to the disk when the file is complete.
    """

    name = "fio"

    def __init__(self, folder: Path, depth: int, files: int, size: int) -> None:
        """Set the number and size of the files that each move writes.

        Args:
            folder: existing folder. Each move writes to a new subfolder and removes it.
            depth: number of fio jobs. Each writes one file at a time.
            files: number of files.
            size: size of each file in bytes, a multiple of the page size.
        """
        self._folder, self._depth, self._files, self._size = folder, depth, files, size
        self.bytes = files * size

    def move(self) -> float:
        """Write all files once, and return the time in seconds."""
        with TemporaryDirectory(dir=self._folder) as folder:
            names = [str(number) for number in range(self._files)]
            return _run_fio(Path(folder), "write", names, self._size, self._depth)


class FioReads:
    """A mover (benchmarked method of moving bytes) that reads files with fio.

    All files are in the same folder and have the same size.

    Args:
        depth: number of fio jobs. Each reads one file at a time.
        files: existing files.
    """

    name = "fio"

    def __init__(self, depth: int, files: Sequence[Path]) -> None:
        self._folder, self._names, self._depth = files[0].parent, [file.name for file in files], depth
        self._size = files[0].stat().st_size
        self.bytes = len(files) * self._size

    def move(self) -> float:
        """Read all files once, and return the time in seconds."""
        return _run_fio(self._folder, "read", self._names, self._size, self._depth)


def has_fio() -> bool:
    """Return whether fio is installed."""
    return shutil.which("fio") is not None


def _run_fio(folder: Path, direction: str, names: Sequence[str], size: int, depth: int) -> float:
    """Write or read files with fio, and return the time in seconds.

    Args:
        folder: folder of the files.
        direction: ``write`` or ``read``, as in fio's option ``rw``.
        names: names of the files.
        size: size of each file, in bytes.
        depth: number of fio jobs.

    Raises:
        TransferError: fio failed.
    """
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
        "openfiles": 1,
        "fallocate": "none",
    }
    if direction == "write":
        settings |= {"create_on_open": 1, "fsync_on_close": 1, "refill_buffers": 1}
    lines = ["[global]", *(f"{name}={value}" for name, value in settings.items())]
    for number in range(depth):
        if share := names[number::depth]:
            lines += [f"[job{number}]", f"size={size * len(share)}", f"filename={':'.join(share)}"]
    return "\n".join(lines)


class ThreadWrites:
    """A mover (benchmarked method of moving bytes) that writes new files with several threads.

    Each thread flushes its file to the disk when the file is complete.
    """

    name = _THREADS

    def __init__(self, folder: Path, pool: ThreadPoolExecutor, files: int, size: int) -> None:
        """Set the number and size of the files that each move writes, and create their content.

        Args:
            folder: existing folder. Each move writes to a new subfolder and removes it.
            pool: pool of threads that write. Each thread writes one file at a time.
            files: number of files.
            size: size of each file in bytes, a multiple of the page size.
        """
        self._folder, self._pool, self._files, self.bytes = folder, pool, files, files * size
        self._content = random_pages(size)

    def move(self) -> float:
        """Write all files once, and return the seconds until all their data is on the disk."""
        with TemporaryDirectory(dir=self._folder) as folder:
            files = [f"{folder}/{number}" for number in range(self._files)]
            write = partial(write_file, content=self._content)
            return PoolMover(self.name, self.bytes, self._pool, write, files).move()


def thread_reads(pool: ThreadPoolExecutor, files: Sequence[Path]) -> PoolMover:
    """Return a mover (benchmarked method of moving bytes) that reads files with threads.

    Args:
        pool: pool of threads. Each thread reads one file at a time.
        files: existing files.
    """
    into = [(file, whole_pages(file.stat().st_size)) for file in files]
    return PoolMover(_THREADS, sum(len(memory) for _, memory in into), pool, _read, into)


def random_pages(size: int) -> memoryview:
    """Return `size` bytes in page-aligned memory. They are random, so that storage cannot compress them."""
    pages = whole_pages(size)
    pages[:] = os.urandom(size)
    return pages


def write_file(path: str, content: memoryview) -> None:
    """Create a file with the given content, and wait until its data is on the disk.

    Args:
        path: path of the file, which must not exist.
        content: bytes to write, in page-aligned memory.
    """
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
