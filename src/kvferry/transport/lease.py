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

import heapq
import math
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from kvferry.errors import TransferError

_GENERATIONS = 1 << 32

_SPARE_ENTRIES = 64
"""Number of entries in the heap of expiries that may belong to ended leases, however few leases are held."""


@dataclass(frozen=True, slots=True)
class LeaseWord:
    """Tells a consumer where the word of a lease is, and which value it has while the lease is valid.

    The word is an integer in registered memory of every worker of the producer. It changes when the lease
    ends. A consumer reads the word after the lease's blocks, to check that the blocks were still valid.

    Attributes:
        slot: index of the word, the same on every worker.
        generation: value of the word's low half on every worker while the lease is valid.
        incarnation: random number that identifies the run of the engine that granted the lease.
    """

    slot: int
    generation: int
    incarnation: int

    def word(self, worker: int) -> int:
        """Return the value of the lease's word (registered integer) on a worker while the lease is valid.

        Args:
            worker: incarnation of the worker (random number that identifies its run). It is the high half of
                the value.
        """
        return worker << 32 | self.generation


def new_incarnation() -> int:
    """Return a random number from 1 to 2³² - 1, which identifies one run of an engine or worker."""
    return secrets.randbelow(_GENERATIONS - 1) + 1


class LeaseWords:
    """The lease words of a worker: integers in memory that peers can read.

    A word changes before the blocks of its lease are freed. So a peer that has read blocks can check whether
    they were valid.

    Attributes:
        incarnation: random number that identifies this run of the worker, which is the high half of every
            word.
        array: the words, uint64 of shape (n,). A word is identified by its index, which is called a slot.
    """

    def __init__(self, incarnation: int, slots: int) -> None:
        """Create the array of lease words: integers that peers read to check whether a lease is still valid.

        Args:
            incarnation: random number that identifies this run of the worker, which is the high half of every
                word.
            slots: number of words. The low half of each word starts at 0.
        """
        self.incarnation = incarnation
        self.array: npt.NDArray[np.uint64] = np.full(slots, incarnation << 32, np.uint64)

    @property
    def address(self) -> int:
        """Memory address of the first lease word. The other words follow it, 8 bytes each."""
        return int(self.array.ctypes.data)

    def renewed(self, slots: int) -> LeaseWords:
        """Return new words for the first `slots` slots, with the same generations and a new incarnation.

        Peers that know only the old incarnation reject what they read.
        """
        words = LeaseWords(new_incarnation(), slots)
        words.array |= self.array[:slots] & np.uint64(_GENERATIONS - 1)
        return words

    def add(self, count: int) -> int:
        """Append words (integers that peers can read) that belong to no lease. Return the index of the first.

        The caller uses them to protect other memory that peers read, such as a staging area. Call this method
        before `array` is registered with the transport, because the words move to a new array.

        Args:
            count: number of words to append.
        """
        first = len(self.array)
        self.array = np.concatenate([self.array, np.full(count, self.incarnation << 32, np.uint64)])
        return first

    def invalidate_all(self) -> None:
        """Set all words (integers that peers can read) to 0, so that no present or future lease is valid.

        The high half of a valid word is the incarnation of the worker (random number that identifies its
        run), which is never 0.
        """
        self.array[:] = 0

    def end(self, slots: Iterable[int]) -> None:
        """Increment the low half of some lease words (integers that peers can read), which ends the leases.

        Call this method before the leases' blocks are freed. A peer that reads a word after the blocks then
        sees that the word has changed, so what it has read may be invalid.

        Args:
            slots: indices of the words.
        """
        for slot in slots:
            word = int(self.array[slot])
            self.array[slot] = (word & ~(_GENERATIONS - 1)) | ((word + 1) % _GENERATIONS)


@dataclass(slots=True)
class _HeldLease:
    """A lease (promise to keep the KV blocks of a request) that has not ended.

    Attributes:
        slot: index of the lease's word (integer in registered memory that changes when the lease ends).
        granted: time of the grant, in seconds of the clock of `LeaseBook`.
        expires: time at which the lease expires, in seconds of the same clock.
        due: time of the lease's entry in the heap of `LeaseBook`, at most `expires`; infinite without one.
    """

    slot: int
    granted: float
    expires: float
    due: float = math.inf


