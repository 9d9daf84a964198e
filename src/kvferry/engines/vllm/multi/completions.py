"""Ends of transfers: children that keep blocks, loads that are late, and what a worker reports to vLLM.

vLLM fails an assertion on a completion that it does not expect, and takes the first completion of a request
as the only one. So a worker reports a request as received when the child that loads it does, whatever other
children report, and as sent when every child that keeps its blocks has reported it as sent.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from kvferry.common.text import shown
from kvferry.common.units import counted
from kvferry.connector.blocks import Transfer, TransferBook, may_hold
from kvferry.connector.engine import BlockPool
from kvferry.engines.vllm.compat.connectors import KVConnectorTransferResults

logger = logging.getLogger(__name__)

Ending: TypeAlias = tuple[bool, dict[str, Any] | None]
"""Answer of a connector when a request has ended: (True if it keeps the blocks, ``kv_transfer_params``)."""

_NULL_BLOCK = 0


class BlockHolders:
    """The children that keep blocks of ended requests. Only the engine's thread may use it."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._holders: dict[str, set[int]] = {}
        self._warned_of: set[tuple[str, ...]] = set()

    def join(self, request_id: str, endings: Sequence[Ending]) -> Ending:
        """Merge what all children return when a request ends, and record which of them keep its blocks."""
        keeps = self.record(request_id, [held for held, _ in endings])
        said = [(name, params) for name, (_, params) in zip(self._names, endings, strict=True) if params]
        names = tuple(name for name, _ in said)
        # Once for each combination, because every request of a workload has the same one.
        if len(names) > 1 and names not in self._warned_of:
            self._warned_of.add(names)
            logger.warning(
                "%s all answer requests with kv_transfer_params; those of %s, the first in connectors, are "
                "what callers get. Blocks that the others keep for a consumer wait for their own deadline",
                ", ".join(names), names[0],
            )  # fmt: skip
        return keeps, said[0][1] if said else None

    def record(self, request_id: str, held: Sequence[bool]) -> bool:
        """Record which children keep blocks of an ended request; return True if any of them does."""
        child_indices = {child_index for child_index, holds in enumerate(held) if holds}
        if child_indices:
            # A child may tell of blocks twice: at the end of a request, and of its last, partial block.
            self._holders.setdefault(request_id, set()).update(child_indices)
        return bool(child_indices)

    def take_new(self) -> dict[str, frozenset[int]]:
        """Return the children that keep blocks, by id of each request that has ended since the last call."""
        holders, self._holders = self._holders, {}
        return {request_id: frozenset(child_indices) for request_id, child_indices in holders.items()}


@dataclass(frozen=True, slots=True)
class LateLoad:
    """A load that its request no longer waits for, and the blocks that it may still write."""

    key: str
    block_ids: frozenset[int]


class LateLoads:
    """Loads of children that their requests no longer wait for. Only the engine's thread uses it."""

    def __init__(self, workers: int, deadline_seconds: float) -> None:
        """Begin without late loads. Call `start` before the first one; log `deadline_seconds` with each."""
        self._workers, self._seconds = workers, deadline_seconds
        self._pool: BlockPool | None = None
        self._loads: TransferBook[Transfer] | None = None
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return 0 if self._loads is None else len(self._loads)

    def start(self, pool: BlockPool) -> None:
        """Begin to pin blocks of late loads in vLLM's pool."""
        self._pool, self._loads = pool, TransferBook(self._workers, pool)

    def hold(self, child: str, request_id: str, blocks: Sequence[Sequence[Any]]) -> LateLoad:
        """Pin the blocks of a late load, by KV cache group, while the request still holds them."""
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


class Completions:
    """Decides when a worker reports to vLLM that the KV of a request has been received or sent."""

    def __init__(self) -> None:
        self._loads: dict[str, int] = {}
        self._holders: dict[str, set[int]] = {}
        self._given_up: set[str] = set()
        self._late: dict[tuple[str, int], LateLoad] = {}
        self._ended = Counter[str]()

    def __len__(self) -> int:
        return len(self._loads) + len(self._holders)

    def expect(self, loads: Mapping[str, int], holders: Mapping[str, Iterable[int]]) -> None:
        """Record the child of each load that starts, and the children that keep blocks of ended requests."""
        self._loads.update(loads)
        self._holders.update({name: set(child_indices) for name, child_indices in holders.items()})

    def give_up(self, late: Mapping[str, LateLoad]) -> None:
        """Report loads that children have not ended as failed, by request id. Their end is reported later."""
        for name, load in late.items():
            child_index = self._loads.pop(name, None)
            if child_index is None:  # the child has reported the end meanwhile
                self._ended[load.key] += 1
            else:
                self._late[name, child_index] = load
                self._given_up.add(name)

    @property
    def late_blocks(self) -> frozenset[int]:
        """Ids of blocks that only late loads may write."""
        return frozenset().union(*(load.block_ids for load in self._late.values()))

    def take_ended(self) -> dict[str, int]:
        """Return the names of late loads that have ended on this worker since the last call, each with 1."""
        ended, self._ended = self._ended, Counter()
        return dict(ended)

    def join(self, reports: Iterable[KVConnectorTransferResults]) -> KVConnectorTransferResults:
        """Merge the reports of all children about a step, in their order, into one report for vLLM."""
        sent, received, failed = set[str](), set(self._given_up), set(self._given_up)
        self._given_up.clear()
        for child_index, report in enumerate(reports):
            for name in report.finished_recving:
                if (load := self._late.pop((name, child_index), None)) is not None:
                    self._ended[load.key] += 1
            # A child that neither loads the request nor keeps its blocks may report it all the same.
            ours = {name for name in report.finished_recving if self._loads.get(name) == child_index}
            received |= ours
            failed |= ours & report.failed_recving
            for name in ours:
                del self._loads[name]
            for name in report.finished_sending:
                holders = self._holders.get(name)
                # vLLM has been told already, or does not expect it.
                if holders is None:
                    continue
                holders.discard(child_index)
                if not holders:
                    del self._holders[name]
                    sent.add(name)
        return KVConnectorTransferResults(sent, received, failed)
