"""The scheduler half's reaction to KV that must not be used any more, as workers report it."""

from __future__ import annotations

import logging

from kvferry.connector.messages import StepReports
from kvferry.connector.peers.peering import Peering
from kvferry.connector.tiers.tiering import Tiering
from kvferry.connector.worker.loads import CHANGED, MOVED

logger = logging.getLogger(__name__)

_RESET = "tiers are not used before POST /reset_prefix_cache?reset_external=true"


class StaleKV:
    """Ends the use of peers and tiers if the weights change or the KV cache moves.

    After a change of the weights, peers are not used any more, and tiers not before a reset of the cache.
    After a move of the cache, peers and tiers are not used any more: the engine computes everything.
    """

    def __init__(self, peering: Peering | None, tiering: Tiering | None) -> None:
        self._peering, self._tiering = peering, tiering
        self._changed = self._moved = False

    def take_reports(self, reports: StepReports, epoch: int) -> None:
        """Process what the workers report about their weights and their KV cache."""
        if reports.moved and not self._moved:
            self._moved = True  # the worker has logged it
            self._stop_exchange(MOVED)
            self.on_reset()
        if reports.stale is not None:
            self._on_weights_changed(reports.stale, epoch)

    def on_reset(self) -> None:
        """Keep tiers unused after a reset of the cache, if the KV cache has moved."""
        if self._moved and self._tiering is not None:
            self._tiering.suspend(MOVED)

    def _on_weights_changed(self, stale: int, epoch: int) -> None:
        """Stop exchanging KV with peers for good, and stop using tiers until the next cache reset."""
        if self._moved:
            return
        if not self._changed:
            self._changed = True
            logger.warning(
                "%s: no KV is exchanged with other engines any more, since they compared other weights; "
                "start this engine anew to exchange again", CHANGED,
            )  # fmt: skip
            self._stop_exchange(CHANGED)
        if self._tiering is not None and stale >= epoch:
            logger.warning("%s, and its cache was not reset: %s", CHANGED, _RESET)
            self._tiering.suspend(f"{CHANGED}, and its cache was not reset: {_RESET}")

    def _stop_exchange(self, why: str) -> None:
        if self._peering is not None:
            self._peering.stop(why)
