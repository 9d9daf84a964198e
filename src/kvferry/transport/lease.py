"""A producer's promise to keep blocks, and the word that changes before it is broken.

A lease has a slot. Every worker of the producer keeps one 8-byte word per slot in registered memory: the
worker's incarnation in the high half, the slot's generation in the low half. A `LeaseWord` names the slot and
the generation that it has now. Granting a lease writes nothing, so it is valid at once. When a lease ends,
every worker raises the generation *before* the blocks are freed. A consumer reads the word in a second READ,
posted after its data has arrived. If the word is unchanged, no block had been freed when the data was read.

    FREE ─grant→ HELD ─release or expiry→ ENDING ─all workers have raised the word→ FREE

A lease is *claimed* when its consumer redeems the ticket. It may stay unclaimed, because the request can be
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
    """The value of a lease's word on every worker, which a consumer compares after a READ.

    Attributes:
        slot: index of the word on every worker.
        generation: low half of every worker's word while the lease holds.
        incarnation: the producer's incarnation that granted it.
    """

    slot: int
    generation: int
    incarnation: int

    def word(self, worker: int) -> int:
        """Return the word of the worker with incarnation `worker` while the lease holds."""
        return worker << 32 | self.generation


def new_incarnation() -> int:
    """Return a random number that identifies one run of an engine or worker, 1 to 2³² - 1."""
    return secrets.randbelow(_GENERATIONS - 1) + 1


class LeaseWords:
    """A worker's lease words: an array that is registered with the transport.

    Attributes:
        incarnation: high half of every word.
        array: uint64 of shape (slots,).
    """

    def __init__(self, incarnation: int, slots: int) -> None:
        self.incarnation = incarnation
        self.array: npt.NDArray[np.uint64] = np.full(slots, incarnation << 32, np.uint64)

    @property
    def address(self) -> int:
        """Address of the word of slot 0."""
        return int(self.array.ctypes.data)

    def add(self, count: int) -> int:
        """Add `count` words that belong to no lease; return the first slot. Call it before registration."""
        first = len(self.array)
        self.array = np.concatenate([self.array, np.full(count, self.incarnation << 32, np.uint64)])
        return first

    def invalidate_all(self) -> None:
        """Invalidate all present and future leases: set the incarnation to 0, which no lease has."""
        self.array[:] = 0

    def end(self, slots: Iterable[int]) -> None:
        """Raise the words of these slots, which invalidates READs under their old words."""
        for slot in slots:
            word = int(self.array[slot])
            self.array[slot] = (word & ~(_GENERATIONS - 1)) | ((word + 1) % _GENERATIONS)


@dataclass(slots=True)
class _HeldLease:
    slot: int
    granted: float
    expires: float
    claimed: bool = False


class LeaseBook:
    """The leases of a producer, in its scheduler. Only the book decides when a lease ends.

    Not thread-safe: only the engine's thread calls it. Events of other threads come through a queue.
    """

    def __init__(self, incarnation: int, slots: int, seconds: float, clock: Callable[[], float]) -> None:
        self.seconds = seconds
        self.expired = 0
        self._clock = clock
        self._incarnation = incarnation
        self._generations = [0] * slots
        self._free = list(range(slots - 1, -1, -1))
        self._held: dict[str, _HeldLease] = {}
        self._ending: dict[str, int] = {}

    def __len__(self) -> int:
        """Return the number of leases held or ending."""
        return len(self._held) + len(self._ending)

    @property
    def held(self) -> list[str]:
        """Names of the leases that have not ended."""
        return list(self._held)

    def grant(self, name: str, seconds: float | None = None) -> LeaseWord:
        """Grant a lease for the blocks of request `name`, for `seconds` or the book's default.

        Raises:
            TransferError: all slots are in use; the blocks are then not offered.
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
        """Mark leases as claimed and restart their full duration. Unknown names are ignored.

        Returns:
            Names of the leases that were extended.
        """
        known = [name for name in names if name in self._held]
        for name in known:
            held = self._held[name]
            held.expires, held.claimed = max(held.expires, self._clock() + self.seconds), True
        return known

    def unclaimed(self, seconds: float) -> list[str]:
        """Return the leases that have been unclaimed for at least `seconds`, oldest first."""
        latest = self._clock() - seconds
        return [name for name, held in self._held.items() if not held.claimed and held.granted <= latest]

    def end(self, names: Iterable[str]) -> dict[str, int]:
        """End leases that are held.

        Returns:
            Slots by request of the leases that now end; all workers must raise these words.
        """
        ending = {name: self._held.pop(name).slot for name in names if name in self._held}
        self._ending.update(ending)
        return ending

    def end_expired(self) -> dict[str, int]:
        """End leases that have expired; return the same as `end`."""
        now = self._clock()
        late = [name for name, held in self._held.items() if held.expires <= now]
        self.expired += len(late)
        return self.end(late)

    def ended(self, name: str) -> None:
        """Free the slot of a lease, after all workers have raised its word."""
        slot = self._ending.pop(name, None)
        if slot is None:
            return
        self._generations[slot] = (self._generations[slot] + 1) % _GENERATIONS
        self._free.append(slot)
