"""Which of its children's completions a worker tells the engine.

vLLM asserts on a completion that it does not wait for, and takes the first one for all: so a request has
arrived when the child that loads it says so, whatever others say, and is sent when every child that asked for
its blocks to be kept has said so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvferry.engines.vllm.compat.contract import KVConnectorTransferResults


class Completions:
    """What a worker still waits for."""

    def __init__(self) -> None:
        self._loads: dict[str, int] = {}
        self._holders: dict[str, set[int]] = {}

    def __len__(self) -> int:
        """Requests that some child has yet to report."""
        return len(self._loads) + len(self._holders)

    def expect(self, loads: Mapping[str, int], holders: Mapping[str, Iterable[int]]) -> None:
        """Requests that are loaded from now on, and by whom; requests that have ended, and who holds them."""
        self._loads.update(loads)
        self._holders.update({name: set(places) for name, places in holders.items()})

    def join(self, reports: Iterable[KVConnectorTransferResults]) -> KVConnectorTransferResults:
        """All children's completions of a step as the engine may hear them.

        Args:
            reports: by place of the child.
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
