"""What a soak has seen, and what of that must not be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from faults.growth import Sample, growing
from faults.traffic import Ask

SOURCES = tuple(
    f"{tier}, at the {role} engine" for role in ("prefill", "decode") for tier in ("peer", "host", "file")
)
"""Where tokens must have come from, or the soak has not tried it."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A right answer.

    Attributes:
        kind: of its request.
        at: seconds since the beginning, when it was complete.
        seconds: from the request to the last token.
    """

    kind: str
    at: float
    seconds: float


@dataclass
class Soak:
    """What is asked, what was answered, and what was seen of the engines.

    Attributes:
        scripts: requests that follow each other, with the single engine's answers.
        answers: right ones.
        left: clients that left in the middle of an answer that was right so far.
        wrong: sentences about answers that are not the single engine's.
        failed: sentences about requests without an answer.
        samples: of the engines and the router, in order, while nobody asks.
        held_at_rest: sentences about engines that held something while nobody asked.
        deaths: sentences about processes that ended.
        tokens: that engines did not compute, by where they had them from.
        loads: by how they ended.
    """

    scripts: Sequence[Sequence[tuple[Ask, list[str]]]]
    answers: list[Answered] = field(default_factory=list)
    left: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    held_at_rest: list[str] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)
    tokens: Counter[str] = field(default_factory=Counter)
    loads: Counter[str] = field(default_factory=Counter)


def problems(soak: Soak) -> list[str]:
    """Return everything that must not be."""
    untried = [f"no tokens came from {source}" for source in SOURCES if not soak.tokens[source]]
    return [
        *soak.deaths,
        *soak.wrong,
        *soak.failed,
        *soak.held_at_rest,
        *growing(soak.samples),
        *untried,
    ]
