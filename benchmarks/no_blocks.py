"""A block pool without blocks, for benchmarks of the scheduler's side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvferry.connector.engine import Block


class NoBlocks:
    """A stand-in for an engine's block pool (`BlockPool`): it has no blocks, and reports many free ones."""

    blocks: Sequence[Block] = ()

    def touch(self, blocks: Sequence[Block]) -> None:
        """Do nothing, because there are no blocks."""

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        """Do nothing, because there are no blocks."""

    def get_num_free_blocks(self) -> int:
        """Return a number of free blocks that is sufficient for any load."""
        return 1 << 20

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Do nothing, because there are no blocks."""
