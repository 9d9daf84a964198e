"""The loads of one rank, from their first part until nothing of them is in flight any more.

A load is carried out in parts, as its KV becomes available. It ends twice: for its request and for its
memory. When its deadline passes, it is reported as failed and the request goes on without it. But its KV
blocks belong to the parts in flight, however long they take.

    OPEN ─last part begun─▶ WHOLE ────┐
      ├─a part fails, no more come─▶ FAILING ─no part in flight─▶ READY or FAILED  (reported; memory free)
      └─any of them: deadline, or given up─▶ EXPIRED ─no part in flight─▶ RELEASED
                                      (reported; memory still held)       (memory free)

Only an OPEN load takes parts: blocks of the others may belong to other requests soon. A load is given up when
it has become useless, for example because the load of another part of the same prefix has failed. Each load
is reported exactly once, and released exactly once.

A step that computes nothing waits for the first load to end, since the engine would only sleep and look
again. It then waits for others if that is expected to pay. A step of a few tokens takes about as long for one
request as for many. If the engine computes at once, the requests whose loads are missing get their first
tokens one step later than those whose loads have ended. If it waits, all requests are late by the wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from kvferry.connector.bids import Speeds
from kvferry.connector.messages import Load, LoadPart
from kvferry.transport.read_plan import NO_FIGURES, Report

# A peer that computes without end must not hold a request for ever.
MOST_TIMEOUTS = 20
"""Maximum time of a load whose KV a peer still computes, as a multiple of its timeout."""

LATE_SECONDS = 5.0
"""A load's failure says if `Loads.settle`, which steps call, was called so long after the deadline."""

# A request that arrives meanwhile is delayed by the wait.
IDLE_WAIT_SECONDS = 0.003
"""Maximum seconds that a step of an idle engine waits for a load under way to end."""

MOST_STEP_SECONDS = 0.020
"""Maximum time of a step that the wait is compared with, in case a few steps took unusually long."""


def saved_seconds(step_seconds: float, ended: int, missing: int) -> float:
    """Return how much sooner requests get their first tokens, on average, if one step computes all of them.

    Otherwise one step computes the requests whose loads have `ended`, the next one those whose loads are
    `missing`.

    >>> saved_seconds(0.016, ended=1, missing=7)
    0.014
    """
    return step_seconds * missing / (ended + missing)


@dataclass(frozen=True, slots=True)
class SettledLoad:
    """A load whose result is known, or whose memory is free, since the last call of `Loads.settle`."""

    load: Load
    report: Report | None  # None if it was reported before, and no part is in flight any more
    served: bool | None = None  # with the last report of an attempt: whether all its loads have succeeded


@dataclass(slots=True)
class _Running:
    """The state of a load that may still write to its blocks."""

    load: Load
    began: float  # seconds of the clock, as all times
    deadline: float  # the load is then reported as failed
    latest: float  # the deadline is not moved beyond it
    expected: float  # when the load is expected to end; infinite while its peer computes
    in_flight: int = 0  # parts that have begun and not ended
    whole: bool = False
    # Merged report of the parts that have ended. Its failure may also say why no more will come.
    parts: Report = field(default_factory=Report)
    given_up: str | None = None  # why the load is of no use any more
    void: str | None = None  # why the load has failed even if all its parts arrive
    reported: bool = False

    @property
    def is_open(self) -> bool:
        return not (self.whole or self.reported or self.parts.failure is not None or self.void)

    @property
    def has_landed(self) -> bool:
        return not (self.in_flight or self.is_open)

    @property
    def is_awaited(self) -> bool:
        """Whether the result of a part is still to come, and the load is not decided yet."""
        # A peer that computes may grant the next part at any time. The scheduler half waits for chunks that
        # are read from storage.
        coming = self.in_flight > 0 or (self.is_open and self.load.bid.growing)
        return coming and not (self.reported or self.void or self.given_up)


