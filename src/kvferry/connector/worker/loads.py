"""The life of a load on one worker: two clocks.

The *request* has a deadline: when it passes, the load is reported as failed and the request goes on
without. The *memory* belongs to the transfer until nothing of it is in flight, however long that takes.

    LOADING ─landed─▶ READY or FAILED     (reported; memory free)
       └─deadline, or given up─▶ EXPIRED ─landed─▶ RELEASED
                    (reported; memory still held)    (memory free)

A load is given up before its deadline when it would be of no use: another part of its prefix has failed.

Each load is reported exactly once, each is released exactly once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Settled:
    """The loads that have come to an end since the last call.

    Attributes:
        reported: load to its failure, None if it succeeded.
        released: loads of which nothing is in flight any more.
    """

    reported: dict[str, str | None] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)


class Joined:
    """Joins the loads of an attempt, each of which brings a part; the attempt ends with the last of them."""

    def __init__(self) -> None:
        self._heard: dict[str, list[str | None]] = {}

    def reported(self, attempt: str, loads: int, failure: str | None) -> bool | None:
        """Note that one of an attempt's loads has been reported.

        Args:
            attempt: names it.
            loads: how many it has.
            failure: of this one, None if it succeeded.

        Returns:
            Whether all have succeeded, with the last of them; None before.
        """
        heard = self._heard.setdefault(attempt, [])
        heard.append(failure)
        if len(heard) < loads:
            return None
        del self._heard[attempt]
        return not any(failure is not None for failure in heard)


class Loads:
    """All loads of a worker that are not over. Not thread-safe: the engine's thread calls it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._deadlines: dict[str, float] = {}
        self._given_up: dict[str, str] = {}
        self._expired: set[str] = set()
        self._landed: dict[str, str | None] = {}

    def __len__(self) -> int:
        """Return the number of loads whose memory is still held."""
        return len(self._deadlines) + len(self._expired)

    def begin(self, key: str, timeout_seconds: float) -> None:
        """Begin a load."""
        if key in self._deadlines or key in self._expired:
            raise ValueError(f"load {key!r} has begun already")
        self._deadlines[key] = self._clock() + timeout_seconds

    def give_up(self, key: str, why: str) -> None:
        """Fail a load that is of no use any more; do nothing if it has been reported."""
        if key in self._deadlines:
            self._given_up[key] = why

    def landed(self, key: str, failure: str | None) -> None:
        """Note that nothing of a load is in flight any more."""
        self._landed[key] = failure

    def settle(self) -> Settled:
        """Report what landed and what is late."""
        reported: dict[str, str | None] = {}
        released: set[str] = set()
        for key, failure in self._landed.items():
            released.add(key)
            if key in self._expired:
                self._expired.discard(key)
            else:
                del self._deadlines[key]
                self._given_up.pop(key, None)
                reported[key] = failure
        self._landed.clear()
        now = self._clock()
        over = {k: "its deadline passed" for k, deadline in self._deadlines.items() if deadline <= now}
        for key, why in {**over, **self._given_up}.items():
            del self._deadlines[key]
            self._expired.add(key)
            reported[key] = why
        self._given_up.clear()
        return Settled(reported, released)
