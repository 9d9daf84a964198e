"""Runs of chunks with the same history, in arrays, so that all runs are ranked at once."""

from __future__ import annotations

import numpy as np

from kvferry.tiers.eviction.return_times import Floats, Ints


class Runs:
    """Runs of chunks, in arrays of shape (slots,). A run keeps its slot until all its chunks have left.

    Attributes:
        keys: keys in the order of the prompt. Chunks that have left the run may still be among them.
        number: number of runs before this one, which identifies it.
        used_at: time of the last use.
        found_at: time at which a request last found a chunk, or that of the last use.
        classes: class of the chunks.
        is_pending: True if no request has ended yet that used the chunks.
        cost: cost of a token of the run, relative to the first token of a prompt.
        after, after_number: slot and number of the run that continues this one; -1 if there is none.
        observed: bytes of all chunks, with ghosts.
        loose: bytes of the chunks that can be evicted: without ghosts and pinned ones.
    """

    def __init__(self) -> None:
        self.keys: list[list[bytes]] = []
        self.number, self.used_at, self.found_at, self.classes = (np.zeros(0, np.int64) for _ in range(4))
        self.after, self.after_number = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.observed, self.loose = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.is_pending, self.cost = np.zeros(0, np.bool_), np.zeros(0)
        self._free: list[int] = []
        self._count = 0

    def add(self, keys: list[bytes], used_at: int, of: int, cost: float, *, pending: bool) -> int:
        """Add a run without bytes. Return its slot."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._count += 1
        self.keys[slot], self.number[slot] = keys, self._count
        self.used_at[slot] = self.found_at[slot] = used_at
        self.classes[slot] = of
        self.is_pending[slot], self.cost[slot] = pending, cost
        self.after[slot] = self.after_number[slot] = -1
        return slot

    def leave(self, slots: Ints, sizes: Ints, loose: Ints) -> None:
        """Take chunks out of their runs: their slots, bytes, and bytes if they could be evicted or else 0."""
        np.subtract.at(self.observed, slots, sizes)
        np.subtract.at(self.loose, slots, loose)
        for slot in set(slots.tolist()):
            if not self.observed[slot]:
                self.keys[slot] = []
                self._free.append(slot)

    def with_continuations(self, slots: Ints, scores: Floats) -> Floats:
        """Return the scores of runs, each at least that of the runs that continue it."""
        of_all = np.zeros(len(self.keys))
        of_all[slots] = scores
        after = self.after[slots]
        continued = (after >= 0) & (self.number[after] == self.after_number[slots]) & (self.loose[after] > 0)
        slots, after = slots[continued], after[continued]
        while (lower := of_all[slots] < of_all[after]).any():
            of_all[slots[lower]] = of_all[after[lower]]
        return of_all

    def _grow(self) -> None:
        begin, more = len(self.keys), max(len(self.keys), 64)
        self.keys += [[] for _ in range(more)]
        arrays = (name for name, array in vars(self).items() if isinstance(array, np.ndarray))
        for name in list(arrays):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros(more, old.dtype)]))
        self._free = list(range(begin + more - 1, begin - 1, -1))