class Loads:
    """The loads of one worker that may still write to their blocks. Only the engine's thread calls it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._speeds = clock, Speeds(clock)
        self._loads: dict[str, _Running] = {}
        self._parts: dict[str, _Running] = {}
        self._attempts: dict[str, list[bool]] = {}  # success of the reported loads of each
        # Times when the loads that `settle` will report have ended, the earliest first.
        self._ends: list[float] = []

    def __len__(self) -> int:
        return len(self._loads)

    def wait_until(self, began: float, step_seconds: float) -> float | None:
        """Return the time until which a step that computes nothing waits for the next load to end.

        After the first load, the step waits in all at most as long as a step takes, and for each further load
        at most as long as all loads that are expected to end meanwhile save. None if no load is awaited.

        Args:
            began: time when the step began to wait.
            step_seconds: time of a step that computes a few tokens; 0 if unknown.
        """
        awaited = [one for one in self._loads.values() if one.is_awaited]
        if not awaited:
            return None
        if not self._ends:
            return began + IDLE_WAIT_SECONDS
        step_seconds = min(step_seconds, MOST_STEP_SECONDS)
        ended, last, missing = len(self._ends), self._ends[-1], 0
        # A load whose next part its peer has not computed yet is not waited for.
        expected = [one.expected for one in awaited if one.whole]
        latest = last + saved_seconds(step_seconds, ended, len(expected))
        for end in expected:
            missing += end <= latest
        return min(last + saved_seconds(step_seconds, ended, missing), self._ends[0] + step_seconds)

    def begin(self, load: Load) -> None:
        """Add a load. It has no parts yet, and its timeout begins now."""
        if load.key in self._loads:
            raise ValueError(f"load {load.key!r} has begun already")
        now, expected = self._clock(), 0.0
        for part in load.bid.parts:
            expected = max(expected, self._speeds.load_seconds(part.place, part.tokens))
        self._loads[load.key] = _Running(
            load,
            began=now,
            deadline=now + load.timeout_seconds,
            latest=now + MOST_TIMEOUTS * load.timeout_seconds,
            expected=math.inf if load.bid.growing else now + expected,
        )

    def add(self, part: LoadPart) -> Load | None:
        """Add the next part of a load. Return the load if the part must be begun now; else None."""
        one = self._loads.get(part.load)
        # Blocks of a load that has ended may belong to another request soon, so it takes no more parts.
        if one is None or not one.is_open:
            return None
        one.whole = part.last
        if part.failure is not None:
            one.parts = replace(one.parts, failure=part.failure)
        # A part shows that the peer has computed more, so a slow prompt is no reason to give up. `latest` is
        # the bound.
        if one.load.bid.growing and part.failure is None:
            one.deadline = min(self._clock() + one.load.timeout_seconds, one.latest)
        if part.work is None:
            if one.has_landed:
                self._on_landed(one, timed=False)
            return None
        one.in_flight += 1
        self._parts[part.work.key] = one
        return one.load

    def on_part_ended(self, key: str, report: Report, *, timed: bool = False) -> None:
        """Record that nothing of a part, which may be none of a load, is in flight any more.

        `timed` is True if the part has ended just now.
        """
        if (one := self._parts.pop(key, None)) is None:
            return
        one.in_flight -= 1
        one.parts = one.parts.with_next(report)
        if one.has_landed and not one.reported:
            self._on_landed(one, timed=timed)

    def _on_landed(self, one: _Running, *, timed: bool) -> None:
        now, load = self._clock(), one.load
        self._ends.append(now)
        # A load that has ended while the engine computed, without a wait for it, was faster than it seems.
        if timed and one.parts.failure is None and load.loads == 1 and not load.bid.growing:
            self._speeds.record_load(load.bid.parts, now - one.began)

    def give_up(self, key: str, why: str) -> None:
        """Report a load as failed, unless all its parts have arrived."""
        if (one := self._loads.get(key)) is not None:
            one.given_up = one.given_up or why

    def invalidate(self, why: str, keys: Iterable[str] | None = None) -> None:
        """Report these loads, or all, as failed, even if their KV arrives."""
        for key in self._loads if keys is None else keys:
            if (one := self._loads.get(key)) is not None:
                one.void = one.void or why

    def settle(self) -> list[SettledLoad]:
        """Return the loads that have ended, been given up or passed their deadline since the last call."""
        now, found = self._clock(), []
        self._ends.clear()
        for one in list(self._loads.values()):
            # Asked before the deadline: a load that has arrived in full is of use, however late this is
            # noticed.
            landed = one.has_landed
            failure = one.void or (one.parts.failure if landed else one.given_up)
            if landed:
                del self._loads[one.load.key]
            elif failure is None and one.deadline <= now:
                failure = _expired(now - one.deadline)
            elif one.expected <= now:
                # Such a load is then waited for again, and again in vain, only a few times.
                one.expected = now + (now - one.began)
            if one.reported:
                if landed:
                    found.append(SettledLoad(one.load, None))
            elif landed or failure is not None:
                one.reported = True
                report = replace(one.parts, failure=failure)
                if not landed:
                    # Parts are still in flight, so the figures are not known yet.
                    report = replace(report, figures=NO_FIGURES, late=1)
                results = self._attempts.setdefault(one.load.attempt, [])
                results.append(failure is None)
                served = None
                if len(results) == one.load.loads:
                    served = all(self._attempts.pop(one.load.attempt))
                found.append(SettledLoad(one.load, report, served))
        return found


def _expired(late_seconds: float) -> str:
    if late_seconds < LATE_SECONDS:
        return "its deadline passed"
    return (
        f"its deadline passed {late_seconds:.1f} s ago, and the engine made no step since: was the process "
        "or the machine stopped, or are there more busy processes than cores?"
    )
