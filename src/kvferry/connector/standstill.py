"""Notice of a standstill: requests wait for blocks that leases keep, and no request gets any.

A request claims the lease of its offer when it arrives, and keeps the claim until it has loaded the KV. So it
keeps blocks of the engine that made the offer while it waits for blocks of its own engine. Two engines that
offer KV to each other can then wait for each other for ever, each full of leases that requests at the other
one claim. One engine can wait for itself in the same way, and more than two can wait in a circle.

At least one engine of every such circle must let go of a claim. Each one does: the request with the oldest
claim gives it up and takes what is left, another source or computing. So another engine's lease ends, and
requests there get its blocks.

Nothing is given up while requests still get blocks, because then the others only wait for their turn. Nothing
is given up by an engine without leases either: what it waits for are its own running requests.
"""

from __future__ import annotations

from collections.abc import Callable

LAPSE_SECONDS = 1.0
"""Seconds between two looks at the engine, and so between two claims that it gives up during one standstill.
A look takes time in proportion to the number of requests, so it is not taken in every step."""


class Standstill:
    """Decides when a claim on another engine's lease must be given up. Only the engine's thread calls it.

    Attributes:
        reason: why a claim is given up, as text for people.
    """

    def __init__(self, patience_seconds: float, clock: Callable[[], float]) -> None:
        """Begin to watch an engine.

        Args:
            patience_seconds: seconds without any new blocks for a request after which a claim is given up.
            clock: function that returns monotonic seconds.
        """
        self._patience_seconds, self._clock = patience_seconds, clock
        self._admitted, self._look, self._due = 0, 0.0, 0.0
        self.reason = (
            f"no request has got blocks for {patience_seconds:g} s (patience_seconds), and this engine keeps "
            "blocks for others, so the claim is given up"
        )

    def claim_lapses(self, admitted: int, leases_block: Callable[[], bool]) -> bool:
        """Return whether one claim must be given up now. Call this once per engine step.

        Args:
            admitted: number of times so far that the engine has allocated blocks to a waiting request.
            leases_block: function that returns whether requests wait for blocks that leases for other engines
                keep.
        """
        now = self._clock()
        if now < self._look:
            return False
        self._look = now + LAPSE_SECONDS
        if admitted != self._admitted or not leases_block():
            self._admitted, self._due = admitted, now + self._patience_seconds
        return now >= self._due
