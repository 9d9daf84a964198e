"""Completions of the children, as a worker reports them to the engine.

vLLM asserts on a completion that it does not wait for, and takes the first one for all. So a request has
arrived when the child that loads it says so, whatever other children say. A request is sent when every child
that asked to keep its blocks has said so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvferry.engines.vllm.compat.contract import KVConnectorTransferResults


class Completions:
    """Completions that a worker still waits for."""

    def __init__(self) -> None:
        self._loads: dict[str, int] = {}
        self._holders: dict[str, set[int]] = {}

    def __len__(self) -> int:
        """Return the number of requests that some child has yet to report."""
        return len(self._loads) + len(self._holders)

    def expect(self, loads: Mapping[str, int], holders: Mapping[str, Iterable[int]]) -> None:
        """Note new loads with their children, and ended requests with the children that hold blocks."""
        self._loads.update(loads)
        self._holders.update({name: set(places) for name, places in holders.items()})

    def join(self, reports: Iterable[KVConnectorTransferResults]) -> KVConnectorTransferResults:
        """Join all children's completions of a step into those that the engine expects.

        Args:
            reports: reports in the order of the children.
        """
        sent, received, failed = set(), set(), set()
        for place, report in enumerate(reports):
            ours = {name for name in report.finished_recving if self._loads.get(name) == place}
            received |= ours
            failed |= ours & report.failed_recving
            for name in ours:
                del self._loads[name]
            for name in report.finished_sending:
                holders = self._holders.get(name)
                if holders is None:
                    continue
                holders.discard(place)
                if not holders:
                    del self._holders[name]
                    sent.add(name)
        return KVConnectorTransferResults(sent, received, failed)
