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
from kvferry.connector.transfer import Transfer, TransferBook, may_hold
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
    """Loads of children that their requests no longer wait for. Only the engine's thread uses it."""

    def __init__(self, workers: int, deadline_seconds: float) -> None:
        """Begin without late loads. Call `start` before the first one.

        Args:
            deadline_seconds: time after which a load is late, for the log.
        """
        self._workers, self._seconds = workers, deadline_seconds
        self._pool: BlockPool | None = None
        self._loads: TransferBook[Transfer] | None = None
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """Return the number of late loads whose end the workers have not all reported."""
        return 0 if self._loads is None else len(self._loads)

    def start(self, pool: BlockPool) -> None:
        """Begin to pin blocks of late loads in vLLM's pool."""
        self._pool, self._loads = pool, TransferBook(self._workers, pool)

    def hold(self, child: str, request_id: str, blocks: Sequence[Sequence[Any]]) -> LateLoad:
        """Pin the blocks of a late load, for each KV cache group. The request still holds them."""
        assert self._loads is not None, "a load needs blocks"
        held = [block for group in blocks for block in group if block.block_id != _NULL_BLOCK]
        key = f"{request_id}#{next(self._numbers)}"
        self._loads.begin(Transfer(key=key, holder=child, blocks=held, late=True))
        logger.error(
            "%s has not ended its load of request %s in %g s (load_timeout_seconds): the request goes on "
            "without it, and %s reports the end before %s can be reused",
            child, shown(request_id), self._seconds, child, counted(len(held), "block"),
        )  # fmt: skip
        return LateLoad(key, frozenset(block.block_id for block in held))

    def end(self, workers: Mapping[str, int]) -> None:
        """Unpin the blocks of loads that have ended on every worker, from the number of workers by load."""
        if self._loads is not None:
            for key, count in workers.items():
                self._loads.end(key, count)

    def has_room(self, child: str, in_flight: Mapping[str, int]) -> bool:
        """Return True if a child may begin a load, given the blocks of loads in flight by child."""
        if self._pool is None or self._loads is None:
            return True
        # Any load in flight may become late. A child may hold half of the blocks that the loads of the others
        # leave.
        return may_hold(child, 1, Counter(self._loads.held) + Counter(in_flight), len(self._pool.blocks))
