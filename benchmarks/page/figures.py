"""What a benchmark contributes to the page: an answer, and a comparison for each row of its table.

Each benchmark has a module `page` with a function ``summary(document)``. Its argument is what the benchmark
prints with ``--json``. It returns a `Summary`.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.tools.measuring.rounds import Spread

CLEARLY_BEHIND = 1.1
"""A median that is worse than 1 by more than this factor is behind, however wide its range is."""


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

    def is_behind(self, ratio: Spread | None) -> bool:
        """Return whether kvferry is behind: every round is worse than 1, or the median is clearly worse.

        Args:
            ratio: ratio of one of the comparisons.
        """
        if ratio is None:
            return False
        if self.low_is_good:
            return ratio.low > 1 or ratio.median > CLEARLY_BEHIND
        return ratio.high < 1 or ratio.median < 1 / CLEARLY_BEHIND


def format_ratio(spread: Spread) -> str:
    """Format a ratio's median with its range.

    >>> format_ratio(Spread(0.951, 0.9, 1.333)), format_ratio(Spread(0.0123, 0.0099, 0.2))
    ('0.95 (0.90-1.33)', '0.012 (0.0099-0.20)')
    """
    low, median, high = map(_number, (spread.low, spread.median, spread.high))
    return f"{median} ({low}-{high})"


def format_range(ratios: list[float]) -> str:
    """Format the lowest and the highest of several ratios.

    >>> format_range([1.02, 0.85, 0.9]), format_range([0.5])
    ('0.85 to 1.02', '0.50')

    Args:
        ratios: at least one ratio.
    """
    return " to ".join(dict.fromkeys((_number(min(ratios)), _number(max(ratios)))))


def _number(value: float) -> str:
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}"
