"""Counters of how often each child is chosen and how its loads end, for the engine's /metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

Count = tuple[str, str, str]
"""Labels of a counter: (metric, name of the child, outcome). The outcome is empty for metrics without one."""


@dataclass(slots=True)
class Counts:
    """Counts of how often each child connector is chosen, and of how its loads end.

    Attributes:
        increments: increment of each counter since the last call of `take`, by (metric, name of the child,
            outcome). The outcome is empty for metrics that have no label for it.
        pending: number of asynchronous loads in flight, by name of the child; not cleared by `take`.
    """

    increments: Counter[Count] = field(default_factory=Counter)
    pending: Counter[str] = field(default_factory=Counter)

    def admitted(self, answers: Iterable[tuple[str, int | None]], loader: str | None, tokens: int) -> None:
        """Count the admission of a request for each child connector, as a hit, a miss or a passed-over offer.

        The child that loads the request has a hit. Any other child has a passed-over offer if it offered
        tokens, and a miss otherwise.

        Args:
            answers: (name, number of tokens offered) of each child. The number is None for a child that was
                still looking for KV.
            loader: name of the child that loads the request; None if no child does.
            tokens: number of tokens that the loader loads.
        """
        for name, answer in answers:
            self.increments["queries", name, ""] += 1
            if name == loader:
                self.increments["hits", name, ""] += 1
                self.increments["hit_tokens", name, ""] += tokens
            elif answer:
                self.increments["passed_over", name, ""] += 1
            else:
                self.increments["misses", name, ""] += 1

    def ended(self, name: str, *, succeeded: bool, late: bool = False) -> None:
        """Count the end of a load for the child connector of this name.

        Args:
            name: name of the child.
            succeeded: True if the KV was loaded.
            late: True if the request goes on without the load, because the child has not ended it in time.
        """
        self.increments["loads", name, "expired" if late else "ready" if succeeded else "failed"] += 1

    def take(self) -> Counter[Count]:
        """Return the increments of all counters since the last call, and clear these increments."""
        taken, self.increments = self.increments, Counter()
        return taken
