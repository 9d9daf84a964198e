"""A slow tier and the threads that wait for its storage.

The engine's thread starts reads and writes and collects their results. It does not wait for a mount that
hangs.
If reads are under way and none has ended for `STUCK_SECONDS`, the tier is *stuck* for reading: it gets no
further reads until one ends. Writes are treated in the same way, independently of reads. An operation owns
the memory that it reads or writes until it ends, however long that takes.
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
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.tiers.format.chunk import ChunkGroup
from kvferry.tiers.outcome import GetOutcome, PutOutcome
from kvferry.tiers.storage_tier import StorageTier, StoreUsage

logger = logging.getLogger(__name__)

STUCK_SECONDS = 5.0
_MOST_USES = 1 << 12
"""Maximum number of prompts whose use is not yet recorded. If the tier hangs, the latest ones are kept."""
REFRESH_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class WriteEnded:
    """The result of a store, which no longer reads its memory."""

    key: bytes
    what: PutOutcome
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """The result of a fetch, which no longer writes its memory."""

    key: bytes
    what: GetOutcome
    seconds: float = field(default=0.0, compare=False)


Done: TypeAlias = WriteEnded | ReadEnded


class TierQueue:
    """Reads and writes of one storage tier. Only the engine's thread calls its methods.

    Attributes:
        name: name of the tier, unique within an engine.
        usage: last known usage of the tier's storage.
    """

    def __init__(
        self,
        tier: StorageTier,
        name: str,
        readers: int = 8,
        writers: int = 4,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the threads.

        Args:
            tier: the tier, which the queue takes over and closes.
            name: name of the tier, unique within an engine.
            readers, writers: number of threads for reads and for writes.
            clock: monotonic seconds.
        """
        self.name = name
        self.tier, self.usage = tier, StoreUsage()
        self._clock, self._looking = clock, threading.Lock()
        self._reading, self._writing = _Operations(clock), _Operations(clock)
        self._most_writes = 4 * writers
        self._uses: deque[Sequence[bytes]] = deque(maxlen=_MOST_USES)
        self._closing = threading.Event()
        self._reads, self._writes = (
            _Threads(readers, f"{self.name}-read"),
            _Threads(writers, f"{self.name}-write"),
        )
        self._refresher = threading.Thread(
            target=self._refresh, name=f"kvferry-{self.name}-refresh", daemon=True
        )
        self._refresher.start()

    def known(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Return which keys can be read now: bool of shape (len(keys),), all False if stuck for reading."""
        return np.zeros(len(keys), np.bool_) if self._reading.stuck else self.tier.contains(keys)

    @property
    def refuses_reads(self) -> bool:
        """Return whether the tier currently accepts no reads: it is stuck for reading or paused."""
        return self._reading.stuck or self.tier.paused

    @property
    def reading(self) -> int:
        """The number of fetches whose result `done` has not returned."""
        return self._reading.count

    @property
    def writing(self) -> int:
        """The number of stores whose result `done` has not returned."""
        return self._writing.count

    @property
    def stuck(self) -> bool:
        """Return whether the tier is stuck for reading or for writing."""
        return self._reading.stuck or self._writing.stuck

    @property
    def stuck_for_reading(self) -> bool:
        """Return whether fetches are under way and none ended in the last `STUCK_SECONDS`."""
        return self._reading.stuck

    @property
    def stuck_for_writing(self) -> bool:
        """Return whether stores are under way and none ended in the last `STUCK_SECONDS`."""
        return self._writing.stuck

    @property
    def can_write(self) -> bool:
        """Return whether the queue has room for another store and is not stuck for writing."""
        return self.writing < self._most_writes and not self._writing.stuck

    def read(self, key: bytes, group: ChunkGroup, into: memoryview) -> None:
        """Start to fetch a chunk. The fetch owns `into` until it ends."""
        self._reading.begin()
        self._reads.put(partial(self._read, key, group, into))

    def write(self, key: bytes, group: ChunkGroup, body: memoryview) -> None:
        """Start to store a chunk. The store owns `body` until it ends."""
        self._writing.begin()
        self._writes.put(partial(self._write, key, group, body))

    def used(self, keys: Sequence[bytes]) -> None:
        """Mark a prompt's chunks as used, the first chunk first. The next refresh records it in the tier."""
        self._uses.append(keys)

    def done(self) -> list[Done]:
        """Return the reads and writes that ended since the last call."""
        return [*self._reading.done(), *self._writing.done()]

    def close(self, patience_seconds: float) -> None:
        """Finish the reads and writes in the queue within `patience_seconds`, then end the threads."""
        self._closing.set()
        ends = time.monotonic() + patience_seconds
        idle = [threads.close(ends) for threads in (self._writes, self._reads)]
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
        began = self._clock()
        try:
            what = self.tier.get(key, group, into)
        except Exception:
            logger.exception("%s tier: fetch of %s", self.name, key.hex())
            what = GetOutcome.IO_ERROR
        self._reading.end(ReadEnded(key, what, self._clock() - began))

    def _write(self, key: bytes, group: ChunkGroup, body: memoryview) -> None:
        began = self._clock()
        try:
            what = self.tier.put(key, group, body)
        except Exception:
            logger.exception("%s tier: store of %s", self.name, key.hex())
            what = PutOutcome.IO_ERROR
        seconds = self._clock() - began
        self._look_around()
        self._writing.end(WriteEnded(key, what, seconds))

    def _look_around(self) -> None:
        try:
            with self._looking:  # what was looked at last is what is told last
                self.usage = self.tier.usage()
        except Exception:
            logger.exception("%s tier: what lies around", self.name)

    def _refresh(self) -> None:
        while True:
            self._look_around()
            closing = self._closing.wait(REFRESH_SECONDS)
            self._note_uses()
            if closing:
                return
            try:
                self.tier.refresh()
            except Exception:
                logger.exception("%s tier: refresh", self.name)

    def _note_uses(self) -> None:
        """Record the used chunks in the tier, each once.

        A chunk comes after the later chunks that depend on it.
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
    """The reads or the writes whose result has not been collected.

    Worker threads call `end`. The engine's thread calls the other methods.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.count = 0
        self._clock = clock
        self._moved_at = clock()  # when one has last ended, or begun where none was under way
        self._ended: deque[Done] = deque()

    def begin(self) -> None:
        """Count an operation that starts."""
        if not self._at_work:
            self._moved_at = self._clock()
        self.count += 1

    def end(self, what: Done) -> None:
        """Record the end of an operation."""
        self._ended.append(what)
        self._moved_at = self._clock()

    def done(self) -> list[Done]:
        """Return the operations that ended since the last call."""
        found: list[Done] = []
        while self._ended:
            found.append(self._ended.popleft())
        self.count -= len(found)
        return found

    @property
    def stuck(self) -> bool:
        """Return whether operations are running and none ended in the last `STUCK_SECONDS`."""
        return self._at_work > 0 and self._clock() - self._moved_at > STUCK_SECONDS

    @property
    def _at_work(self) -> int:
        return self.count - len(self._ended)


class _Threads:
    """Daemon threads that serve one queue. A thread that hangs does not keep the process from ending."""

    def __init__(self, count: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"kvferry-{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def close(self, ends: float) -> bool:
        """End the threads once the queue is empty.

        Args:
            ends: deadline, in seconds of `time.monotonic`.

        Returns:
            Whether all threads ended by then.
        """
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(max(ends - time.monotonic(), 0))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
