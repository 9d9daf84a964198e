"""Leases, and the words that tell a consumer that a lease ended.

A lease has a slot. Every worker of the producer keeps one 8-byte word per slot in registered memory. The high
half of the word is the worker's incarnation (a random number of this run), the low half is the slot's
generation (a counter). A `LeaseWord` names the slot and its current generation.

Granting a lease writes nothing, so the lease is valid at once. When a lease ends, every worker raises the
generation *before* the blocks are freed. A consumer reads the word with a second READ, which it starts after
its data has arrived. If the word is unchanged, no block had been freed when the data was read.

    FREE ─grant→ HELD ─release or expiry→ ENDING ─all workers have raised the word→ FREE

A lease is *claimed* when a consumer redeems its ticket. It may never be claimed, because the request can be
refused, or the client can disconnect, before a consumer receives the offer.
"""

from __future__ import annotations

import heapq
import math
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from kvferry.common.errors import TransferError

_GENERATIONS = 1 << 32

# Number of entries in the heap of expiries that may belong to ended leases, however few leases are held.
_SPARE_ENTRIES = 64


@dataclass(frozen=True, slots=True)
class LeaseWord:
    """Where the word of a lease is, and its value while the lease is valid."""

    slot: int  # index of the word, the same on every worker
    generation: int  # low half of the word on every worker
    incarnation: int  # run of the engine that granted the lease

    def word(self, worker: int) -> int:
        """Return the word of a worker, given by its incarnation, while the lease is valid."""
        return worker << 32 | self.generation


def new_incarnation() -> int:
    """Return a random number from 1 to 2³² - 1, which identifies one run of an engine or worker."""
    return secrets.randbelow(_GENERATIONS - 1) + 1


class LeaseWords:
    """The lease words of a worker, in memory that peers can read.

    Attributes:
        incarnation: random number that identifies this run of the worker, the high half of every word.
        array: the words by slot, uint64 of shape (n,).
    """

    def __init__(self, incarnation: int, slots: int) -> None:
        self.incarnation = incarnation
        self.array: npt.NDArray[np.uint64] = np.full(slots, incarnation << 32, np.uint64)

    @property
    def address(self) -> int:
        return int(self.array.ctypes.data)

    def renewed(self, slots: int) -> LeaseWords:
        """Return new words for the first `slots` slots, with the same generations and a new incarnation."""
        # The book's generations go on, so the words must, too. Peers that know only the old incarnation
        # reject what they read.
        words = LeaseWords(new_incarnation(), slots)
        words.array |= self.array[:slots] & np.uint64(_GENERATIONS - 1)
        return words

    def add(self, count: int) -> int:
        """Append words before `array` is registered, because they move. Return the index of the first."""
        first = len(self.array)
        self.array = np.concatenate([self.array, np.full(count, self.incarnation << 32, np.uint64)])
        return first

    def invalidate_all(self) -> None:
        """Set all words to 0, so that no present or future lease is valid."""
        self.array[:] = 0  # an incarnation is never 0

    def end(self, slots: Iterable[int]) -> None:
        """Raise words, which ends their leases. Call this before the leases' blocks are freed."""
        for slot in slots:
            word = int(self.array[slot])
            self.array[slot] = (word & ~(_GENERATIONS - 1)) | ((word + 1) % _GENERATIONS)


@dataclass(slots=True)
class _HeldLease:
    """A lease that has not ended. Times are in seconds of the book's clock.

    `due` is the time of its entry in the heap of `LeaseBook`, at most `expires`; infinite without one.
    """

    slot: int
    granted: float
    expires: float
    due: float = math.inf


