"""The states of a load on one worker.

A load ends twice: for its request and for its memory. When its deadline passes, it is reported as failed and
the request goes on without it. But its KV blocks belong to the transfer until nothing of it is in flight,
however long that takes.

    LOADING ─transfer ended─▶ READY or FAILED     (reported; memory free)
       └─deadline, or given up─▶ EXPIRED ─transfer ended─▶ RELEASED
                    (reported; memory still held)            (memory free)

A load is given up before its deadline when it has become useless, for example because the load of another
part of the same prefix has failed. Each load is reported exactly once, and released exactly once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

MOST_TIMEOUTS = 20
"""Maximum time of a load whose KV a peer still computes, as a multiple of its timeout.

So a peer that computes without end does not hold a request for ever.
"""

LATE_SECONDS = 5.0
"""A load's failure says if `Loads.settle` was called so long after the deadline.

Only the engine's steps call it.
"""


@dataclass(frozen=True, slots=True)
class SettledLoads:
    """The loads whose result became known, or whose transfers ended, since the last call of `Loads.settle`.

    A load past its deadline is reported as failed first. It is released later, when its transfers have ended.

    Attributes:
        reported: result of each load whose result became known, by load key: the reason for the failure, or
            None if the load succeeded.
        released: keys of the loads that have no transfer in flight any more.
    """

    reported: dict[str, str | None] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)


class AttemptResults:
    """Collects the results of loads by attempt. All loads of an attempt load parts of the same prefix."""

    def __init__(self) -> None:
        self._results: dict[str, list[str | None]] = {}

    def add(self, attempt: str, loads: int, failure: str | None) -> bool | None:
        """Record the result of one load of an attempt. The loads of an attempt each load a part of a prefix.

        Args:
            attempt: name of the attempt.
            loads: number of loads of the attempt.
            failure: reason for the failure of this load; None if it succeeded.

        Returns:
            None while other loads of the attempt have not been reported. With the report of the last load,
            whether all loads have succeeded.
        """
        results = self._results.setdefault(attempt, [])
        results.append(failure)
        if len(results) < loads:
            return None
        del self._results[attempt]
        return not any(failure is not None for failure in results)


class Loads:
    """The loads of one worker that may still write to their blocks. Only the engine's thread calls it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._deadlines: dict[str, float] = {}
        self._latest: dict[str, float] = {}
        self._given_up: dict[str, str] = {}
        self._expired: set[str] = set()
        self._ended: dict[str, str | None] = {}

    def __len__(self) -> int:
        """Return the number of loads that may still write to their blocks."""
        return len(self._deadlines) + len(self._expired)

    @property
    def under_way(self) -> bool:
        """True if a load that is not past its deadline still has a transfer in flight."""
        return not self._deadlines.keys() <= self._ended.keys()

    def begin(self, key: str, timeout_seconds: float) -> None:
        """Add a load that begins now.

        Args:
            key: name of the load.
            timeout_seconds: seconds from now to the deadline of the load.
        """
        if key in self._deadlines or key in self._expired:
            raise ValueError(f"load {key!r} has begun already")
        now = self._clock()
        self._deadlines[key], self._latest[key] = now + timeout_seconds, now + MOST_TIMEOUTS * timeout_seconds

    def extend(self, key: str, timeout_seconds: float) -> None:
        """Let the timeout of a load begin anew, because its peer has computed more of the KV.

        The load ends at most `MOST_TIMEOUTS` timeouts after its beginning. Do nothing if its result has been
        reported already.

        Args:
            key: name of the load.
            timeout_seconds: seconds from now to the new deadline.
        """
        if key in self._deadlines:
            self._deadlines[key] = min(self._clock() + timeout_seconds, self._latest[key])

    def give_up(self, key: str, why: str) -> None:
        """Mark a load as failed because its request does not need it any more.

        Do nothing if the result of the load has been reported already.

        Args:
            key: name of the load.
            why: reason to report as the load's failure.
        """
        if key in self._deadlines:
            self._given_up[key] = why

    def on_transfer_ended(self, key: str, failure: str | None) -> None:
        """Record that a load has no transfer in flight any more.

        Args:
            key: name of the load.
            failure: reason for the failure; None if the load succeeded.
        """
        self._ended[key] = failure

    def settle(self) -> SettledLoads:
        """Return the loads that have ended, been given up or passed their deadline since the last call.

        A load that is given up or passes its deadline is reported as failed at once. A later call releases
        it, after its transfers have ended.
        """
        reported: dict[str, str | None] = {}
        released: set[str] = set()
        for key, failure in self._ended.items():
            released.add(key)
            if key in self._expired:
                self._expired.discard(key)
            else:
                del self._deadlines[key], self._latest[key]
                self._given_up.pop(key, None)
                reported[key] = failure
        self._ended.clear()
        now = self._clock()
        over = {k: _expired(now - deadline) for k, deadline in self._deadlines.items() if deadline <= now}
        for key, why in {**over, **self._given_up}.items():
            del self._deadlines[key], self._latest[key]
            self._expired.add(key)
            reported[key] = why
        self._given_up.clear()
        return SettledLoads(reported, released)


def _expired(late_seconds: float) -> str:
    """Return the reason for the failure of a load whose deadline passed so many seconds ago."""
    if late_seconds < LATE_SECONDS:
        return "its deadline passed"
    return (
        f"its deadline passed {late_seconds:.1f} s ago, and the engine made no step since: was the process "
        "or the machine stopped, or are there more busy processes than cores?"
    )
