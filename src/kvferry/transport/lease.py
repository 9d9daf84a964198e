"""Leases (a producer's promises to keep KV blocks), and the words that tell a consumer that a lease ended.

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

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.errors import TransferError

_GENERATIONS = 1 << 32


@dataclass(frozen=True, slots=True)
class LeaseWord:
    """The word that protects a lease. After reading the lease's blocks, a consumer checks the word's value.

    Attributes:
        slot: index of the word, the same on every worker.
        generation: low half of every worker's word while the lease is valid.
        incarnation: random number that identifies the run of the engine that granted the lease.
    """

    slot: int
    generation: int
    incarnation: int

    def word(self, worker: int) -> int:
        """Return the expected word of the worker with incarnation `worker` while the lease is valid."""
        return worker << 32 | self.generation


def new_incarnation() -> int:
    """Return a random number from 1 to 2³² - 1 that identifies one run of an engine or worker."""
    return secrets.randbelow(_GENERATIONS - 1) + 1


class LeaseWords:
    """A worker's lease words: an array in memory that peers can read.

    Attributes:
        incarnation: random number of this run of the worker, the high half of every word.
        array: word of every slot, uint64 of shape (slots,).
    """

    def __init__(self, incarnation: int, slots: int) -> None:
        """Create the lease words.

        Args:
            incarnation: random number of this run of the worker, the high half of every word.
            slots: number of words. The low half of each starts at 0.
        """
        self.incarnation = incarnation
        self.array: npt.NDArray[np.uint64] = np.full(slots, incarnation << 32, np.uint64)

    @property
    def address(self) -> int:
        """Address of the word of slot 0."""
        return int(self.array.ctypes.data)

    def add(self, count: int) -> int:
        """Append `count` words that belong to no lease, and return the index of the first.

        Call it before the array is registered with the transport, because it moves the array in memory.
        """
        first = len(self.array)
        self.array = np.concatenate([self.array, np.full(count, self.incarnation << 32, np.uint64)])
        return first

    def invalidate_all(self) -> None:
        """Invalidate all present and future leases: set all words to 0, an incarnation that no worker has."""
        self.array[:] = 0

    def end(self, slots: Iterable[int]) -> None:
        """Raise the generation (low half) of the words of these slots.

        Readers that compare with the old words then know that their data may be invalid.
        """
        for slot in slots:
            word = int(self.array[slot])
            self.array[slot] = (word & ~(_GENERATIONS - 1)) | ((word + 1) % _GENERATIONS)


@dataclass(slots=True)
class _HeldLease:
    """A lease that has not ended.

    Attributes:
        slot: index of its word.
        granted: time of the grant, in seconds of the clock.
        expires: time at which it expires, in seconds of the clock.
        claimed: True once a consumer has redeemed its ticket.
    """

    slot: int
    granted: float
    expires: float
    claimed: bool = False


class LeaseBook:
    """The leases of a producer, kept by its scheduler. Only this class decides when a lease ends.

    Not thread-safe: only the engine's thread calls it. Events of other threads arrive through a queue.

    Attributes:
        seconds: default duration of a lease.
        expired: number of leases that have expired.
    """

    def __init__(self, incarnation: int, slots: int, seconds: float, clock: Callable[[], float]) -> None:
        """Create a book without leases.

        Args:
            incarnation: random number of this run of the engine.
            slots: maximum number of leases.
            seconds: default duration of a lease.
            clock: function that returns the time in seconds.
        """
        self.seconds = seconds
        self.expired = 0
        self._clock = clock
        self._incarnation = incarnation
        self._generations = [0] * slots
        self._free = list(range(slots - 1, -1, -1))
        self._held: dict[str, _HeldLease] = {}
        self._ending: dict[str, int] = {}

    def __len__(self) -> int:
        """Return the number of leases that are held or ending."""
        return len(self._held) + len(self._ending)

    @property
    def held(self) -> list[str]:
        """Names of the leases that are held, oldest first."""
        return list(self._held)

    def grant(self, name: str, seconds: float | None = None) -> LeaseWord:
        """Grant a lease for the blocks of a request, and return the word that protects it.

        Args:
            name: name of the lease, the id of the request.
            seconds: duration until the lease expires; None for the default.

        Raises:
            TransferError: all slots are in use, so the blocks cannot be offered.
        """
        if not self._free:
            raise TransferError(
                f"all {len(self._generations)} lease slots are in use; lower lease_seconds "
                f"({self.seconds:g}), or see why consumers release so late"
            )
        slot, now = self._free.pop(), self._clock()
        self._held[name] = _HeldLease(slot, now, now + (self.seconds if seconds is None else seconds))
        return LeaseWord(slot, self._generations[slot], self._incarnation)

    def extend(self, names: Iterable[str]) -> list[str]:
        """Mark leases as claimed by a consumer, and extend them to the default duration from now.

        A lease that expires later than that keeps its time. Names of leases that are not held are ignored.

        Returns:
            Names of the leases that are held, which are now claimed.
        """
        known = [name for name in names if name in self._held]
        for name in known:
            held = self._held[name]
            held.expires, held.claimed = max(held.expires, self._clock() + self.seconds), True
        return known

    def unclaimed(self, seconds: float) -> list[str]:
        """Return the names of the leases granted at least `seconds` ago and never claimed, oldest first."""
        latest = self._clock() - seconds
        return [name for name, held in self._held.items() if not held.claimed and held.granted <= latest]

    def end(self, names: Iterable[str]) -> dict[str, int]:
        """Begin to end leases. Their blocks must be kept until all workers have raised the lease words.

        Args:
            names: names of leases. Leases that are not held are ignored.

        Returns:
            Slot of each lease that ends, by name. All workers must raise the words of these slots. Then the
            caller must call `ended` for each name.
        """
        ending = {name: self._held.pop(name).slot for name in names if name in self._held}
        self._ending.update(ending)
        return ending

    def end_expired(self) -> dict[str, int]:
        """Begin to end all leases that have expired.

        Returns:
            Slot of each lease that ends, by name, as `end` returns it.
        """
        now = self._clock()
        late = [name for name, held in self._held.items() if held.expires <= now]
        self.expired += len(late)
        return self.end(late)

    def ended(self, name: str) -> None:
        """Free the slot of a lease that is ending, because all workers have raised the lease's word."""
        slot = self._ending.pop(name, None)
        if slot is None:
            return
        self._generations[slot] = (self._generations[slot] + 1) % _GENERATIONS
        self._free.append(slot)
