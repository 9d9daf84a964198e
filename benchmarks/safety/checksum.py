"""Measure the cost of checksums when chunks are loaded from files.

For comparison, the same file is opened and read into the same memory without checksums. The files are in
memory (tmpfs), so that the checksums' share is as large as possible. It is smaller with a slower disk.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar
from unittest.mock import patch

import numpy as np

from benchmarks.safety.cost import ProtectionCost, SafetyJob
from benchmarks.safety.prompt_loads import LoadTimes, PromptLoads, prompt_in_files
from kvferry.common.errors import ConfigError
from kvferry.tiers.files import chunk_file
from kvferry.tiers.format.chunk import Chunk
from kvferry.tools.bench.rank_chunks import CHUNK_TOKENS, chunk_group

TARGET = 0.15
"""Largest allowed share of a load's time."""

_PART = "checksum"
_Took = TypeVar("_Took")


@dataclass(frozen=True, slots=True)
class LoadSizes:
    """Where and how much is loaded.

    Attributes:
        memory: folder of a file system in memory. The files are in a folder of mode 700 in it.
        least_bytes: least size of a prompt's chunks in bytes, more than the caches of processors hold.
        prompts, files: numbers of pairs of loads per round: of the whole prompt, and of one file. Their
            median is counted.
    """

    memory: Path = Path("/dev/shm")  # noqa: S108 - the files are in a folder of mode 700
    least_bytes: int = 128 << 20
    prompts: int = 5
    files: int = 20


FULL_SIZES = LoadSizes()


def measure(
    job: SafetyJob,
    progress: Callable[[str], None],
    sizes: LoadSizes = FULL_SIZES,
) -> list[ProtectionCost]:
    """Load a prompt, and its files one by one, with and without checksums, and return the costs.

    Args:
        job: settings of the benchmark.
        progress: function that is called with a line of text before each round.
        sizes: where and how much is loaded.

    Raises:
        ConfigError: there is not enough memory for the files.
        TransferError: a chunk is damaged.
    """
    chunks = chunks_in_room(job, sizes, copies=2)
    with (
        TemporaryDirectory(prefix="kvferry-bench-", dir=sizes.memory) as folder,
        prompt_in_files(job.reading, chunks * CHUNK_TOKENS, Path(folder)) as loads,
    ):
        loads.check()
        with unchecked():
            loads.check()
        numbers = count()
        prompts, files = [], []
        for number in range(job.repeats):
            progress(f"loading, round {number + 1} of {job.repeats}")
            prompts.append(_checked_and_not(loads.load, sizes.prompts))
            files.append(_checked_and_not(lambda: loads.read(next(numbers) % loads.chunks), sizes.files))
    return load_costs(_PART, loads, prompts, files, TARGET)


def chunks_in_room(job: SafetyJob, sizes: LoadSizes, copies: int) -> int:
    """Return the number of chunks to load. Raise ConfigError if so many copies of them do not fit."""
    chunk_bytes = chunk_group(job.reading).chunk_bytes
    chunks = max(job.tokens // CHUNK_TOKENS, -(-sizes.least_bytes // chunk_bytes))
    _check_room(sizes.memory, copies * chunks * chunk_bytes)
    return chunks


def load_costs(
    part: str,
    loads: PromptLoads,
    prompts: Sequence[tuple[list[LoadTimes], list[LoadTimes]]],
    files: Sequence[tuple[list[float], list[float]]],
    target: float | None = None,
) -> list[ProtectionCost]:
    """Return the costs of a protection when prompts and files are loaded, from what `pairs` returned."""
    walls, cpus = (
        [[[getattr(took, name) for took in side] for side in pair] for pair in prompts]
        for name in ("wall", "cpu")
    )
    return [
        cost(
            part, f"load of {loads.chunks * CHUNK_TOKENS:,} tokens into blocks, on the clock", walls, target
        ),
        cost(part, "the same, of processors", cpus, target),
        cost(part, f"of that, a file of {loads.chunk_bytes >> 20} MiB read", files),
    ]


def _checked_and_not(load: Callable[[], _Took], number: int) -> tuple[list[_Took], list[_Took]]:
    return pairs(load, lambda: _without(load), number)


def pairs(on: Callable[[], _Took], off: Callable[[], _Took], number: int) -> tuple[list[_Took], list[_Took]]:
    """Call `on` and `off` so many times, in alternating order. Return the times of each."""
    took_on, took_off = list[_Took](), list[_Took]()
    for index in range(number):
        if index % 2:
            took_off.append(off())
        took_on.append(on())
        if not index % 2:
            took_off.append(off())
    return took_on, took_off


def _without(load: Callable[[], _Took]) -> _Took:
    with unchecked():
        return load()


def cost(
    part: str, work: str, rounds: Sequence[Sequence[Sequence[float]]], target: float | None = None
) -> ProtectionCost:
    """Return the cost of a protection from the times with and without it, several of each per round."""
    on, off = (tuple(float(np.median(pair[side])) for pair in rounds) for side in (0, 1))
    return ProtectionCost(part=part, work=work, on=on, off=off, target=target)


@contextmanager
def unchecked() -> Iterator[None]:
    """Read files without verifying checksums while the block runs."""

    def believe(_: Chunk, __: object, body: memoryview, wait: Callable[[int], object]) -> bool:
        wait(len(body))
        return True

    with patch.object(chunk_file, "is_chunk", believe):
        yield


def _check_room(memory: Path, needed: int) -> None:
    """Raise ConfigError if a folder has less than the needed bytes of free space."""
    free = shutil.disk_usage(memory).free
    if needed > free:
        raise ConfigError(
            f"{memory} has {free >> 20} MiB free, measuring takes {needed >> 20} MiB; enlarge it, "
            "or choose fewer layers or tokens"
        )
