"""Merging of the children's completions into those that a worker reports to the engine.

A completion is a report that the KV of a request has been received or sent. vLLM fails an assertion on a
completion that it does not expect, and takes the first completion of a request as the only one. So the worker
reports a request as received when the child that loads it does, whatever other children report. It reports a
request as sent when every child that keeps the request's blocks has reported it as sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvferry.engines.vllm.compat.contract import KVConnectorTransferResults


class Completions:
    """Transfers of requests whose end a worker still has to report to vLLM.

    A load ends with the report of the child connector that runs the load. A request counts as sent with the
    last report of the children that keep the request's blocks.
    """

    def __init__(self) -> None:
        self._loads: dict[str, int] = {}
        self._holders: dict[str, set[int]] = {}

    def __len__(self) -> int:
        """Return the number of loads in flight plus the number of ended requests whose blocks are kept."""
        return len(self._loads) + len(self._holders)

    def expect(self, loads: Mapping[str, int], holders: Mapping[str, Iterable[int]]) -> None:
        """Record loads that start, and ended requests whose blocks some child connectors keep.

        Args:
            loads: index of the child that loads the request, by request id.
            holders: indices of the children that keep blocks of the ended request, by request id.
        """
        self._loads.update(loads)
        self._holders.update({name: set(child_indices) for name, child_indices in holders.items()})

    def join(self, reports: Iterable[KVConnectorTransferResults]) -> KVConnectorTransferResults:
        """Merge the reports of all child connectors about a step into one report for the engine.

        A request is in the result as received (and as failed, if its load failed) if the child that loads it
        reports so. A request is in the result as sent if the last of the children that keep its blocks has
        reported it as sent. Reports of children that do not take part in a request's transfer are dropped.

        Args:
            reports: ids of sent, received and failed requests of each child, in the order of the children.
        """
        sent, received, failed = set(), set(), set()
        for child_index, report in enumerate(reports):
            ours = {name for name in report.finished_recving if self._loads.get(name) == child_index}
            received |= ours
            failed |= ours & report.failed_recving
            for name in ours:
                del self._loads[name]
            for name in report.finished_sending:
                holders = self._holders.get(name)
                if holders is None:
                    continue
                holders.discard(child_index)
                if not holders:
                    del self._holders[name]
                    sent.add(name)
        return KVConnectorTransferResults(sent, received, failed)
