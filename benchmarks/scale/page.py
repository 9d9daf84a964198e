"""What `benchmarks scale` contributes to the page of benchmarks."""

from __future__ import annotations

from typing import Any

from benchmarks.page.figures import Comparison, Summary
from benchmarks.scale.result import figure_text
from kvferry.tools.measuring.rounds import Spread

_GROWS = 2.0
"""Ratio above which a figure per unit counts as growing."""


def summary(document: Any) -> Summary:
    """Return the figures per unit of the largest number of units, compared with the smallest number.

    Args:
        document: what `python -m benchmarks scale --json` prints.
    """
    rows = [_comparison(case, one) for case in document["cases"] for one in case["measures"]]
    growing = [row for row in rows if row.ratio is not None and row.ratio.median > _GROWS]
    most = max((row.ratio.median for row in rows if row.ratio is not None), default=0.0)
    sizes = ", ".join(
        f"from {case['sizes'][0]:,} to {case['sizes'][-1]:,} {case['noun']}" for case in document["cases"]
    )
    return Summary(
        answer=(
            f"{len(rows) - len(growing)} of {len(rows)} figures per unit stay below {_GROWS:g} times as much "
            f"{sizes}. The largest ratio is {most:.2f}."
        ),
        comparisons=tuple(rows),
        low_is_good=True,
        notes=tuple(
            f"{row.label}: {row.ours}, {row.ratio.median:.2f} times as much as with {row.against}."
            for row in growing
            if row.ratio is not None
        ),
    )


def _comparison(case: Any, one: Any) -> Comparison:
    first, last = case["sizes"][0], case["sizes"][-1]
    ours, theirs = (
        f"{figure_text(one['figures'][at]['median'], one['unit'])} per {one['per']}" for at in (-1, 0)
    )
    return Comparison(
        label=one["label"].format(n=f"{last:,}"),
        against=f"{first:,} {case['noun']}",
        ours=ours,
        theirs=theirs,
        ratio=Spread(**one["ratios"][-1]),
    )