class LeaseBook:
    """A producer's leases, in its scheduler, `slots` at most. Only the engine's thread may use it."""

    # A step asks which leases have expired, and which no consumer has claimed. The time for that grows with
    # the number of leases that are found, not with that of all leases.

    def __init__(self, incarnation: int, slots: int, seconds: float, clock: Callable[[], float]) -> None:
        self.seconds = seconds
        self.expired = 0
        self._clock = clock
        self._incarnation = incarnation
        self._generations = [0] * slots
        self._free = list(range(slots - 1, -1, -1))
        self._held: dict[str, _HeldLease] = {}
        self._unclaimed: dict[str, _HeldLease] = {}  # in the order in which they were granted
        # (time, number, name, lease), the soonest first. An entry does not move when its lease is extended or
        # ends: it counts only if its time is `_HeldLease.due` and the lease is still held.
        self._due: list[tuple[float, int, str, _HeldLease]] = []
        self._entries = 0
        self._ending: dict[str, int] = {}

    def __len__(self) -> int:
        """Return the number of leases whose blocks must be kept, with those that are ending."""
        return len(self._held) + len(self._ending)

    @property
    def next_due(self) -> float:
        """Time before which no lease expires; infinite if none can."""
        return self._due[0][0] if self._due else math.inf

    @property
    def held(self) -> list[str]:
        return list(self._held)

    def grant(self, name: str, seconds: float | None = None) -> LeaseWord:
        """Grant a lease, of the default duration without `seconds`; TransferError if all slots are in use."""
        if not self._free:
            raise TransferError(
                f"all {len(self._generations)} lease slots are in use; lower lease_seconds "
                f"({self.seconds:g}), or see why consumers release so late"
            )
        slot, now = self._free.pop(), self._clock()
        held = _HeldLease(slot, now, now + (self.seconds if seconds is None else seconds))
        self._held[name] = self._unclaimed[name] = held
        self._note_due(name, held)
        return LeaseWord(slot, self._generations[slot], self._incarnation)

    def renew(self, incarnation: int) -> None:
        self._incarnation = incarnation

    def restart(self, name: str) -> None:
        """Let a lease that has not ended run for the default duration, as if it were granted now."""
        held, now = self._held[name], self._clock()
        held.granted, held.expires = now, now + self.seconds
        if self._unclaimed.pop(name, None) is not None:
            self._unclaimed[name] = held  # at the end, where the latest grant is
        if held.due > held.expires:
            self._note_due(name, held)

    def extend(self, names: Iterable[str]) -> list[str]:
        """Claim leases, and extend each to the default duration from now, at least; return those held."""
        known, expires = [name for name in names if name in self._held], self._clock() + self.seconds
        for name in known:
            held = self._held[name]
            held.expires = max(held.expires, expires)
            self._unclaimed.pop(name, None)
        return known

    def is_unclaimed(self, name: str) -> bool:
        return name in self._unclaimed

    def unclaimed(self, seconds: float) -> list[str]:
        """Return the names of the unclaimed leases that are at least `seconds` old, oldest first."""
        latest = self._clock() - seconds
        return list(takewhile(lambda name: self._unclaimed[name].granted <= latest, self._unclaimed))

    def end(self, names: Iterable[str]) -> dict[str, int]:
        """End leases, and return the slot of each by name. Unknown and ended ones are ignored.

        All workers must raise these words. Keep the blocks until then, and call `ended` for each name.
        """
        ending = {name: self._held.pop(name).slot for name in names if name in self._held}
        for name in ending:
            self._unclaimed.pop(name, None)
        self._ending.update(ending)
        if len(self._due) > 2 * len(self._held) + _SPARE_ENTRIES:
            # Otherwise leases that end long before they expire would fill the heap.
            self._due = [one for one in self._due if self._counts(one[0], *one[2:])]
            heapq.heapify(self._due)
        return ending

    def end_expired(self) -> dict[str, int]:
        now, late = self._clock(), []
        while self._due and self._due[0][0] <= now:
            due, _, name, held = heapq.heappop(self._due)
            if not self._counts(due, name, held):
                continue  # the lease has ended, or has a newer entry
            if held.expires <= now:
                late.append(name)
            else:
                self._note_due(name, held)
        self.expired += len(late)
        return self.end(late)

    def ended(self, name: str) -> None:
        """Free the slot of a lease whose word all workers have raised. Its blocks may now be freed."""
        if (slot := self._ending.pop(name, None)) is not None:
            self._generations[slot] = (self._generations[slot] + 1) % _GENERATIONS
            self._free.append(slot)

    def _note_due(self, name: str, held: _HeldLease) -> None:
        held.due = held.expires
        if math.isfinite(held.due):
            self._entries += 1
            heapq.heappush(self._due, (held.due, self._entries, name, held))

    def _counts(self, due: float, name: str, held: _HeldLease) -> bool:
        return held.due == due and self._held.get(name) is held
