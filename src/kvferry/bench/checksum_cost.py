"""What checksums cost where a chunk is loaded from the page cache.

Without them the same bytes are read by the same calls into the same memory. The file lies in memory (tmpfs),
so that nothing hides the checksums: of a slower disk they are a smaller share.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from kvferry.bench.chunks import CHUNK_TOKENS, chunk_group
from kvferry.bench.rounds import run_rounds
from kvferry.bench.safety_cost import Cost, Job
from kvferry.errors import TransferError
from kvferry.tiers.direct_io import read_all, whole_pages
from kvferry.tiers.format import Chunk
from kvferry.tiers.image import group_of
from kvferry.tiers.image_io import read_image, write_image

TARGET = 0.15
"""Of the time of a load."""

_MEMORY = Path("/dev/shm")  # noqa: S108 - a file system in memory; the file is in a folder of mode 700


class Checked:
    """Reads a chunk file and checks every byte, as the file tier does; a `Mover`."""

    name = "with checksums"

    def __init__(self, fd: int, chunk: Chunk) -> None:
        """Prepare to read the chunk from a file descriptor."""
        self._fd, self._chunk, self._into = fd, chunk, whole_pages(chunk.body_bytes)
        self.bytes = chunk.file_bytes

    def move(self) -> float:
        """Read once.

        Raises:
            TransferError: the file is damaged.
        """
        started = time.perf_counter()
        good = read_image(self._fd, self._chunk, self._into)
        seconds = time.perf_counter() - started
        if not good:
            raise TransferError("the chunk that was just written is damaged; check this machine's memory")
        return seconds


class Unchecked:
    """Reads the same bytes and believes them; a `Mover`."""

    name = "without"

    def __init__(self, fd: int, chunk: Chunk) -> None:
        """Prepare to read the chunk from a file descriptor."""
        self._fd, self.bytes = fd, chunk.file_bytes
        self._pieces = whole_pages(chunk.offsets[0]), whole_pages(chunk.body_bytes)

    def move(self) -> float:
        """Read once."""
        started = time.perf_counter()
        read_all(self._fd, self._pieces)
        return time.perf_counter() - started


def measure(job: Job, progress: Callable[[str], None]) -> list[Cost]:
    """Measure loads of a chunk of the model, with checksums and without."""
    chunk = Chunk(bytes(32), bytes(32), (group_of(chunk_group(job.reading), CHUNK_TOKENS),))
    body = whole_pages(chunk.body_bytes)
    body[:] = os.urandom(len(body))
    with TemporaryDirectory(prefix="kvferry-bench-", dir=_MEMORY) as folder:
        fd = os.open(Path(folder) / "chunk", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
        try:
            write_image(fd, chunk, body)
            on, off = run_rounds([Checked(fd, chunk), Unchecked(fd, chunk)], job.repeats, progress)
        finally:
            os.close(fd)
    work = f"load of a chunk of {chunk.file_bytes >> 20} MiB from memory"
    return [Cost("checksum", work, tuple(on), tuple(off), target=TARGET)]
