"""The values of a campaign: kinds of faults, faults to inject, and what became of them.

plan ─▶ Fault ─injected into running engines─▶ Trial ─judged─▶ Verdict ─counted─▶ Totals
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any


class Area(StrEnum):
    """The side a fault comes from."""

    CLIENT = "API clients"
    TRANSFER = "reads and leases"
    NETWORK = "network and peers"
    STORAGE = "file tier"
    FLEET = "host memory of other engines"
    ENGINE = "engines"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault.

    Attributes:
        name: unique, a few words.
        area: side it comes from.
        says: what happens, a sentence for the report.
        trial: coroutine function of a pair and a `Fault` that injects it and returns a `Trial`.
        together: most faults of a round that contains this kind; 1 for a fault of a whole engine.
        share: relative frequency in a plan.
        protections: names of the protections that this kind catches the lack of.
        families: whose engines it needs; any if empty.
    """

    name: str
    area: Area
    says: str
    trial: Callable[[Any, Fault], Any]
    together: int = 16
    share: float = 10
    protections: tuple[str, ...] = ()
    families: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fault:
    """One entry of a plan.

    Attributes:
        number: position in the plan.
        kind: name of its `Kind`.
        family: of the engines it meets.
        seed: decides all that the trial draws.
    """

    number: int
    kind: str
    family: str
    seed: int


@dataclass(slots=True)
class Trial:
    """What was seen of one fault.

    Attributes:
        injected: evidence from the injected side that the fault took place; empty if it did not.
        detected: evidence that kvferry noticed; empty if it did not.
        wrong: sentences about answers that are not the single engine's.
        stuck: sentences about requests that did not end.
        forbidden: sentences about what a protection is there to prevent, and what happened all the same.
        answers: right answers.
        told: what the engines said of its requests; shown where nothing was noticed and nothing is wrong.
    """

    injected: str = ""
    detected: str = ""
    wrong: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    forbidden: list[str] = field(default_factory=list)
    answers: int = 0
    told: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A fault that was tried, judged.

    Attributes:
        fault: the entry of the plan.
        injected, detected: whether there is evidence.
        recovered: every request of the trial ended with the right answer, and nothing forbidden happened.
        wrong, stuck: how many answers and requests.
        note: evidence, or what went wrong.
    """

    fault: Fault
    injected: bool
    detected: bool
    recovered: bool
    wrong: int
    stuck: int
    forbidden: int
    note: str

    @property
    def bad(self) -> bool:
        """Whether anything went wrong, and not only unnoticed."""
        return bool(self.wrong or self.stuck or self.forbidden)


@dataclass(frozen=True, slots=True)
class Leaks:
    """What is left when everything has ended, or died on the way.

    Attributes:
        engine_deaths: engines that ended and were not killed by the campaign.
        blocks: blocks of all engines that are neither free nor cached for anyone.
        shared_memory: names under /dev/shm that were not there before.
        files: files that no chunk, ledger or note accounts for.
        notes: what they are.
    """

    engine_deaths: int = 0
    blocks: int = 0
    shared_memory: int = 0
    files: int = 0
    notes: tuple[str, ...] = ()

    def __add__(self, other: Leaks) -> Leaks:
        return Leaks(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(Leaks)))


def judged(fault: Fault, trial: Trial) -> Verdict:
    """Judge what was seen of a fault.

    >>> judged(Fault(0, "x", "qwen3", 1), Trial("3 bytes changed", "", answers=1)).detected
    False
    """
    bad = [*trial.wrong, *trial.stuck, *trial.forbidden]
    recovered = bool(trial.answers) and not bad
    unnoticed = "" if trial.detected or bad else " ".join(trial.told)
    note = "; ".join(filter(None, [*bad, trial.injected, trial.detected, unnoticed]))
    return Verdict(
        fault,
        bool(trial.injected),
        bool(trial.detected),
        recovered,
        len(trial.wrong),
        len(trial.stuck),
        len(trial.forbidden),
        note,
    )


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over verdicts and leaks; `problems` is empty if nothing went wrong."""

    faults: int
    injected: int
    detected: int
    recovered: int
    wrong: int
    stuck: int
    leaks: Leaks

    @property
    def zeros(self) -> dict[str, int]:
        """The six counts that must be 0."""
        return {
            "wrong outputs": self.wrong,
            "stuck requests": self.stuck,
            "engine deaths": self.leaks.engine_deaths,
            "leaked blocks": self.leaks.blocks,
            "leaked shared memory": self.leaks.shared_memory,
            "leaked files": self.leaks.files,
        }

    @property
    def problems(self) -> list[str]:
        """Everything that must not be."""
        found = [f"{count} {name}" for name, count in self.zeros.items() if count]
        seen = {name: getattr(self, name) for name in ("injected", "detected", "recovered")}
        found += [
            f"{self.faults - count} of {self.faults} faults not {name}"
            for name, count in seen.items()
            if count < self.faults
        ]
        return found


def totals(verdicts: Iterable[Verdict], leaks: Leaks) -> Totals:
    """Count verdicts."""
    all_of = list(verdicts)
    return Totals(
        len(all_of),
        sum(one.injected for one in all_of),
        sum(one.detected for one in all_of),
        sum(one.recovered for one in all_of),
        sum(one.wrong for one in all_of),
        sum(one.stuck for one in all_of),
        leaks,
    )
