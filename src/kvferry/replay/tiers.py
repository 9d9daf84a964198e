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

import numpy as np

from kvferry.planning.coverage import (
    NO_TIER,
    ChunkedPrompt,
    Coverage,
    TierNumbers,
    chunks_to_load,
    coverage,
)
from kvferry.planning.retention import MAX_CHUNKS_PER_ORDER
from kvferry.planning.select import windows_survive_load
from kvferry.replay.content import RequestKeys
from kvferry.replay.model import ServedModel
from kvferry.replay.tier import SimulatedTier


class SimulatedTiers:
    """The tiers of one engine.

    Attributes:
        tiers: host memory, then the slow tiers, the fastest first. Engines may share slow tiers.
    """

    def __init__(self, model: ServedModel, tiers: Sequence[SimulatedTier]) -> None:
        """Combine tiers.

        Args:
            model: model whose KV the tiers hold.
            tiers: host memory, then the slow tiers, the fastest first. At least one.
        """
        self.tiers = tuple(tiers)
        self._model, self._host, self._slow = model, self.tiers[0], self.tiers[1:]

    def look_up(self, prompt: int, keys: RequestKeys, local_tokens: int) -> Coverage | None:
        """Return the usable prefixes of a prompt; None if no tier holds the first chunk of a group.

        Args:
            prompt: length of the prompt in tokens.
            keys: keys of the request's chunks.
            local_tokens: number of tokens at the start of the prompt that the engine itself has.
        """
        model, size = self._model, keys.chunk_tokens
        in_full = windows_survive_load(model.block_groups, prompt)
        whole, rest = divmod(prompt if in_full else prompt - 1, size)
        ends_inside = in_full and rest > 0 and model.state is None
        rows = keys.first(whole)
        if model.attention and local_tokens < size and whole and not self._holds(rows[model.attention[0]][0]):
            return None
        if ends_inside:
            rows = [[*row, key] for row, key in zip(rows, keys.tail(prompt), strict=True)]
        if not rows[0]:
            return None
        chunked = ChunkedPrompt(prompt if ends_inside else whole * size, size, prompt, local_tokens)
        return coverage(model.groups, chunked, self._numbers(rows))

    def load(self, keys: RequestKeys, found: Coverage, tokens: int) -> list[int]:
        """Load a prefix: count the reads, and copy chunks of slow tiers into host memory.

        Args:
            keys: keys of the request's chunks.
            found: result of `look_up`.
            tokens: length of the prefix in tokens, one of the usable prefixes.

        Returns:
            Number of bytes that each tier provides.
        """
        chunks = chunks_to_load(self._model.groups, found.chunked, tokens)
        numbers = [found.tier_numbers[group, of] for group, of in enumerate(chunks)]
        sizes = [
            sum(tier.count_reads(int((of == number).sum()), group) for group, of in enumerate(numbers))
            for number, tier in enumerate(self.tiers)
        ]
        wanted = [
            (chunk, group, tier)
            for group, of in enumerate(chunks)
            for chunk, tier in zip(of.tolist(), numbers[group].tolist(), strict=True)
        ]
        if len(chunks) > 1:
            wanted.sort()
        named = [(self._key(keys, found.chunked, group, chunk), group, tier) for chunk, group, tier in wanted]
        here = [key for key, _, tier in named if not tier][::-1]
        self._host.use(here)
        if any(sizes[1:]):
            self._fetch(here, [one for one in named if one[2]])
        return sizes

    def _fetch(self, here: list[bytes], wanted: list[tuple[bytes, int, int]]) -> None:
        """Copy the chunks of a load from slow tiers into host memory, and into all faster slow tiers.

        If host memory has no room for all, the ranks copy the chunks that it has room for to the engine's
        blocks. Then these can be evicted to make room for the others.

        Args:
            here: keys of chunks that the load reads from host memory.
            wanted: (key, index of the KV cache group, number of the tier) of the other chunks, in the order
                of the prompt.
        """
        host = self._host
        host.pin(here)
        while wanted or here:
            ends = list(accumulate(host.chunk_bytes[group] for _, group, _ in wanted))
            fitting = bisect_right(ends, host.make_room(ends[-1])) if wanted else 0
            if not (fitting or here):
                return
            written: list[bytes] = []
            arriving = sorted(wanted[:fitting], key=itemgetter(2))
            for (tier, group), each in groupby(arriving, itemgetter(2, 1)):
                names = [key for key, _, _ in each]
                host.admit(names, group)
                host.pin(names)
                for faster in self.tiers[1:tier]:
                    written += faster.write(names, group)
            host.unpin(key for key, _, _ in reversed(arriving))
            host.unpin(here)
            host.make_newest(written)
            here, wanted = [], wanted[fitting:]

    def store(self, runs: Iterable[tuple[int, Sequence[bytes], int]], cold: Collection[bytes] = ()) -> None:
        """Store chunks that one step of the engine completes.

        Args:
            runs: (index of the KV cache group, keys in the order of the prompt, number) of each run. The
                first `number` of the chunks need not be stored where any tier has them, because the engine
                has not computed them anew.
            cold: keys of the chunks that tiers evict before all others.
        """
        stored = self._host.store(self._new(runs), cold)
        for tier in self._slow:
            for group, keys in stored:
                written = tier.write(keys, group, cold)
                self._host.pin(written)
                self._host.unpin(written)

    def _new(self, runs: Iterable[tuple[int, Sequence[bytes], int]]) -> Iterator[tuple[int, Sequence[bytes]]]:
        """Yield the keys of each run that host memory lacks, in pieces as an engine orders their stores."""
        held = self._host.held
        for group, keys, unchanged in runs:
            new = [key for key in keys[:unchanged] if not self._holds(key)]
            new += [key for key in keys[unchanged:] if key not in held]
            for first in range(0, len(new), MAX_CHUNKS_PER_ORDER):
                yield group, new[first : first + MAX_CHUNKS_PER_ORDER]

    def mark_used(self, keys: Sequence[bytes], cold: Sequence[bytes] = ()) -> None:
        """Rank the chunks of a prompt as the latest used in every tier, the first one as the very latest.

        Args:
            keys: keys of the chunks that were used, in the order of the prompt.
            cold: keys of further chunks, which host memory evicts before all others.
        """
        last_first = keys[::-1]
        for tier in self.tiers:
            tier.make_newest(last_first)
        self._host.make_cold(cold)

    def _holds(self, key: bytes) -> bool:
        return any(key in tier.held for tier in self.tiers)

    def _numbers(self, rows: Iterable[list[bytes]]) -> TierNumbers:
        """Return the number of the fastest tier that holds each chunk, int64 of shape (groups, chunks)."""
        table = list(rows)
        flat = [key for row in table for key in row]
        numbers = np.full(len(flat), NO_TIER, np.int64)
        for number in reversed(range(len(self.tiers))):
            held = self.tiers[number].held
            if held:
                numbers[[key in held for key in flat]] = number
        return numbers.reshape(len(table), -1)

    def _key(self, keys: RequestKeys, chunked: ChunkedPrompt, group: int, number: int) -> bytes:
        whole = (number + 1) * chunked.chunk_tokens <= chunked.tokens
        return keys.whole[group][number] if whole else keys.tail(chunked.tokens)[group]