class LeaseBook:
    """Keeps track of a producer's leases, in the producer's scheduler: grants, extends and ends them.

    A lease is the promise to keep the KV blocks of a request for consumers to read. Not thread-safe: only the
    engine's thread may use this object.

    A step asks which leases have expired, and which no consumer has claimed. The time for that does not grow
    with the number of leases, but with the number of those that are found.

    Attributes:
        seconds: default duration of a lease, in seconds.
        expired: number of leases that have expired since the start.
    """

    def __init__(self, incarnation: int, slots: int, seconds: float, clock: Callable[[], float]) -> None:
        """Create an empty record of leases.

        Args:
            incarnation: random number that identifies this run of the engine.
            slots: maximum number of leases at a time.
            seconds: default duration of a lease, in seconds.
            clock: function that returns the current time in seconds.
        """
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
        """Return the number of leases whose blocks must be kept.

        These are the leases that have not ended, and the ended ones for which `ended` was not called.
        """
        return len(self._held) + len(self._ending)

    @property
    def held(self) -> list[str]:
        """Names of the leases that have not ended, oldest first."""
        return list(self._held)

    def grant(self, name: str, seconds: float | None = None) -> LeaseWord:
        """Grant a lease on the blocks of a request, and return the word with which consumers check the lease.

        The word is an integer in registered memory that changes before the blocks are freed.

        Args:
            name: name of the lease, which is the id of the request.
            seconds: duration until the lease expires, in seconds; None for the default.

        Raises:
            TransferError: all slots are in use, so the blocks cannot be offered.
        """
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
        """Set the incarnation (random number of the engine's run) of leases granted from now on."""
        self._incarnation = incarnation

    def restart(self, name: str) -> None:
        """Let a lease run for the default duration from now on, as if it were granted now.

        Args:
            name: name of a lease that has not ended.
        """
        held, now = self._held[name], self._clock()
        held.granted, held.expires = now, now + self.seconds
        if self._unclaimed.pop(name, None) is not None:
            self._unclaimed[name] = held
        if held.due > held.expires:
            self._note_due(name, held)

    def extend(self, names: Iterable[str]) -> list[str]:
        """Mark leases as claimed by a consumer, and extend each to at least the default duration from now.

        Args:
            names: names of leases. Unknown and ended leases are ignored.

        Returns:
            Names of the leases that were extended.
        """
        known = [name for name in names if name in self._held]
        for name in known:
            held = self._held[name]
            held.expires = max(held.expires, self._clock() + self.seconds)
            self._unclaimed.pop(name, None)
        return known

    def is_unclaimed(self, name: str) -> bool:
        """Return whether a lease has not ended, and no consumer has claimed it."""
        return name in self._unclaimed

    def unclaimed(self, seconds: float) -> list[str]:
        """Return the names of the leases that have not ended and that no consumer has claimed, oldest first.

        Args:
            seconds: minimum age of the leases, in seconds; younger leases are left out.
        """
        latest = self._clock() - seconds
        old = takewhile(lambda one: one[1].granted <= latest, self._unclaimed.items())
        return [name for name, _ in old]

    def end(self, names: Iterable[str]) -> dict[str, int]:
        """End leases. The caller must keep the blocks of each lease until `ended` is called for it.

        Args:
            names: names of leases. Unknown and ended leases are ignored.

        Returns:
            Maps the name of each lease to the slot (index) of its lease word: an integer in the workers'
            registered memory. All workers must increment these words. Then the caller must call `ended` for
            each name.
        """
        ending = {name: self._held.pop(name).slot for name in names if name in self._held}
        for name in ending:
            self._unclaimed.pop(name, None)
        self._ending.update(ending)
        if len(self._due) > 2 * len(self._held) + _SPARE_ENTRIES:
            self._drop_old_entries()
        return ending

    def end_expired(self) -> dict[str, int]:
        """End all leases that have expired.

        The caller must keep the blocks of each lease until `ended` is called for it.

        Returns:
            Maps the name of each lease to the slot (index) of its lease word: an integer in the workers'
            registered memory. All workers must increment these words. Then the caller must call `ended` for
            each name.
        """
        now, late = self._clock(), []
        while self._due and self._due[0][0] <= now:
            due, _, name, held = heapq.heappop(self._due)
            if not self._counts(due, name, held):
                continue
            if held.expires <= now:
                late.append(name)
            else:
                self._note_due(name, held)
        self.expired += len(late)
        return self.end(late)

    def ended(self, name: str) -> None:
        """Free the slot of a lease for use by another lease. The blocks of the lease may now be freed.

        Call this method when all workers have incremented the lease's word (integer in registered memory).

        Args:
            name: name of the lease, for which `end` was called. Other names are ignored.
        """
        slot = self._ending.pop(name, None)
        if slot is None:
            return
        self._generations[slot] = (self._generations[slot] + 1) % _GENERATIONS
        self._free.append(slot)

    def _note_due(self, name: str, held: _HeldLease) -> None:
        """Add an entry to the heap for the time at which a lease expires. Mutates `held`."""
        held.due = held.expires
        if math.isfinite(held.due):
            self._entries += 1
            heapq.heappush(self._due, (held.due, self._entries, name, held))

    def _counts(self, due: float, name: str, held: _HeldLease) -> bool:
        """Return whether an entry of the heap is the present one of a lease that has not ended."""
        return held.due == due and self._held.get(name) is held

    def _drop_old_entries(self) -> None:
        """Remove the heap's entries of leases that have ended."""
        self._due = [one for one in self._due if self._counts(one[0], *one[2:])]
        heapq.heapify(self._due)
