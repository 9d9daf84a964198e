"""Counts of the choice between children, for the engine's /metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

Count = tuple[str, str, str]
"""(metric, child, outcome or nothing) of something that is counted."""


@dataclass(slots=True)
class Counts:
    """Counts of events since the last call of `take`.

    Attributes:
        more: increments of counters.
        pending: current loads under way per child.
    """

    more: Counter[Count] = field(default_factory=Counter)
    pending: Counter[str] = field(default_factory=Counter)

    def admitted(self, answers: Iterable[tuple[str, int | None]], loader: str | None, tokens: int) -> None:
        """Count an admission.

        Args:
            answers: each child with the tokens that it had; None for a child that was still looking.
            loader: the child that loads; None without one.
            tokens: number of tokens that it loads.
        """
        for name, answer in answers:
            self.more["queries", name, ""] += 1
            if name == loader:
                self.more["hits", name, ""] += 1
                self.more["hit_tokens", name, ""] += tokens
            elif answer:
                self.more["passed_over", name, ""] += 1
            else:
                self.more["misses", name, ""] += 1

    def ended(self, name: str, *, succeeded: bool) -> None:
        """Count the end of a child's load."""
        self.more["loads", name, "ready" if succeeded else "failed"] += 1

    def take(self) -> Counter[Count]:
        """Return the increments and begin new ones."""
        taken, self.more = self.more, Counter()
        return taken
