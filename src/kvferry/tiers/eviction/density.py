"""Hit density: evict the chunks that save the least computation for the room that they take.

Source of the idea: Nathan Beckmann, Haoxian Chen, Asaf Cidon, "LHD: Improving Cache Hit Rate by Maximizing
Hit Density", NSDI 2018. As there, chunks have classes, the policy learns when the chunks of each class
return, and evicts where it expects the fewest uses per byte and time. What is different here:

- *Runs.* A request uses a prefix of chunks. Those with the same history stay together in a run, as long as
  no other request uses some of them. Runs are ranked, not chunks, and a run is evicted from its last chunk to
  its first, because later chunks are useless without the earlier ones.
- *Classes* say how many requests have used a chunk, and which turn of a conversation the last of them was: a
  request whose new chunks follow those of turn n is turn n + 1. Many conversations end after the first turn,
  and some after as many as an application allows.
- *Continuations.* A run counts for at least as much as those that continue it, which are useless without it.
- *Cost.* A token costs more to compute the farther it is from the start, because it attends to all before it.
- *Running requests.* What a request finds ranks as used then, and what it stores as far from the start.
  Otherwise a request would evict its own prefix, where there is room for few prompts only.
- *Evicted chunks* stay observed, as ghosts. Otherwise a class that is evicted at once would never show when
  its chunks return.

An eviction takes amortised constant time: all runs are ranked in array arithmetic, after each 1/32 of them
has been evicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from operator import itemgetter

import numpy as np

from kvferry.tiers.eviction.base import ByteQueue, EvictionPolicy
from kvferry.tiers.eviction.return_times import Floats, Ints, ReturnTimes, age_numbers
from kvferry.tiers.eviction.runs import Runs

# Number of classes: by uses, at powers of two; by the turn of the last request (`_turn_class`).
_USES, _TURNS = 7, 12
# Turns up to this one have a class each.
_OWN_CLASS = 8

# Distance from the start at which attention takes as long as everything else of a forward pass: 30,500 tokens
# for Llama-3.1-8B, 53,400 for Llama-3.1-70B, 14,800 for DeepSeek-V3.
_LONG_TOKENS = 32_768

# Ghosts have at most this many times the bytes of the capacity.
_GHOSTS = 8
# Most keys in a run of chunks that no request has marked as used yet.
_MOST_NEW = 64
# Share of the runs that are evicted by one ranking.
_RANKED = 32
# Requests after which the policy learns again, at least.
_LEARN_REQUESTS = 4
# What was learned loses half of its weight while this many times the capacity is evicted.
_HALF_LIFE = 16


def _array(numbers: Iterable[int]) -> Ints:
    return np.fromiter(numbers, np.int64)


def _use_classes(uses: Ints) -> Ints:
    """Return 0 for one use, 1 for two, 2 for three and four, and so on."""
    found: Ints = np.minimum(np.frexp(uses - 1)[1], _USES - 1).astype(np.int64)
    return found


def _turn_class(turn: int) -> int:
    """Return the class of a turn, counted from 1.

    >>> [_turn_class(turn) for turn in (1, 2, 8, 9, 16, 17, 5000)]
    [0, 1, 7, 8, 8, 9, 11]
    """
    doublings = max(0, (turn - 1).bit_length() - (_OWN_CLASS - 1).bit_length())
    return min(turn - 1 if not doublings else _OWN_CLASS - 1 + doublings, _TURNS - 1)


class HitDensity(EvictionPolicy):
    """Evicts the run with the fewest expected uses per byte and request, weighted with the cost of a token.

    `mark_used` counts a use. A key that is touched ranks as used then, although none is counted. A key that
    is only admitted or unpinned keeps its place.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._kept, self._ghosts = ByteQueue(), ByteQueue()
        super().__init__(capacity_bytes, [self._kept], [self._ghosts])
        self._runs, self._times = Runs(), ReturnTimes(_USES, _TURNS)
        # Of the keys in both queues: slot of the run, and number of requests that used the chunk.
        self._slots: dict[bytes, int] = {}
        self._uses: dict[bytes, int] = {}
        self._turns: dict[bytes, int] = {}  # turn of the first request that ended with the chunk
        # Number of requests so far, at the last observation of all runs, and at the last change of densities.
        self._now = self._observed_at = 0
        self._densities = self._times.densities(1.0)
        self._learned_at, self._evicted = -_LEARN_REQUESTS, 0
        # Slots and numbers of the runs to evict, the first one last.
        self._victims: list[tuple[int, int]] = []
        self._newest = -1  # slot of the run that the latest admitted key is in
        self._passed: set[bytes] = set()  # pinned keys that an eviction passed over

    def mark_used(self, keys: Sequence[bytes], tokens: int = 0) -> None:
        self._make_warm(keys)
        self._now += 1
        if not (kept := self._kept.known(keys)):
            return
        slots, sizes = _array(map(self._slots.__getitem__, kept)), _array(self._kept.sizes(kept))
        again = ~self._runs.is_pending[slots]
        self._count_returns(slots, sizes)
        uses = _array(map(self._uses.__getitem__, kept)) + again
        self._uses.update(zip(kept, uses.tolist(), strict=True))
        self._passed.difference_update(kept)
        classes = _use_classes(uses) * _TURNS + _turn_class(self._turn(kept))
        loose = _array(self._kept.sizes(kept, with_pinned=False))
        self._runs.leave(slots, sizes, loose)
        ends = np.flatnonzero(np.diff(classes)) + 1
        after = -1
        # The last run first: of runs with equal scores, the first one is evicted.
        for first, last in reversed(list(pairwise((0, *ends.tolist(), len(kept))))):
            run, cost = kept[first:last], 1 + tokens * last / len(kept) / _LONG_TOKENS
            slot = self._runs.add(run, self._now, int(classes[first]), cost, pending=False)
            self._slots.update(dict.fromkeys(run, slot))
            self._runs.observed[slot], self._runs.loose[slot] = (
                each[first:last].sum() for each in (sizes, loose)
            )
            if after >= 0:
                self._runs.after[slot], self._runs.after_number[slot] = after, self._runs.number[after]
            after = slot

    def _turn(self, keys: Sequence[bytes]) -> int:
        """Return which turn of a conversation a request with these chunks is. Note it for new chunks."""
        before = [turn for key in keys if (turn := self._turns.get(key)) is not None]
        turn = max(before, default=0)
        if len(before) < len(keys):
            turn += 1
            for key in keys:
                self._turns.setdefault(key, turn)
        return turn

    def pin(self, key: bytes) -> None:
        super().pin(key)
        if key in self._kept:
            self._runs.loose[self._slots[key]] -= self._kept.sizes((key,))[0]

    def unpin(self, key: bytes) -> None:
        super().unpin(key)
        if key in self._kept:
            slot = self._slots[key]
            self._runs.loose[slot] += self._kept.sizes((key,))[0]
            if key in self._passed:
                self._passed.discard(key)
                self._runs.keys[slot].append(key)

    def remove(self, key: bytes) -> int:
        if key in self._kept:
            sizes = (_array(self._kept.sizes((key,), with_pinned=each)) for each in (True, False))
            # The key may come back to the same run.
            if key in self._passed:
                self._passed.discard(key)
            else:
                self._runs.keys[self._slots[key]].remove(key)
            self._leave_runs([key], *sizes)
            self._drop_history(key)
        return super().remove(key)

    def check_integrity(self) -> None:
        super().check_integrity()
        runs, known = self._runs, {*self._kept, *self._ghosts}
        if self._slots.keys() != known or self._uses.keys() != known or not self._turns.keys() <= known:
            raise AssertionError("other keys have runs, uses and turns than those in the queues")
        observed, loose = np.zeros_like(runs.observed), np.zeros_like(runs.loose)
        for key, slot in self._slots.items():
            is_kept = key in self._kept
            size = (self._kept if is_kept else self._ghosts).sizes((key,))[0]
            observed[slot] += size
            if is_kept and not self._kept.is_pinned(key):
                loose[slot] += size
                if runs.keys[slot].count(key) != 1:
                    raise AssertionError(f"key {key.hex()} is not once in its run")
        if (observed != runs.observed).any() or (loose != runs.loose).any():
            raise AssertionError("runs count other bytes than those of their chunks")
        if self._ghosts.total > _GHOSTS * self.capacity_bytes:
            raise AssertionError(f"ghosts stand for {self._ghosts.total} bytes of {self.capacity_bytes}")

    def _touch(self, key: bytes) -> None:
        if key not in self._kept:
            raise KeyError(key)
        slot = self._slots[key]
        if self._runs.found_at[slot] < self._now:
            self._runs.found_at[slot] = self._now
            self._victims = [one for one in self._victims if one[0] != slot]

    def _place(self, key: bytes, size: int) -> None:
        self._place_all((key,), size)

    def _place_all(self, keys: Iterable[bytes], size: int) -> None:
        keys = list(keys)
        if ghosts := self._ghosts.known(keys):
            sizes = _array(map(self._ghosts.remove, ghosts))
            for key in ghosts:
                self._uses[key] += 1
            slots = self._leave_runs(ghosts, sizes)
            self._count_returns(slots, sizes)
        for key in keys:
            self._uses.setdefault(key, 1)
        self._kept.push_all(keys, size)
        classes = _use_classes(_array(map(self._uses.__getitem__, keys))) * _TURNS
        for of, each in groupby(zip(classes.tolist(), keys, strict=True), itemgetter(0)):
            self._append([key for _, key in each], size, of)

    def _append(self, keys: list[bytes], size: int, of: int) -> None:
        """Add new keys to the run of the latest admitted key, if they are alike, and then to others."""
        runs = self._runs
        while keys:
            slot = self._newest
            alike = slot >= 0 and runs.is_pending[slot] and runs.used_at[slot] == self._now
            alike = alike and runs.observed[slot] > 0 and runs.classes[slot] == of
            if not (alike and len(runs.keys[slot]) < _MOST_NEW):
                self._newest = slot = runs.add([], self._now, of, 1.0, pending=True)
            room = _MOST_NEW - len(runs.keys[slot])
            some, keys = keys[:room], keys[room:]
            # A run is evicted from its end, and of new keys the first one is the first to evict.
            runs.keys[slot][:0] = some[::-1]
            self._slots.update(dict.fromkeys(some, slot))
            runs.observed[slot] += size * len(some)
            runs.loose[slot] += size * len(some)

    def _place_cold(self, keys: Sequence[bytes], size: int) -> None:
        self._forget(self._ghosts.known(keys))
        super()._place_cold(keys, size)

    def _evict_warm(self) -> bytes | None:
        return next(iter(self._evict_warm_bytes(1)), None)

    def _evict_warm_bytes(self, size: int) -> list[bytes]:
        evicted, until = list[bytes](), self._kept.total - size
        while self._kept.total > until and (slot := self._victim()) is not None:
            if not (keys := self._shrink(slot, self._kept.total - until)):
                break
            evicted += keys
        if (excess := self._ghosts.total - _GHOSTS * self.capacity_bytes) > 0:
            self._forget(self._ghosts.oldest(excess)[0])
        return evicted

    def _shrink(self, slot: int, size: int) -> list[bytes]:
        """Evict the last chunks of a run, `size` bytes or all."""
        keys, slots, kept, ghosts = self._runs.keys[slot], self._slots, self._kept, self._ghosts
        evicted, freed = list[bytes](), 0
        while keys and freed < size:
            key = keys.pop()
            if slots.get(key) != slot:
                continue
            if (one := kept.take(key)) is not None:
                ghosts.push(key, one)
                evicted.append(key)
                freed += one
            elif key in kept:
                self._passed.add(key)
        self._runs.loose[slot] -= freed
        self._evicted += freed
        return evicted

    def _victim(self) -> int | None:
        """Return the slot of the run to evict next; None if there is none."""
        runs = self._runs
        while self._victims or self._rank():
            slot, number = self._victims[-1]
            if runs.number[slot] == number and runs.loose[slot]:
                return slot
            self._victims.pop()
        return None

    def _rank(self) -> bool:
        """Choose the next victims, the 1/32 of the runs with the lowest densities; False if there is none."""
        runs = self._runs
        slots = np.flatnonzero(runs.loose)
        if not len(slots):
            return False
        if self._now - self._learned_at > max(_LEARN_REQUESTS, len(slots) // _RANKED):
            self._learn(len(slots))
        densities = self._runs.with_continuations(slots, self._scores(slots))[slots]
        most = max(1, len(slots) // _RANKED)
        lowest = np.flatnonzero(densities <= np.partition(densities, most - 1)[most - 1])
        order = lowest[np.lexsort((runs.number[slots[lowest]], densities[lowest]))][:most]
        chosen = slots[order][::-1]
        self._victims = list(zip(chosen.tolist(), runs.number[chosen].tolist(), strict=True))
        return True

    def _scores(self, slots: Ints) -> Floats:
        """Return the rank of each run, the first to evict lowest."""
        runs = self._runs
        ages, costs = age_numbers(self._now - runs.found_at[slots]), runs.cost[slots]
        # Where in a prompt new chunks are is not known before its request ends.
        costs = np.where(runs.is_pending[slots], costs.max(), costs)
        found: Floats = self._densities[runs.classes[slots], ages] * costs
        return found

    def _learn(self, runs: int) -> None:
        self._times.forget(1 - 0.5 ** (self._evicted / (_HALF_LIFE * self.capacity_bytes)))
        self._evicted, self._learned_at = 0, self._now
        slots = np.flatnonzero((self._runs.observed > 0) & ~self._runs.is_pending)
        self._count_observed(slots, self._runs.observed[slots])
        self._observed_at = self._now
        self._densities = self._times.densities(self._kept.total / runs)

    def _count_observed(self, slots: Ints, sizes: Ints) -> None:
        runs, ages = self._runs, self._now - self._runs.used_at[slots]
        since = np.minimum(ages, self._now - self._observed_at)
        self._times.add_observed(runs.classes[slots], ages, sizes * since)

    def _count_returns(self, slots: Ints, sizes: Ints) -> None:
        again = ~self._runs.is_pending[slots]
        slots, sizes = slots[again], sizes[again]
        self._count_observed(slots, sizes)
        ages = self._now - self._runs.used_at[slots]
        self._times.add_returned(self._runs.classes[slots], ages, sizes)

    def _leave_runs(self, keys: Sequence[bytes], sizes: Ints, loose: Ints | None = None) -> Ints:
        """Take keys out of their runs. Return the slots of these."""
        slots = _array(map(self._slots.pop, keys))
        self._runs.leave(slots, sizes, np.zeros_like(sizes) if loose is None else loose)
        return slots

    def _forget(self, ghosts: Sequence[bytes]) -> None:
        if ghosts:
            self._leave_runs(ghosts, _array(map(self._ghosts.remove, ghosts)))
            for key in ghosts:
                self._drop_history(key)

    def _drop_history(self, key: bytes) -> None:
        del self._uses[key]
        self._turns.pop(key, None)
