"""The engines that are known to hold chunks in host memory, and how they are found.

A *holder* of a chunk is another engine that has it in host memory. There are three ways to find holders:

- *asked*: the reader asks all engines that its settings name;
- *directory*: the reader asks a key-value store, in which each engine publishes its chunks (`directory`);
- *hint*: the request names engines, which are asked.

All are hearsay: a holder may have evicted the chunk meanwhile. Then a load is shorter, and never wrong.
"""

from __future__ import annotations

import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import takewhile

from kvferry.tiers.index import TierKeys
from kvferry.transport.handshake import Address

MAX_CHUNKS = 1 << 18  # maximum number of chunks whose holders are remembered
FRESH_SECONDS = 20.0
STRUCK_OUT_SECONDS = 10.0  # less than an engine that has ended stays in the directory
MAX_HOLDERS = 4  # maximum number of holders of a chunk that are remembered


class LookUp:
    """A search for the holders of a prompt's chunks.

    `over` is True once all that were asked have answered, or their time is over.
    """

    def __init__(self, on_over: Callable[[], None]) -> None:
        self._lock, self._open, self._on_over = threading.Lock(), 1, on_over

    @property
    def over(self) -> bool:
        return not self._open

    def begin(self, count: int) -> None:
        """Wait for so many more answers, and for those that `answered` has not counted yet."""
        with self._lock:
            self._open += count - 1
            ended = count > 0 and not self._open
        if ended:
            self._on_over()

    def answered(self) -> None:
        with self._lock:
            self._open -= 1
            ended = not self._open
        if ended:
            self._on_over()


class KnownHolders:
    """The holders of chunks, by key. Thread-safe. `keys` gets every change.

    The answers are forgotten after `FRESH_SECONDS`, and the oldest ones if there are too many.
    """

    def __init__(
        self,
        keys: TierKeys,
        clock: Callable[[], float] = time.monotonic,
        max_chunks: int = MAX_CHUNKS,
    ) -> None:
        self.keys = keys
        self._clock, self._max_chunks, self._lock = clock, max_chunks, threading.Lock()
        self._struck_out: dict[Address, float] = {}  # until when, by engine
        # Holders of each chunk, and when the newest of them was found; the oldest chunk first.
        self._found: OrderedDict[bytes, tuple[float, tuple[Address, ...]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def of(self, key: bytes) -> list[Address]:
        """Return the holders of a chunk, in random order, so that they share the readers."""
        _, holders = self._found.get(key, (0.0, ()))
        return random.sample(holders, len(holders))

    def add(self, keys: Iterable[bytes], holder: Address) -> None:
        now = self._clock()
        with self._lock:
            if self._struck_out.get(holder, now) > now:
                return
            for key in keys:
                _, before = self._found.pop(key, (0.0, ()))
                others = [one for one in before if one != holder][-MAX_HOLDERS + 1 :]
                self._found[key] = now, (*others, holder)
                self.keys.add(key)
            while len(self._found) > self._max_chunks:
                key, _ = self._found.popitem(last=False)
                self.keys.discard(key)

    def remove(self, key: bytes, holder: Address) -> None:
        with self._lock:
            self._remove(key, holder)

    def strike_out(self, holder: Address) -> None:
        """Forget all chunks of an engine that cannot be read, and for a while what others say of it."""
        with self._lock:
            self._struck_out[holder] = self._clock() + STRUCK_OUT_SECONDS
            for key in [key for key, (_, holders) in self._found.items() if holder in holders]:
                self._remove(key, holder)

    def readmit(self, holder: Address) -> None:
        """End a strike-out, because the engine has answered."""
        with self._lock:
            self._struck_out.pop(holder, None)

    def expire(self) -> None:
        """Forget what was found long ago, and strike-outs that are over."""
        now = self._clock()
        oldest = now - FRESH_SECONDS
        with self._lock:
            for holder in [one for one, until in self._struck_out.items() if until <= now]:
                del self._struck_out[holder]
            late = list(takewhile(lambda key: self._found[key][0] < oldest, self._found))
            for key in late:
                del self._found[key]
                self.keys.discard(key)

    def _remove(self, key: bytes, holder: Address) -> None:
        found_at, holders = self._found.get(key, (0.0, ()))
        left = tuple(one for one in holders if one != holder)
        if left:
            self._found[key] = found_at, left
        elif self._found.pop(key, None) is not None:
            self.keys.discard(key)
