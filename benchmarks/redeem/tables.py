"""Block tables of prompts in a pool that other prompts have used, as vLLM's block pool hands blocks out.

vLLM takes blocks from the front of a queue, and appends those of a request that ends, the last one first. So
the tables of prompts that are computed together, in turns of a step, break into ever shorter runs.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BLOCK_TOKENS = 16
_STEP_TOKENS = 2048
_BLOCKS = 60_000
_BATCHES, _HELD = 400, 6
_LENGTHS = (512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True)
class FamilyTables:
    """How many block tables a model family has: for full attention, for sliding windows, and for state."""

    full: int
    sliding: int = 0
    window_tokens: int = 0
    state: int = 0


FAMILIES = {
    "Qwen3": FamilyTables(1),
    "Gemma 3": FamilyTables(1, sliding=5, window_tokens=1024),
    "Nemotron-H": FamilyTables(1, state=4),
}
"""KV cache groups by model family, as vLLM 0.32 forms them."""


class UsedPool:
    """A pool of blocks in which prompts have come and gone."""

    def __init__(self, family: FamilyTables, seed: int) -> None:
        self._family, self._draw = family, random.Random(seed)  # noqa: S311 - no secret
        self._free = deque(range(1, _BLOCKS))
        held = list[list[list[int]]]()
        for _ in range(_BATCHES):
            held += self._compute(self._draw.choices(_LENGTHS, k=self._draw.randint(1, 4)))
            while len(held) > _HELD:
                for table in held.pop(self._draw.randrange(len(held))):
                    self._give_back(table)

    def tables(self, tokens: int) -> list[list[int]]:
        """Compute a prompt of this length, with up to three others, and return its tables."""
        return self._compute([tokens, *self._draw.choices(_LENGTHS, k=self._draw.randint(0, 3))])[0]

    def _compute(self, lengths: Sequence[int]) -> list[list[list[int]]]:
        """Compute prompts together. Return their tables."""
        family = self._family
        found: list[list[list[int]]] = [[[] for _ in range(family.full + family.sliding)] for _ in lengths]
        done, share = 0, _STEP_TOKENS // len(lengths)
        while done < max(lengths):
            done += share
            for tables, tokens in zip(found, lengths, strict=True):
                if done - share < tokens:
                    self._grow(tables, min(done, tokens), done - share)
        return [tables + [self._take(1) for _ in range(family.state)] for tables in found]

    def _grow(self, tables: list[list[int]], tokens: int, before: int) -> None:
        """Extend the tables of a prompt to so many tokens. Windows give back what they have passed."""
        for number, table in enumerate(tables):
            if number >= self._family.full:
                passed = max(0, before - self._family.window_tokens) // BLOCK_TOKENS
                self._give_back(table[:passed])
                table[:passed] = [0] * passed
            table.extend(self._take(-(-tokens // BLOCK_TOKENS) - len(table)))

    def _take(self, count: int) -> list[int]:
        return [self._free.popleft() for _ in range(count)]

    def _give_back(self, table: Iterable[int]) -> None:
        self._free.extend(block for block in reversed([*table]) if block)
