"""What a benchmark contributes to the page: an answer, and a comparison for each row of its table.

Each benchmark has a module `page` with a function ``summary(document)``. Its argument is what the benchmark
prints with ``--json``. It returns a `Summary`.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.measuring.spread import Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One row: what was done, and how kvferry did compared with a peer or a limit.

    Attributes:
        label: work that was done, with its size.
        against: name of the peer, or of the limit, or of kvferry's other setting.
        ours: kvferry's figure with its unit.
        theirs: the other figure with its unit, or the error if the other cannot do the work.
        ratio: kvferry's figure divided by the other one, computed round by round, with the range over the
            rounds; None if the other cannot do the work.
    """

    label: str
    against: str
    ours: str
    theirs: str
    ratio: Spread | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The result of one benchmark.

    Attributes:
        answer: one or two sentences with the most important figures.
        comparisons: rows of the table, and bars of the plot.
        low_is_good: True if a ratio below 1 is good, as for times; False for speeds.
        notes: further results, a sentence each.
    """

    answer: str
    comparisons: tuple[Comparison, ...]
    low_is_good: bool
    notes: tuple[str, ...] = ()
