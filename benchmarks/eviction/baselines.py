"""Policies of published systems, over the runs of chunks of `HitDensity`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvferry.tiers.eviction.density import HitDensity
from kvferry.tiers.eviction.return_times import Floats, Ints


def _scaled(values: Floats) -> Floats:
    """Return values between 0 for the least and 1 for the largest."""
    spread = np.ptp(values)
    found: Floats = (values - values.min()) / spread if spread else np.zeros_like(values)
    return found


class Marconi(HitDensity):
    """Evicts by the sum of recency and computation saved per byte, each scaled to 0 to 1.

    Rui Pan, Zhuang Wang, Zhen Jia, Can Karakus, Luca Zancato, Tri Dao, Yida Wang, Ravi Netravali, "Marconi:
    Prefix Caching for the Era of Hybrid LLMs", MLSys 2025, section 4.2. The paper learns the weight of the
    second term from the requests before. Here each subclass has a fixed one, and the best of several counts.
    """

    weight: float

    def _scores(self, slots: Ints) -> Floats:
        recency = self._runs.used_at[slots].astype(np.float64)
        return _scaled(recency) + self.weight * _scaled(self._runs.cost[slots])


def marconi(weight: float) -> type[Marconi]:
    """Return the policy with a weight of the computation per byte, relative to recency."""
    return type("Marconi", (Marconi,), {"weight": weight})


class InTheWild(HitDensity):
    """Evicts by the probability of a use while a chunk may be expected to stay.

    Jiahao Wang and others, "KVCache Cache in the Wild: Characterizing and Optimizing KVCache Cache at a Large
    Cloud Provider", USENIX ATC 2025, section 4: for each category of requests, the times to the next use are
    taken to be exponentially distributed. The categories there are kinds of requests and turns. Traces do not
    say the kind, so the classes of `HitDensity` stand for them.
    """

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        classes = len(self._densities)
        # Bytes used for the first time or again in each class, those used again later, and their ages.
        self._entered, self._again, self._ages = (np.ones(classes) for _ in range(3))
        self._again *= 0.5
        self._life, self._lives = 1.0, 1.0

    def _scores(self, slots: Ints) -> Floats:
        runs = self._runs
        of, ages = runs.classes[slots], (self._now - runs.used_at[slots]).astype(np.float64)
        rate = (self._again / np.maximum(self._ages, 1e-9))[of]
        chance = np.minimum(self._again / self._entered, 1.0)[of]
        life = self._life / self._lives
        found: Floats = chance * (np.exp(-rate * ages) - np.exp(-rate * (ages + life)))
        return found

    def mark_used(self, keys: Sequence[bytes], tokens: int = 0) -> None:
        super().mark_used(keys, tokens)
        kept = self._kept.known(keys)
        slots = np.array([self._slots[key] for key in kept], np.int64)
        np.add.at(self._entered, self._runs.classes[slots], self._kept.sizes(kept))

    def _count_returns(self, slots: Ints, sizes: Ints) -> None:
        super()._count_returns(slots, sizes)
        again = ~self._runs.is_pending[slots]
        slots, sizes = slots[again], sizes[again]
        ages = np.maximum(self._now - self._runs.used_at[slots], 1)
        np.add.at(self._again, self._runs.classes[slots], sizes)
        np.add.at(self._ages, self._runs.classes[slots], sizes * ages)

    def _shrink(self, slot: int, size: int) -> list[bytes]:
        found = super()._shrink(slot, size)
        self._life += len(found) * float(self._now - self._runs.used_at[slot])
        self._lives += len(found)
        return found
