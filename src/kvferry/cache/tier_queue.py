"""A slow tier and the threads that block on its storage.

The engine's thread starts reads and writes, and collects their results later. So it never waits for storage,
even if a mount hangs. If reads are in flight and none has ended for `stuck_seconds`, the tier is *stuck* for
reading: it offers no chunks until a read ends. Writes are treated in the same way, independently of reads. An
operation uses its memory until it ends, however long that takes.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.tiers.format.chunk import ChunkGroup
from kvferry.tiers.outcome import GetOutcome, PutOutcome
from kvferry.tiers.storage_tier import StorageTier, StoreUsage

logger = logging.getLogger(__name__)

STUCK_SECONDS = 5.0
"""Time without an ended operation after which a tier with operations in flight is stuck."""
_MOST_USES = 1 << 12
"""Maximum number of prompts whose use is still to be recorded. If the tier hangs, the oldest are dropped."""
REFRESH_SECONDS = 2.0
"""Time between two refreshes of a tier, which record uses and look for chunks of other processes."""


@dataclass(frozen=True, slots=True)
class WriteEnded:
    """The result of a write that has ended. The caller may change the memory of the chunk again.

    Attributes:
        key: key of the chunk.
        what: outcome of the write.
        seconds: duration of the write.
    """

    key: bytes
    what: PutOutcome
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """The result of a read that has ended. The memory that the read filled does not change any more.

    Attributes:
        key: key of the chunk.
        what: outcome of the read.
        seconds: duration of the read.
    """

    key: bytes
    what: GetOutcome
    seconds: float = field(default=0.0, compare=False)


Done: TypeAlias = WriteEnded | ReadEnded


class Threads(Protocol):
    """Threads that run the jobs of one queue."""

    def put(self, job: Callable[[], None]) -> None:
        """Queue a job for the next free thread."""

    def close(self, ends: float) -> bool:
        """Run the queued jobs, and end the threads before `ends`, in seconds of `time.monotonic`.

        Return False if a thread has not ended by then.
        """


class TierQueue:
    """Reads and writes of one storage tier, done by background threads. Only the engine's thread may use it.

    Attributes:
        name: name of the tier, unique within an engine.
        tier: the storage tier.
        usage: usage (capacity and fill) of the tier's storage, as a background thread last read it.
    """

    def __init__(
        self,
        tier: StorageTier,
        name: str,
        readers: int = 8,
        writers: int = 4,
        clock: Callable[[], float] = time.monotonic,
        *,
        refresh_seconds: float | None = REFRESH_SECONDS,
        stuck_seconds: float = STUCK_SECONDS,
        start_threads: Callable[[int, str], Threads] | None = None,
    ) -> None:
        """Start the threads that read, write and refresh the tier.

        Args:
            tier: storage tier to read from and write to. The method `close` of this queue closes the tier.
            name: name of the tier, unique within an engine.
            readers: number of threads for reads.
            writers: number of threads for writes.
            clock: function that returns monotonic seconds.
            refresh_seconds: time between two refreshes; None never to refresh the tier.
            stuck_seconds: time without an ended operation after which the tier is stuck.
            start_threads: function that starts a number of threads for reads, or for writes; None for daemon
                threads.
        """
        self.name = name
        self.tier, self.usage = tier, StoreUsage()
        self._clock, self._usage_lock = clock, threading.Lock()
        self._refresh_seconds = refresh_seconds
        self._reading, self._writing = _Operations(clock, stuck_seconds), _Operations(clock, stuck_seconds)
        self._most_writes = 4 * writers
        self._uses: deque[Sequence[bytes]] = deque(maxlen=_MOST_USES)
        self._closing = threading.Event()
        start_threads = start_threads or _DaemonThreads
        self._reads = start_threads(readers, f"{self.name}-read")
        self._writes = start_threads(writers, f"{self.name}-write")
        self._refresher = threading.Thread(
            target=self._refresh, name=f"kvferry-{self.name}-refresh", daemon=True
        )
        if refresh_seconds is not None:
            self._refresher.start()

    def known(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Return a mask of the chunks that can be read from the tier now: bool of shape (len(keys),).

        The mask is all False while the tier's reads hang, or while the tier pauses after failures.

        Args:
            keys: keys of the chunks.
        """
        return np.zeros(len(keys), np.bool_) if self._reading.stuck else self.tier.contains(keys)

    @property
    def refuses_reads(self) -> bool:
        """True if no reads should start now, because earlier reads hang or the tier pauses after failures."""
        return self._reading.stuck or self.tier.paused

    @property
    def reading(self) -> int:
        """Number of reads that have started and that `done` has not returned yet."""
        return self._reading.count

    @property
    def writing(self) -> int:
        """Number of writes that have started and that `done` has not returned yet."""
        return self._writing.count

    @property
    def stuck(self) -> bool:
        """True if the tier hangs when reading (`stuck_for_reading`) or when writing (`stuck_for_writing`)."""
        return self._reading.stuck or self._writing.stuck

    @property
    def stuck_for_reading(self) -> bool:
        """True if reads are in flight and none ended in the last `stuck_seconds`."""
        return self._reading.stuck

    @property
    def stuck_for_writing(self) -> bool:
        """True if writes are in flight and none ended in the last `stuck_seconds`."""
        return self._writing.stuck

    @property
    def can_write(self) -> bool:
        """True if another write may start now: fewer writes than the maximum are in flight, and none hang."""
        return self.writing < self._most_writes and not self._writing.stuck

    def read(self, key: bytes, group: ChunkGroup, into: memoryview) -> None:
        """Queue a read of a chunk. The memory `into` must stay reserved until `done` returns the result.

        Args:
            key: key of the chunk.
            group: description of the expected content: KV cache group, number of tokens and layout.
            into: writable memory for the chunk's content, of exactly the size of the content.
        """
        self._reading.begin()
        self._reads.put(partial(self._read, key, group, into))

    def write(self, key: bytes, group: ChunkGroup, body: memoryview, *, cold: bool = False) -> None:
        """Queue a write of a chunk. The memory `body` must not change until `done` returns the result.

        Args:
            key: key of the chunk.
            group: description of the content: KV cache group, number of tokens and layout.
            body: writable memory with the sections (parts) of the chunk, each at a multiple of 4096 bytes.
                The tier sets the padding between the sections to zero.
            cold: True to evict the chunk before all chunks that are not cold, until it is used.
        """
        self._writing.begin()
        self._writes.put(partial(self._write, key, group, body, cold=cold))

    def mark_used(self, keys: Sequence[bytes]) -> None:
        """Mark the chunks of a prompt as used. The refresh thread records the use in the tier later.

        Args:
            keys: keys of the chunks, the first chunk first.
        """
        self._uses.append(keys)

    def done(self) -> list[Done]:
        """Return the results of the reads and writes that ended since the last call, and clear them."""
        return [*self._reading.done(), *self._writing.done()]

    def close(self, patience_seconds: float) -> None:
        """Finish all queued reads and writes, end the threads, and close the tier.

        Args:
            patience_seconds: longest time to wait. If a read or write has not ended by then, a warning is
                logged and the tier stays open.
        """
        self._closing.set()
        ends = time.monotonic() + patience_seconds
        idle = [threads.close(ends) for threads in (self._writes, self._reads)]
        if self._refresher.ident is not None:
            self._refresher.join(max(ends - time.monotonic(), 0))
        if all(idle) and not self._refresher.is_alive():
            self.tier.close()
        else:
            logger.warning(
                "%s tier: a read or write has not ended %g s after the engine began to stop, and is "
                "abandoned; see whether its storage hangs",
                self.name, patience_seconds,
            )  # fmt: skip

    def _read(self, key: bytes, group: ChunkGroup, into: memoryview) -> None:
        """Read a chunk from the tier, and record the result. This runs on a reader thread.

        Args:
            key: key of the chunk.
            group: description of the expected content: KV cache group, number of tokens and layout.
            into: memory to read into.
        """
        began = self._clock()
        try:
            what = self.tier.get(key, group, into)
        except Exception:
            logger.exception("%s tier: fetch of %s", self.name, key.hex())
            what = GetOutcome.IO_ERROR
        self._reading.end(ReadEnded(key, what, self._clock() - began))

    def _write(self, key: bytes, group: ChunkGroup, body: memoryview, *, cold: bool) -> None:
        """Write a chunk to the tier, and record the result. This runs on a writer thread.

        Args:
            key: key of the chunk.
            group: description of the content: KV cache group, number of tokens and layout.
            body: memory with the chunk.
        """
        began = self._clock()
        try:
            what = self.tier.put(key, group, body, cold)
        except Exception:
            logger.exception("%s tier: store of %s", self.name, key.hex())
            what = PutOutcome.IO_ERROR
        seconds = self._clock() - began
        self._read_usage()
        self._writing.end(WriteEnded(key, what, seconds))

    def _read_usage(self) -> None:
        """Read the usage (capacity and fill) of the tier's storage, and keep the result in `usage`."""
        try:
            with self._usage_lock:  # so that an older result does not replace a newer one
                self.usage = self.tier.usage()
        except Exception:
            logger.exception("%s tier: what lies around", self.name)

    def _refresh(self) -> None:
        """Refresh the tier every `refresh_seconds` until the queue is closed. This runs on its own thread.

        A refresh reads the usage of the storage, records which chunks were used, and lets the tier look for
        chunks of other processes.
        """
        while True:
            self._read_usage()
            closing = self._closing.wait(self._refresh_seconds)
            self._record_uses()
            if closing:
                return
            try:
                self.tier.refresh()
            except Exception:
                logger.exception("%s tier: refresh", self.name)

    def _record_uses(self) -> None:
        """Tell the tier which chunks were used since the last call, so that it evicts them late.

        `mark_used` has queued the keys of each prompt. The tier evicts chunks in the order in which they are
        reported to it, so the last chunk of a prompt is reported first. A chunk that several prompts used is
        reported once, with the prompt that used it last.
        """
        order: dict[bytes, None] = {}
        while self._uses:
            for key in reversed(self._uses.popleft()):
                order.pop(key, None)
                order[key] = None
        try:
            if order:
                self.tier.mark_used(list(order))
        except Exception:
            logger.exception("%s tier: what was used", self.name)


