"""Completions of the children, merged into those that a worker reports to the engine.

vLLM fails an assertion on a completion that it does not expect, and takes the first completion of a request
for the only one. So a request counts as received when the child that loads it reports it, whatever other
children report. A request counts as sent when every child that keeps its blocks has reported it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvferry.engines.vllm.compat.contract import KVConnectorTransferResults


class Completions:
    """Completions that a worker still expects from its children."""

    def __init__(self) -> None:
        self._loads: dict[str, int] = {}
        self._holders: dict[str, set[int]] = {}

    def __len__(self) -> int:
        """Return the number of expected loads plus the number of ended requests whose blocks are kept."""
        return len(self._loads) + len(self._holders)

    def expect(self, loads: Mapping[str, int], holders: Mapping[str, Iterable[int]]) -> None:
        """Record new loads, and ended requests whose blocks children keep.

        Args:
            loads: index of the child that loads, by request id.
            holders: indices of the children that keep blocks, by request id.
        """
        self._loads.update(loads)
        self._holders.update({name: set(places) for name, places in holders.items()})

    def join(self, reports: Iterable[KVConnectorTransferResults]) -> KVConnectorTransferResults:
        """Merge all children's completions of a step into those that the engine expects.

        Args:
            reports: completions of each child, in the order of the children.
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
