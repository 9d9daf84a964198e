"""What `benchmarks turns` contributes to the page of benchmarks."""

from __future__ import annotations

from typing import Any

from benchmarks.page.figures import Comparison, Summary, format_range
from kvferry.common.units import format_bytes
from kvferry.tools.measuring.rounds import Spread


def summary(document: Any) -> Summary:
    """Return the bytes that turns read with shared attention blocks, compared with those without.

    Args:
        document: what the command prints with ``--json``.
    """
    comparisons = []
    for one in document:
        ours, theirs = (_bytes(one[name]) for name in ("shared", "without"))
        comparisons.append(
            Comparison(
                label=f"{one['family']}, turns 2 to {len(one['shared'])}",
                against="without sharing",
                ours=f"{format_bytes(Spread.of(ours).median)} a turn",
                theirs=f"{format_bytes(Spread.of(theirs).median)} a turn",
                ratio=Spread.of([a / b for a, b in zip(ours, theirs, strict=True)]),
            )
        )
    medians = [one.ratio.median for one in comparisons if one.ratio is not None]
    return Summary(
        answer=f"A later turn reads {format_range(medians)} of its bytes without shared attention blocks.",
        comparisons=tuple(comparisons),
        low_is_good=True,
        notes=(
            "The range is that of the turns. Bytes do not depend on the machine.",
            "Most tokens that a turn reads again: "
            + ", ".join(
                f"{one['family']} {one['most_again']} (blocks of {one['block_tokens']})" for one in document
            )
            + ".",
        ),
    )


def _bytes(loads: Any) -> list[float]:
    return [float(sum(load["bytes_by_group"].values())) for load in loads[1:]]
