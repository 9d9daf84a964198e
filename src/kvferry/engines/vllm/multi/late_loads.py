"""Loads that a child connector has not ended in time, and the blocks that they may still write.

kvferry's own connector ends its loads by itself. Another project's may never report that a load has ended,
for example after an error in one of its threads. The request would wait for ever, also after its client has
left. So at a deadline the request goes on without the load, as after any failed load. The load may still
write to the request's blocks. They stay pinned until the child reports the end of the load on every worker.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.connector.engine import BlockPool
from kvferry.connector.pins import Pins, may_hold
from kvferry.terminal import shown
from kvferry.units import counted

logger = logging.getLogger(__name__)

_NULL_BLOCK = 0


@dataclass(frozen=True, slots=True)
class LateLoad:
    """A load that its request no longer waits for, as the workers are told.

    Attributes:
        key: unique name of the load.
        block_ids: ids of the blocks that it may still write. Until its end, no request has them.
    """

    key: str
    block_ids: frozenset[int]


class LateLoads:
    """Pins of the blocks of loads that their requests no longer wait for. Only the engine's thread uses it.

    Attributes:
        pool: vLLM's block pool; None until `FerryMultiConnector` is given it.
    """

    def __init__(self, workers: int, deadline_seconds: float) -> None:
        """Begin without late loads.

        Args:
            deadline_seconds: time after which a load is late, for the log.
        """
        self.pool: BlockPool | None = None
        self._pins: Pins[Any] = Pins(workers)
        self._seconds = deadline_seconds
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._pins)

    def hold(self, child: str, request_id: str, blocks: Sequence[Sequence[Any]]) -> LateLoad:
        """Pin the blocks of a late load, for each KV cache group. The request still holds them."""
        assert self.pool is not None, "a load needs blocks"
        held = [block for group in blocks for block in group if block.block_id != _NULL_BLOCK]
        # Before vLLM frees the blocks, which it does when the request goes on.
        self.pool.touch(held)
        key = f"{request_id}#{next(self._numbers)}"
        self._pins.hold(key, child, held)
        self._pins.mark_late(key)
        logger.error(
            "%s has not ended its load of request %s in %g s (load_timeout_seconds): the request goes on "
            "without it, and %s reports the end before %s can be reused",
            child, shown(request_id), self._seconds, child, counted(len(held), "block"),
        )  # fmt: skip
        return LateLoad(key, frozenset(block.block_id for block in held))

    def end(self, workers: Mapping[str, int]) -> None:
        """Unpin the blocks of loads that have ended on every worker, from the number of workers by load."""
        for key, count in workers.items():
            if (blocks := self._pins.on_transfer_ended(key, count)) and self.pool is not None:
                self.pool.free_blocks(reversed(blocks))

    def has_room(self, child: str, in_flight: Mapping[str, int]) -> bool:
        """Return True if a child may begin a load, given the blocks of loads in flight by child."""
        if self.pool is None:
            return True
        # Any load in flight may become late. A child may hold half of the blocks that the loads of the others
        # leave.
        return may_hold(child, 1, Counter(self._pins.held) + Counter(in_flight), len(self.pool.blocks))
