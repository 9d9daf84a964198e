"""What checksums cost where chunks are loaded from the page cache.

Without them the same bytes are read by the same calls into the same memory. The files lie in memory (tmpfs),
so that nothing hides the checksums: of a slower disk they are a smaller share.

Files and arena are too large for the processor's caches, as those of an engine are. A load from memory waits
for nothing, so its time is that of the thread on its core: what else a machine does counts less.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from kvferry.bench.chunks import CHUNK_TOKENS, chunk_group
from kvferry.bench.safety_cost import Cost, Job
from kvferry.errors import ConfigError, TransferError
from kvferry.tiers.direct_io import read_all, whole_pages
from kvferry.tiers.format import Chunk
from kvferry.tiers.image import group_of
from kvferry.tiers.image_io import read_image, write_image

TARGET = 0.15
"""Of the time of a load."""

_MEMORY = Path("/dev/shm")  # noqa: S108 - a file system in memory; the files are in a folder of mode 700
_CACHES_BYTES = 128 << 20
"""Together, at least as many as caches of processors have."""
_LEAST_FILES = 4
_PAIRS = 20
"""Loads of a round, with checksums and without; the round's time is the median."""


def measure(job: Job, progress: Callable[[str], None]) -> list[Cost]:
    """Measure loads of chunks of the model, with checksums and without.

    Raises:
        ConfigError: memory has no room for the files.
        TransferError: a chunk is damaged.
    """
    chunk = Chunk(bytes(32), bytes(32), (group_of(chunk_group(job.reading), CHUNK_TOKENS),))
    with _files(chunk) as files:
        slots = [whole_pages(chunk.body_bytes) for _ in files]
        header = whole_pages(chunk.offsets[0])
        for slot in (*slots, header):
            slot[:] = bytes(len(slot))

        def checked(fd: int, slot: memoryview) -> bool:
            return read_image(fd, chunk, slot)

        def unchecked(fd: int, slot: memoryview) -> bool:
            return read_all(fd, (header, slot)) == chunk.file_bytes

        loads, places = (checked, unchecked), cycle(zip(files, slots, strict=True))
        on, off = list[float](), list[float]()
        for number in range(-1, job.repeats):
            progress(f"loading, round {number + 1} of {job.repeats}")
            seconds: tuple[list[float], ...] = ([], [])
            for pair in range(_PAIRS):
                for which in (0, 1) if pair % 2 else (1, 0):
                    seconds[which].append(_time(loads[which], *next(places)))
            if number >= 0:  # what the first load of all waits for is no load's
                on.append(float(np.median(seconds[0])))
                off.append(float(np.median(seconds[1])))
    work = f"load of a chunk of {chunk.file_bytes >> 20} MiB from memory"
    return [Cost("checksum", work, tuple(on), tuple(off), target=TARGET)]


def _time(load: Callable[[int, memoryview], bool], fd: int, slot: memoryview) -> float:
    started = time.thread_time()
    good = load(fd, slot)
    seconds = time.thread_time() - started
    if not good:
        raise TransferError("a chunk that was just written is damaged; check this machine's memory")
    return seconds


@contextmanager
def _files(chunk: Chunk) -> Iterator[list[int]]:
    """Descriptors of files of a chunk, in memory."""
    count = max(-(-_CACHES_BYTES // chunk.file_bytes), _LEAST_FILES)
    count += 1 - count % 2  # an odd number: each is loaded with checksums and without, in turn
    needed, free = count * chunk.file_bytes, shutil.disk_usage(_MEMORY).free
    if needed > free:
        raise ConfigError(
            f"{_MEMORY} has {free >> 20} MiB free, measuring checksums takes {needed >> 20} MiB; enlarge it, "
            "or choose fewer layers"
        )
    body = whole_pages(chunk.body_bytes)
    body[:] = np.random.default_rng(7).bytes(len(body))
    with TemporaryDirectory(prefix="kvferry-bench-", dir=_MEMORY) as folder, ExitStack() as stack:
        files = []
        for number in range(count):
            fd = os.open(Path(folder) / str(number), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            write_image(fd, chunk, body)
            files.append(fd)
        yield files
