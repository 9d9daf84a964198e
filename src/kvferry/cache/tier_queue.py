"""A slow tier and the threads that wait for it, so that nobody else does.

The engine's thread gives orders and takes what became of them. Threads that hang in a mount hang alone: when
reads are under way and none has ended for `STUCK_SECONDS`, the tier is *stuck* for reading, and is asked for
nothing more until one ends; the same for writing, since one may hang where the other goes on. What an
operation reads or writes belongs to it until it is over, however long that is.
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
"""Prompts whose use has not been noted, at most: of a tier that hangs, the last ones."""
REFRESH_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Wrote:
    """A store has come to its end; nothing reads its memory any more."""

    key: bytes
    what: PutOutcome
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Read:
    """A fetch has come to its end; nothing writes its memory any more."""

    key: bytes
    what: GetOutcome
    seconds: float = field(default=0.0, compare=False)


Done: TypeAlias = Wrote | Read


class TierQueue:
    """Reads and writes of one storage tier. Only the engine's thread calls its methods.

    Attributes:
        name: of the tier, alone among those of an engine.
        around: what lay around its namespace when that was last looked at.
    """

    def __init__(
        self,
        tier: StorageTier,
        readers: int = 8,
        writers: int = 4,
        clock: Callable[[], float] = time.monotonic,
        name: str = "",
    ) -> None:
        """Start the threads.

        Args:
            tier: taken over, closed with us.
            readers, writers: how many threads for each.
            clock: seconds.
            name: the tier's own if empty.
        """
        self.name = name or tier.name
        self.tier, self.around = tier, StoreUsage()
        self._clock, self._looking = clock, threading.Lock()
        self._reading, self._writing = _UnderWay(clock), _UnderWay(clock)
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
        """Which of `keys` can be asked for now: none of a tier that is stuck for reading."""
        return np.zeros(len(keys), np.bool_) if self._reading.stuck else self.tier.contains(keys)

    @property
    def unread(self) -> bool:
        """Nothing can be asked for now."""
        return self._reading.stuck or self.tier.paused

    @property
    def reading(self) -> int:
        """Fetches of which nobody has heard the end."""
        return self._reading.count

    @property
    def writing(self) -> int:
        """Stores of which nobody has heard the end."""
        return self._writing.count

    @property
    def stuck(self) -> bool:
        """For reading or for writing."""
        return self._reading.stuck or self._writing.stuck

    @property
    def stuck_for_reading(self) -> bool:
        """Fetches are under way, and none has ended for a while."""
        return self._reading.stuck

    @property
    def stuck_for_writing(self) -> bool:
        """Stores are under way, and none has ended for a while."""
        return self._writing.stuck

    @property
    def can_write(self) -> bool:
        """There is room for another store. Where there is none, the tier is slower than what it is given."""
        return self.writing < self._most_writes and not self._writing.stuck

    def read(self, key: bytes, group: ChunkGroup, into: memoryview) -> None:
        """Fetch a chunk; `into` is the fetch's until it has ended."""
        self._reading.begin()
        self._reads.put(partial(self._read, key, group, into))

    def write(self, key: bytes, group: ChunkGroup, body: memoryview) -> None:
        """Store a chunk; `body` is the store's until it has ended."""
        self._writing.begin()
        self._writes.put(partial(self._write, key, group, body))

    def used(self, keys: Sequence[bytes]) -> None:
        """A prompt's chunks were used, from its beginning on; the tier notes that with the next refresh."""
        self._uses.append(keys)

    def done(self) -> list[Done]:
        """What has ended since the last call."""
        return [*self._reading.done(), *self._writing.done()]

    def close(self, patience_seconds: float) -> None:
        """End the threads: stores that were given are written, as long as that takes no longer than this."""
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
        self._reading.end(Read(key, what, self._clock() - began))

    def _write(self, key: bytes, group: ChunkGroup, body: memoryview) -> None:
        began = self._clock()
        try:
            what = self.tier.put(key, group, body)
        except Exception:
            logger.exception("%s tier: store of %s", self.name, key.hex())
            what = PutOutcome.IO_ERROR
        seconds = self._clock() - began
        self._look_around()
        self._writing.end(Wrote(key, what, seconds))

    def _look_around(self) -> None:
        try:
            with self._looking:  # what was looked at last is what is told last
                self.around = self.tier.usage()
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
        """Note what was used, each chunk once: after all that are of no use without it."""
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


class _UnderWay:
    """Operations of one kind whose end nobody has heard of. Threads call `end`, the engine's the rest."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.count = 0
        self._clock = clock
        self._moved_at = clock()  # when one has last ended, or begun where none was under way
        self._ended: deque[Done] = deque()

    def begin(self) -> None:
        """One more."""
        if not self._at_work:
            self._moved_at = self._clock()
        self.count += 1

    def end(self, what: Done) -> None:
        """One has come to its end."""
        self._ended.append(what)
        self._moved_at = self._clock()

    def done(self) -> list[Done]:
        """What has ended since the last call."""
        found: list[Done] = []
        while self._ended:
            found.append(self._ended.popleft())
        self.count -= len(found)
        return found

    @property
    def stuck(self) -> bool:
        """Some are still at work, and none has ended for a while, whether or not anybody has heard."""
        return self._at_work > 0 and self._clock() - self._moved_at > STUCK_SECONDS

    @property
    def _at_work(self) -> int:
        return self.count - len(self._ended)


class _Threads:
    """Daemon threads over one queue: one that hangs does not keep the process from ending."""

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
        """End once the queue is empty; whether they did by then (seconds of `time.monotonic`)."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(max(ends - time.monotonic(), 0))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
