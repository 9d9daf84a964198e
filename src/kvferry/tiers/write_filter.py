"""The admission filter of a storage tier: only chunks that are likely to be read are written.

Every prompt that has a chunk is a *use* of the chunk. A chunk with too few uses is *declined*. It is written
with a later use, if it is in host memory then. Uses of a chunk are never more than those of the chunks before
it in a prompt, so what is written of a prompt is its beginning.

The filter gets stricter while the tier's write budget is short. Both are pure: they have no clock.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from enum import StrEnum
from math import ceil, inf, log2
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from kvferry.tiers.index import tags_of

_Chunk = TypeVar("_Chunk")

# The oldest declined chunks beyond this number are forgotten. Host memory rarely holds as many.
MOST_DECLINED = 1 << 17
# Of the sketch of a filter: 8 MiB.
COLUMNS = 1 << 20


class DeclineReason(StrEnum):
    """The reason why a chunk is not written."""

    FEW_USES = "too few uses"
    SHORT_PROMPT = "short prompt"
    BUDGET = "write budget used up"


class UseSketch:
    """Counts the uses of chunks in a fixed amount of memory, and forgets old ones. Not thread-safe.

    It is a count-min sketch with conservative update [Estan and Varghese, 2002] in two generations. When
    `most` different chunks are counted in the newer one, it becomes the older one, and the one before is
    forgotten. So a use is remembered for at least `most` different chunks, and at most for twice as many. A
    count is never too low within this time. With `most` chunks in each generation, one chunk in 20 that was
    never used seems to have been used.

    The memory is 8 bytes for each of `columns`: two generations of four rows.
    """

    _ROWS = 4

    def __init__(self, columns: int) -> None:
        """Make an empty sketch. `columns` is a power of two."""
        self.most = columns // 2
        self._shift = np.uint64(64 - (columns.bit_length() - 1))
        # Odd multipliers, for multiply-shift hashing [Dietzfelbinger et al., 1997].
        self._factors = np.array(
            [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], np.uint64
        )[:, None]
        self._counts = np.zeros((2, self._ROWS, columns), np.uint8)
        self._new = 0  # number of different chunks in the newer generation

    def uses(self, keys: Sequence[bytes]) -> npt.NDArray[np.int64]:
        """Return the number of counted uses of each chunk: int64 of shape (len(keys),)."""
        return self._uses(self._places(keys))

    def add(self, keys: Sequence[bytes]) -> npt.NDArray[np.int64]:
        """Count a use of each of some different chunks. Return their uses, with this one."""
        if self._new >= self.most:
            self._counts = self._counts[::-1].copy()
            self._counts[0], self._new = 0, 0
        places = self._places(keys)
        least = np.stack([row[at] for row, at in zip(self._counts[0], places, strict=True)]).min(0)
        self._new += int((least == 0).sum())
        for row, at in zip(self._counts[0], places, strict=True):
            np.maximum.at(row, at, np.minimum(least, 254) + np.uint8(1))
        return self._uses(places)

    def _uses(self, places: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        rows = np.arange(self._ROWS)[:, None]
        found: npt.NDArray[np.int64] = self._counts[:, rows, places].min(1).sum(0, dtype=np.int64)
        return found

    def _places(self, keys: Sequence[bytes]) -> npt.NDArray[np.uint64]:
        # Keys are digests, of which a tag is a part.
        return (tags_of(keys) * self._factors) >> self._shift


class WriteFilter(Generic[_Chunk]):
    """Decides which chunks are written to a storage tier. Not thread-safe.

    Args:
        min_uses: number of prompts that must have had a chunk before it is written.
        min_prompt_tokens: length in tokens below which a prompt uses no chunk, and its chunks are declined.

    Attributes:
        declined: number of chunks that were declined when they were new in host memory, by reason.
    """

    def __init__(self, min_uses: int = 1, min_prompt_tokens: int = 0) -> None:
        self.min_uses, self.min_prompt_tokens = min_uses, min_prompt_tokens
        self.declined: Counter[DeclineReason] = Counter()
        self._waiting: OrderedDict[bytes, _Chunk] = OrderedDict()  # declined chunks, the oldest first
        self._sketch: UseSketch | None = None  # None before the first use that has to be counted

    def admit(
        self,
        chunks: Sequence[tuple[bytes, _Chunk]],
        prompt_tokens: int | None = None,
        budget_left: float | None = None,
    ) -> list[tuple[bytes, _Chunk]]:
        """Return the chunks to write, of those that are new in host memory. The others are declined.

        The use by their prompt is not counted yet: `use` will count it.

        Args:
            chunks: keys, and what the caller needs to write the chunks.
            prompt_tokens: length of their prompt; None for chunks that another tier already has.
            budget_left: share of the tier's write budget that is left, 0 to 1; None without a budget.
        """
        needed = self._needed_uses(budget_left)
        if prompt_tokens is not None and prompt_tokens < self.min_prompt_tokens:
            for one in chunks:
                self._decline(one, DeclineReason.SHORT_PROMPT)
            return []
        if needed <= 1:
            return list(chunks)
        admitted = []
        for one, earlier in zip(chunks, self._earlier_uses(chunks), strict=True):
            if earlier + 1 >= needed:
                admitted.append(one)
            else:
                few = earlier + 1 < self.min_uses
                self._decline(one, DeclineReason.FEW_USES if few else DeclineReason.BUDGET)
        return admitted

    def use(
        self, keys: Sequence[bytes], prompt_tokens: int, budget_left: float | None = None
    ) -> list[tuple[bytes, _Chunk]]:
        """Count a use of the different chunks of a prompt. Return the declined ones to write now, in order.

        Args:
            prompt_tokens, budget_left: as in `admit`.
        """
        counts = self.min_uses > 1 or budget_left is not None
        if not keys or prompt_tokens < self.min_prompt_tokens or not (counts or self._waiting):
            return []
        if self._sketch is None:
            self._sketch = UseSketch(COLUMNS)
        needed = self._needed_uses(budget_left)
        uses = self._sketch.add(keys).tolist()
        return [
            (key, self._waiting.pop(key))
            for key, of in zip(keys, uses, strict=True)
            if of >= needed and key in self._waiting
        ]

    def put_back(self, key: bytes, chunk: _Chunk) -> None:
        """Remember an admitted chunk that could not be written, so that a later use writes it."""
        self._waiting[key] = chunk
        self._waiting.move_to_end(key)
        if len(self._waiting) > MOST_DECLINED:
            self._waiting.popitem(last=False)

    def forget(self) -> None:
        """Forget the declined chunks, because they are in host memory no more."""
        self._waiting.clear()

    def _needed_uses(self, budget_left: float | None) -> float:
        if budget_left is None:
            return self.min_uses
        if budget_left <= 0:
            return inf
        # One more use for each time that the budget is halved: what is used often is written longest.
        return self.min_uses + max(0, ceil(-log2(budget_left)) - 1)

    def _earlier_uses(self, chunks: Sequence[tuple[bytes, _Chunk]]) -> list[int]:
        if self._sketch is None or not chunks:
            return [0] * len(chunks)
        found: list[int] = self._sketch.uses([key for key, _ in chunks]).tolist()
        return found

    def _decline(self, one: tuple[bytes, _Chunk], reason: DeclineReason) -> None:
        self.declined[reason] += 1
        self.put_back(*one)
