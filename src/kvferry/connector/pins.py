"""Pins of the blocks that loads write.

Every block that a load may write is pinned before the load is posted, until every worker reports that nothing
of it is in flight, whatever becomes of the request. A pin that outlives its request is *late*. Late pins are
counted per source and bounded. Any load in flight may become late, so a load begins only if all loads in
flight and late ones stay below the bound together (`may_hold`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

BlockT = TypeVar("BlockT")


def may_hold(source: str, blocks: int, held: Mapping[str, int], most: int) -> bool:
    """Return whether another load may begin.

    All sources together hold at most `most` blocks. One source holds at most half of the blocks that the
    others leave, so sources that hang always leave room for another. A load that is alone may be larger, or
    a long prompt could never be loaded.

    >>> may_hold("a", 8, {}, 8), may_hold("a", 4, {"a": 1}, 8), may_hold("b", 2, {"a": 4}, 8)
    (True, False, True)

    Args:
        source: the source of the load.
        blocks: number of blocks that the load may write.
        held: blocks that loads of each source hold, in flight and late.
        most: blocks that all loads may hold.
    """
    others = sum(held.values()) - held.get(source, 0)
    alone = not any(held.values())
    return alone or held.get(source, 0) + blocks <= (most - others) // 2


@dataclass(slots=True)
class _Pin(Generic[BlockT]):
    source: str
    blocks: Sequence[BlockT]
    waiting_for: int
    late: bool = field(default=False)


class Pins(Generic[BlockT]):
    """All pins of an engine. The caller takes and returns the references to the engine's block objects."""

    def __init__(self, workers: int) -> None:
        """No pins yet.

        Args:
            workers: number of workers that must report a load as landed.
        """
        self._workers = workers
        self._pins: dict[str, _Pin[BlockT]] = {}
        self._late: dict[str, int] = defaultdict(int)
        self._held = Counter[str]()

    def __len__(self) -> int:
        """Number of loads that hold blocks."""
        return len(self._pins)

    def hold(self, key: str, source: str, blocks: Sequence[BlockT]) -> None:
        """Pin the blocks of a load before it is ordered; the caller has taken a reference to each."""
        if key in self._pins:
            raise ValueError(f"load {key!r} is pinned already")
        self._pins[key] = _Pin(source, blocks, self._workers)
        self._held[source] += len(blocks)

    def late(self, key: str) -> None:
        """Mark a load as late: its request goes on without it, and its bytes may still land."""
        pin = self._pins.get(key)
        if pin is not None and not pin.late:
            pin.late = True
            self._late[pin.source] += len(pin.blocks)

    @property
    def held(self) -> Mapping[str, int]:
        """Blocks that loads of each source hold, in flight or late; sources that hold none are left out."""
        return self._held

    def late_blocks(self, source: str) -> int:
        """Blocks that late loads from `source` still hold."""
        return self._late.get(source, 0)

    @property
    def all_late_blocks(self) -> int:
        """Blocks that late loads of all sources still hold."""
        return sum(self._late.values())

    def landed(self, key: str, workers: int = 1) -> Sequence[BlockT]:
        """Note that `workers` more workers have nothing of a load in flight.

        Returns:
            The blocks whose references the caller returns now: all with the last worker, else none.
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
