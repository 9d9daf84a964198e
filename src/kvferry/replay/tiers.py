"""The simulated tiers of one engine: host memory and the storage behind it.

The rules are those of the serving code: every chunk passes through host memory (`cache.reading`), new chunks
are written to all slow tiers (`cache.writing`), and a chunk that was read from one slow tier is written to
the faster ones. Reads and writes take no time here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvferry.planning.coverage import (
    NO_TIER,
    ChunkedPrompt,
    Coverage,
    TierNumbers,
    chunks_to_load,
    coverage,
)
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
        wanted: list[list[list[bytes]]] = []  # by tier and group
        for number in range(len(self.tiers)):
            wanted.append([])
            for group, chunks in enumerate(chunks_to_load(self._model.groups, found.chunked, tokens)):
                here = chunks[found.tier_numbers[group, chunks] == number].tolist()
                wanted[number].append([self._key(keys, found.chunked, group, chunk) for chunk in here])
        sizes = [0] * len(self.tiers)
        slow = any(any(groups) for groups in wanted[1:])
        for group, names in enumerate(wanted[0]):
            self._host.read(names, group)
            sizes[0] += len(names) * self._host.chunk_bytes[group]
            if slow:
                self._host.pin(names)
        for number, tier in enumerate(self.tiers[1:], 1):
            for group, names in enumerate(wanted[number]):
                tier.read(names, group)
                sizes[number] += len(names) * tier.chunk_bytes[group]
                for faster in (self._host, *self.tiers[1:number]):
                    faster.store(names, group)
        if slow:
            for names in wanted[0]:
                self._host.unpin(names[::-1])
        return sizes

    def store(self, keys: Sequence[bytes], group: int, available: Sequence[bool]) -> None:
        """Store complete chunks of a request.

        Args:
            keys: keys of the chunks, in the order of the prompt.
            group: index of their KV cache group.
            available: for each chunk, True if it need not be stored where any tier has it, because the engine
                has not computed it anew.
        """
        new = [
            key
            for key, skip in zip(keys, available, strict=True)
            if key not in self._host.held and not (skip and self._holds(key))
        ]
        if new:
            stored = self._host.store(new, group)
            for tier in self._slow:
                tier.store(stored, group)

    def mark_used(self, keys: Sequence[bytes]) -> None:
        """Rank the chunks of a prompt as the latest used in every tier, the first one as the very latest."""
        for tier in self.tiers:
            tier.mark_used(keys)

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