class _Operations:
    """Counts the reads (or the writes) of a tier that are in flight, and keeps their results for `done`.

    Worker threads call `end`. The engine's thread calls the other methods.

    Args:
        clock: function that returns monotonic seconds.
        stuck_seconds: time without an ended operation after which operations in flight are stuck.

    Attributes:
        count: number of reads or writes that have begun and whose results `done` has not returned yet.
    """

    def __init__(self, clock: Callable[[], float], stuck_seconds: float) -> None:
        self.count = 0
        self._clock, self._stuck_seconds = clock, stuck_seconds
        self._progress_at = clock()  # time when an operation last ended, or began while none was in flight
        self._ended: deque[Done] = deque()

    def begin(self) -> None:
        """Record the start of a read or write."""
        if not self._in_flight:
            self._progress_at = self._clock()
        self.count += 1

    def end(self, what: Done) -> None:
        """Record the result of a read or write that has ended."""
        self._ended.append(what)
        self._progress_at = self._clock()

    def done(self) -> list[Done]:
        """Return the results of the reads or writes that ended since the last call, and clear them."""
        found: list[Done] = []
        while self._ended:
            found.append(self._ended.popleft())
        self.count -= len(found)
        return found

    @property
    def stuck(self) -> bool:
        """True if reads or writes are in flight and none ended in the last `stuck_seconds`."""
        return self._in_flight > 0 and self._clock() - self._progress_at > self._stuck_seconds

    @property
    def _in_flight(self) -> int:
        """Number of reads or writes that have begun and not ended."""
        return self.count - len(self._ended)


class _DaemonThreads:
    """Daemon threads that run the jobs of one queue. A hanging thread does not keep the process alive.

    Args:
        count: number of threads.
        name: part of the threads' names, for example ``file-read``.
    """

    def __init__(self, count: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"kvferry-{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, job: Callable[[], None]) -> None:
        """Queue a job for the next free thread."""
        self._jobs.put(job)

    def close(self, ends: float) -> bool:
        """Tell the threads to end after all queued jobs, and wait for them until a deadline.

        Args:
            ends: deadline, in seconds of `time.monotonic`.

        Returns:
            True if all threads ended before the deadline.
        """
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(max(ends - time.monotonic(), 0))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
