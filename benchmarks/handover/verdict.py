"""Decide whether the rounds of two connectors can be compared, and how each of them ran."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.conditions import Conditions
from kvferry.common.units import format_seconds
from kvferry.tools.measuring.rounds import Spread

LEAST_QUIET = 3
"""Number of rounds in which the machine must be quiet for both sides, unless fewer were measured."""

STALL_SECONDS, STALL_FACTOR = 1.0, 5.0
"""A wait is a stall if it is longer than a second and than this multiple of the shortest one."""


class Times(Protocol):
    """The times of one round."""

    @property
    def wait(self) -> float:
        """The longest wait of a request for a token, in seconds."""

    @property
    def conditions(self) -> Conditions:
        """The load of the machine around the round."""


@dataclass(frozen=True, slots=True)
class Runs:
    """How one connector's rounds ran.

    Attributes:
        rounds: number of rounds.
        quiet: for each round, whether the machine was quiet.
        stalls: lengths of the longest waits of rounds that stalled, in seconds.
        others: share of the machine that other processes took, over the rounds.
        stolen: share that the hypervisor took.
    """

    rounds: int
    quiet: tuple[bool, ...]
    stalls: tuple[float, ...]
    others: Spread
    stolen: Spread

    @property
    def stalled(self) -> str:
        """How often and how long the connector stalled; empty if it did not."""
        if not self.stalls:
            return ""
        return (
            f"stalled in {len(self.stalls)} of {self.rounds} rounds, up to {format_seconds(max(self.stalls))}"
        )


def runs_of(by_name: Mapping[str, Sequence[Times]]) -> dict[str, Runs]:
    """Return how each connector's rounds of the same work ran.

    Args:
        by_name: times of the rounds, by connector.
    """
    shortest = min(one.wait for times in by_name.values() for one in times)
    limit = max(STALL_SECONDS, STALL_FACTOR * shortest)
    return {
        name: Runs(
            rounds=len(times),
            quiet=tuple(one.conditions.quiet for one in times),
            stalls=tuple(one.wait for one in times if one.wait > limit),
            others=Spread.of([max(one.conditions.before, one.conditions.during) for one in times]),
            stolen=Spread.of([one.conditions.stolen for one in times]),
        )
        for name, times in by_name.items()
    }


@dataclass(frozen=True, slots=True)
class Verdict:
    """The comparison of kvferry with another connector.

    Attributes:
        ratio: kvferry's figure divided by the other's, over the rounds in which the machine was quiet for
            both; None if the two cannot be compared.
        reason: why there is no ratio; otherwise empty.
        rounds: numbers of the rounds that `ratio` is of.
    """

    ratio: Spread | None
    reason: str = ""
    rounds: tuple[int, ...] = ()


def compare(
    by_name: Mapping[str, Sequence[Any]],
    other: str,
    figure: Callable[[Any], float],
    *,
    needs_quiet: bool = True,
) -> Verdict:
    """Compare kvferry's rounds with those of another connector that did the same work.

    Args:
        by_name: times of the rounds, by connector, the same number for each.
        other: name of the other connector.
        figure: function that returns the figure to compare, given the times of a round.
        needs_quiet: True to leave out rounds in which the machine was busy with other work.
    """
    runs = runs_of(by_name)
    ours, theirs = runs["kvferry"], runs[other]
    if stalls := [
        f"{name} {one.stalled}" for name, one in (("kvferry", ours), (other, theirs)) if one.stalls
    ]:
        return Verdict(None, "; ".join(stalls))
    quiet = enumerate(zip(ours.quiet, theirs.quiet, strict=True))
    rounds = [number for number, both in quiet if all(both) or not needs_quiet]
    if len(rounds) < min(LEAST_QUIET, ours.rounds):
        busy = ours.rounds - len(rounds)
        return Verdict(None, f"the machine was busy in {busy} of {ours.rounds} rounds")
    pairs = [(figure(by_name["kvferry"][number]), figure(by_name[other][number])) for number in rounds]
    return Verdict(Spread.of([a / b for a, b in pairs]), rounds=tuple(rounds))
