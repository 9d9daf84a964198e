"""Measure the cost of encryption when chunks are stored in files and loaded from them.

For comparison, the same chunks are stored and loaded without a key, with checksums. The files are in memory
(tmpfs), so that the share of encryption is as large as possible. It is smaller with a slower disk.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.safety.checksum import FULL_SIZES, LoadSizes, chunks_in_room, cost, load_costs, pairs
from benchmarks.safety.cost import ProtectionCost, SafetyJob
from benchmarks.safety.prompt_loads import prompt_in_files
from kvferry.tiers.files.chunk_file import open_regular, whole_pages, write_chunk, write_encrypted
from kvferry.tiers.format.chunk import Chunk, ChunkGroup
from kvferry.tiers.format.encryption import SECRET_BYTES, EncryptionKey, EncryptionKeys
from kvferry.tools.bench.rank_chunks import CHUNK_TOKENS

_PART = "encrypt"


def measure(
    job: SafetyJob,
    progress: Callable[[str], None],
    sizes: LoadSizes = FULL_SIZES,
) -> list[ProtectionCost]:
    """Load a prompt, and store and load its files one by one, encrypted and not, and return the costs.

    Args:
        job: settings of the benchmark.
        progress: function that is called with a line of text before each round.
        sizes: where and how much is loaded.

    Raises:
        ConfigError: there is not enough memory for the files.
        TransferError: a chunk is damaged.
    """
    chunks = chunks_in_room(job, sizes, copies=4)
    keys = EncryptionKeys((EncryptionKey("bench", secrets.token_bytes(SECRET_BYTES)),))
    load = partial(prompt_in_files, job.reading, chunks * CHUNK_TOKENS)
    with (
        TemporaryDirectory(prefix="kvferry-bench-", dir=sizes.memory) as plain_folder,
        TemporaryDirectory(prefix="kvferry-bench-", dir=sizes.memory) as folder,
        load(Path(plain_folder)) as plain,
        load(Path(folder), encryption=keys) as encrypted,
    ):
        plain.check()
        encrypted.check()
        write_on = partial(_write, folder, plain.group, partial(write_encrypted, keys=keys), encrypted=True)
        write_off = partial(_write, folder, plain.group, write_chunk, encrypted=False)
        numbers = count()
        prompts, files, stores = [], [], []
        for number in range(job.repeats):
            progress(f"loading, round {number + 1} of {job.repeats}")
            prompts.append(pairs(encrypted.load, plain.load, sizes.prompts))
            files.append(
                pairs(
                    lambda: encrypted.read(next(numbers) % encrypted.chunks),
                    lambda: plain.read(next(numbers) % plain.chunks),
                    sizes.files,
                )
            )
            stores.append(pairs(write_on, write_off, sizes.files))
    written = f"a file of {plain.chunk_bytes >> 20} MiB written, of processors"
    return [*load_costs(_PART, plain, prompts, files), cost(_PART, written, stores)]


def _write(
    folder: str, group: ChunkGroup, write: Callable[[int, Chunk, memoryview], None], *, encrypted: bool
) -> float:
    """Write a chunk to a new file that is removed, and return the CPU time in seconds."""
    chunk = Chunk(bytes(32), bytes(16), (group,), encrypted)
    body, path = whole_pages(chunk.body_bytes), f"{folder}/written"
    body[:] = bytes(len(body))
    fd = open_regular(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    try:
        cpu = time.thread_time()
        write(fd, chunk, body)
        return time.thread_time() - cpu
    finally:
        os.close(fd)
        os.unlink(path)  # noqa: PTH108 - as the tier does
