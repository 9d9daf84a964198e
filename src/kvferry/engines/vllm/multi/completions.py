"""Merging of the children's completions into those that a worker reports to the engine.

A completion is a report that the KV of a request has been received or sent. vLLM fails an assertion on a
completion that it does not expect, and takes the first completion of a request as the only one. So the worker
reports a request as received when the child that loads it does, whatever other children report. It reports a
request as sent when every child that keeps the request's blocks has reported it as sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from kvferry.engines.vllm.compat.contract import KVConnectorTransferResults
from kvferry.engines.vllm.multi.late_loads import LateLoad


class Completions:
    """Decides when a worker reports to vLLM that the KV of a request has been received or sent."""

    def __init__(self) -> None:
        self._loads: dict[str, int] = {}
        self._holders: dict[str, set[int]] = {}
        self._given_up: set[str] = set()
        self._late: dict[tuple[str, int], LateLoad] = {}
        self._ended = Counter[str]()

    def __len__(self) -> int:
        """Return the number of loads in flight plus the number of ended requests whose blocks are kept."""
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
        """Ids of blocks that only late loads may write. A child's errors about them concern no request."""
        return frozenset().union(*(load.block_ids for load in self._late.values()))

    def take_ended(self) -> dict[str, int]:
        """Return the names of late loads that have ended on this worker since the last call, each with 1."""
        ended, self._ended = self._ended, Counter()
        return dict(ended)

    def join(self, reports: Iterable[KVConnectorTransferResults]) -> KVConnectorTransferResults:
        """Merge the reports of all children about a step into one report for vLLM.

        Args:
            reports: ids of sent, received and failed requests of each child, in the order of the children.
        """
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
