"""Pins of the blocks that loads write.

Every block that a load may write is pinned before the load begins. It stays pinned until every worker reports
that nothing of the load is in flight, even if the request ends before. A load is *late* when its request goes
on or ends without it. The blocks of late loads are counted per source and bounded. Any load in flight may
become late, so a load begins only if all loads together, in flight and late, stay below the bound
(`may_hold`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

BlockT = TypeVar("BlockT")


def may_hold(source: str, blocks: int, held: Mapping[str, int], most: int) -> bool:
    """Return whether a load from a source may begin, given the blocks that all loads may still write.

    All sources together may hold at most `most` blocks. Each source may hold at most half of the blocks that
    the others leave, so sources that hang always leave room for another source. While no other load holds
    blocks, a load may be of any size, so that long prompts can be loaded too.

    >>> may_hold("a", 8, {}, 8)  # no other load holds blocks
    True
    >>> may_hold("a", 4, {"a": 1}, 8)  # 1 + 4 blocks are more than half of 8
    False
    >>> may_hold("b", 2, {"a": 4}, 8)  # "a" leaves 4 blocks, and 2 are half of them
    True

    Args:
        source: name of the load's source.
        blocks: number of blocks that the load may write.
        held: number of blocks that loads hold, by source. Late loads (no longer waited for) count too.
        most: maximum number of blocks that all loads together may hold.
    """
    others = sum(held.values()) - held.get(source, 0)
    alone = not any(held.values())
    return alone or held.get(source, 0) + blocks <= (most - others) // 2


@dataclass(slots=True)
class Pin(Generic[BlockT]):
    """Pinned blocks of one load, the number of workers that have not ended it, and whether it is late."""

    source: str
    blocks: Sequence[BlockT]
    waiting_for: int
    late: bool = field(default=False)


class Pins(Generic[BlockT]):
    """Record of the KV blocks that must stay allocated because a load may still write to them.

    The caller adds and drops the references in the engine's block pool.
    """

    def __init__(self, workers: int) -> None:
        """Create an empty record of pinned blocks.

        Args:
            workers: number of workers that must report the end of each load.
        """
        self._workers = workers
        self._pins: dict[str, Pin[BlockT]] = {}
        self._late: dict[str, int] = defaultdict(int)
        self._held = Counter[str]()

    def __len__(self) -> int:
        """Return the number of loads that hold blocks, including late loads."""
        return len(self._pins)

    def hold(self, key: str, source: str, blocks: Sequence[BlockT]) -> None:
        """Record the blocks that a new load pins. The caller has already taken a reference to each block.

        Args:
            key: unique name of the load.
            source: name of the load's source.
            blocks: all blocks that the load may write.
        """
        if key in self._pins:
            raise ValueError(f"load {key!r} is pinned already")
        self._pins[key] = Pin(source, blocks, self._workers)
        self._held[source] += len(blocks)

    def mark_late(self, key: str) -> None:
        """Mark a load as late: its request no longer waits, but the load may still write to its blocks."""
        pin = self._pins.get(key)
        if pin is not None and not pin.late:
            pin.late = True
            self._late[pin.source] += len(pin.blocks)

    @property
    def by_load(self) -> Mapping[str, Pin[BlockT]]:
        """Pinned blocks by the unique name of their load."""
        return self._pins

    @property
    def held(self) -> Mapping[str, int]:
        """Number of blocks that the loads from each source hold, including late loads.

        A source whose loads hold no blocks is absent.
        """
        return self._held

    def late_blocks(self, source: str) -> int:
        """Return the number of blocks that late loads from `source` still hold."""
        return self._late.get(source, 0)

    @property
    def all_late_blocks(self) -> int:
        """Number of blocks that late loads of all sources still hold."""
        return sum(self._late.values())

    def on_transfer_ended(self, key: str, workers: int = 1) -> Sequence[BlockT]:
        """Record that a load has no transfer in flight any more on some of the workers.

        Args:
            key: unique name of the load.
            workers: number of workers on which the load's transfers have ended since the last call.

        Returns:
            The blocks whose references the caller must drop now: all blocks of the load if these were the
            last workers, else none.
        """
        pin = self._pins.get(key)
        if pin is None:
            return ()
        pin.waiting_for -= workers
        if pin.waiting_for > 0:
            return ()
        del self._pins[key]
        self._held[pin.source] -= len(pin.blocks)
        if not self._held[pin.source]:
            del self._held[pin.source]
        if pin.late:
            self._late[pin.source] -= len(pin.blocks)
            if not self._late[pin.source]:
                del self._late[pin.source]
        return pin.blocks
