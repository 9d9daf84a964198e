"""The simulated tiers of one engine: host memory and the storage behind it.

The rules are those of the serving code: every chunk passes through host memory (`cache.reading`), new chunks
are written to all slow tiers (`cache.writing`), and a chunk that was read from one slow tier is written to
the faster ones.

Copies, reads and writes end within the step that begins them. In an engine they may end later, and then a
request does not yet find a chunk, or a held chunk is ranked as the latest used at another time. The order of
evictions also differs slightly if one step stores or loads more than 16 chunks into host memory that cannot
hold the request, because a slow tier accepts only as many writes at a time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate, groupby
from operator import itemgetter
from typing import NamedTuple

from kvferry.planning.retention import MAX_CHUNKS_PER_ORDER
from kvferry.tools.replay.content import RequestKeys
from kvferry.tools.replay.lookup import Found, Wanted, look_up
from kvferry.tools.replay.model import ServedModel
from kvferry.tools.replay.tier import SimulatedTier


class Run(NamedTuple):
    """Chunks of one KV cache group that a step of an engine completes.

    Attributes:
        group: index of the group.
        keys: keys of the chunks, in the order of the prompt.
        unchanged: number of chunks, from the first one, that the engine has not computed anew. They need not
            be stored where any tier has them.
    """

    group: int
    keys: Sequence[bytes]
    unchanged: int


class SimulatedTiers:
    """The tiers of one engine.

    Attributes:
        tiers: host memory, then the slow tiers, the fastest first. Engines may share slow tiers.
    """

    def __init__(self, model: ServedModel, tiers: Sequence[SimulatedTier]) -> None:
        self.tiers = tuple(tiers)
        self._model, self._host, self._slow = model, self.tiers[0], self.tiers[1:]

    def look_up(self, prompt: int, keys: RequestKeys, local_tokens: int) -> Found | None:
        return look_up(self._model, self.tiers, prompt, keys, local_tokens)

    def load(self, wanted: Wanted) -> tuple[int, ...]:
        """Load a prefix: count the reads, and copy chunks of slow tiers into host memory.

        Returns:
            Number of bytes that each tier provides.
        """
        keys, groups, tiers = wanted
        here = keys if not any(tiers) else [key for key, tier in zip(keys, tiers, strict=True) if not tier]
        self._host.policy.touch_all(here[::-1])
        sizes, sources = [0] * len(self.tiers), list(zip(groups, tiers, strict=True))
        for group, tier in set(sources):
            sizes[tier] += self.tiers[tier].count_reads(sources.count((group, tier)), group)
        if len(here) < len(keys):
            self._fetch(here[::-1], [one for one in zip(keys, groups, tiers, strict=True) if one[2]])
        return tuple(sizes)

    def _fetch(self, here: Sequence[bytes], wanted: list[tuple[bytes, int, int]]) -> None:
        """Copy the chunks of a load from slow tiers into host memory, and into all faster slow tiers.

        Args:
            here: keys of chunks that the load reads from host memory.
            wanted: (key, group, tier) of the other chunks, in the order of the prompt.
        """
        host = self._host
        host.policy.pin_all(here)
        # If host memory has no room for all, the ranks first copy what it has room for to the engine's
        # blocks. Then these chunks can be evicted to make room for the others.
        while wanted or here:
            ends = list(accumulate([host.chunk_bytes[group] for _, group, _ in wanted]))
            fitting = bisect_right(ends, host.make_room(ends[-1])) if wanted else 0
            if not (fitting or here):
                return
            written: list[bytes] = []
            arriving = sorted(wanted[:fitting], key=itemgetter(2))
            for (tier, group), each in groupby(arriving, itemgetter(2, 1)):
                names = [key for key, _, _ in each]
                host.admit(names, group)
                host.policy.pin_all(names)
                for faster in self.tiers[1:tier]:
                    written += faster.write(names, group)
            host.policy.unpin_all([key for key, _, _ in reversed(arriving)])
            host.policy.unpin_all(here)
            host.policy.make_newest(written)
            here, wanted = [], wanted[fitting:]

    def store(self, runs: Iterable[Run], cold: Collection[bytes] = ()) -> None:
        """Store chunks that one step of the engine completes.

        Args:
            cold: keys of the chunks that tiers evict before all others.
        """
        stored = self._host.store(self._pieces(runs), cold)
        for tier in self._slow:
            for group, keys in stored:
                written = tier.write(keys, group, cold)
                # A write pins the chunk while it lasts, and the end of the pin ranks it as the latest used.
                self._host.policy.pin_all(written)
                self._host.policy.unpin_all(written)

    def store_at_once(self, runs: Sequence[Run]) -> bool:
        """Store the chunks of all steps of a prompt, if the result is that of `store` for each step.

        Return False, and change nothing, if it is not.
        """
        # It is if every tier has room and evicts by `LRU`, and no step evicts a chunk that a later step might
        # store. The order of stores makes no difference, because the caller calls `mark_used` next.
        new, kept = list(map(self._new, runs)), [run.keys for run in runs]
        stores = []
        for tier in self.tiers:
            lacking = new if tier is self._host else list(map(tier.lacks, new))
            size = sum(
                [tier.chunk_bytes[run.group] * len(keys) for run, keys in zip(runs, lacking, strict=True)]
            )
            if not tier.fits_beside(size, kept):
                return False
            stores.append((tier, size, lacking))
        for tier, size, lacking in stores:
            tier.make_room(size)
            for run, keys in zip(runs, lacking, strict=True):
                tier.admit(keys, run.group)
        return True

    def _new(self, run: Run) -> list[bytes]:
        """Return the keys of a run that must be stored in host memory."""
        new = self._host.lacks(run.keys)
        if not self._slow or not new:
            return new
        unchanged: Sequence[bytes] = run.keys[: run.unchanged]
        for tier in self.tiers:
            unchanged = tier.lacks(unchanged)
        return [*unchanged, *self._host.lacks(run.keys[run.unchanged :])]

    def _pieces(self, runs: Iterable[Run]) -> Iterator[tuple[int, Sequence[bytes]]]:
        """Yield the new keys of each run in pieces, as an engine orders their stores."""
        for run in runs:
            new = self._new(run)
            for first in range(0, len(new), MAX_CHUNKS_PER_ORDER):
                yield run.group, new[first : first + MAX_CHUNKS_PER_ORDER]

    def mark_used(self, keys: Sequence[bytes], cold: Sequence[bytes] = ()) -> None:
        """Rank the chunks of a prompt as the latest used in every tier, the first one as the very latest.

        Args:
            cold: keys of further chunks, which host memory evicts before all others.
        """
        last_first = keys[::-1]
        for tier in self.tiers:
            tier.policy.make_newest(last_first)
        if cold:
            self._host.policy.make_cold(cold)
