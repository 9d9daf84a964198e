"""What `benchmarks steps` contributes to the page of benchmarks."""

from __future__ import annotations

from typing import Any

from benchmarks.page.figures import Comparison, Summary, format_ratio
from benchmarks.steps.report import medians, own_seconds
from kvferry.common.units import format_seconds
from kvferry.tools.measuring.rounds import Spread


def summary(document: Any) -> Summary:
    """Return the time in kvferry's hooks, compared with that in NixlConnector's.

    Args:
        document: what the command prints with ``--json``.
    """
    own = own_seconds(document)
    ratios = {
        name: Spread.of([ours / theirs for ours, theirs in zip(own[name], own["nixl"], strict=True)])
        for name in own
        if name.startswith("kvferry")
    }
    whole = {name: format_seconds(Spread.of(each).median) for name, each in medians(document).items()}
    ours = format_ratio(ratios["kvferry"])
    return Summary(
        answer=f"In a step that only decodes, kvferry's hooks take {ours} of the time of NixlConnector's.",
        comparisons=tuple(
            Comparison(
                label=f"{name}, hooks of a step",
                against="NixlConnector",
                ours=_median(own[name]),
                theirs=_median(own["nixl"]),
                ratio=ratio,
            )
            for name, ratio in ratios.items()
        ),
        low_is_good=True,
        notes=(
            "The time of a connector that does nothing is subtracted. Before that: "
            + ", ".join(f"{name} {text}" for name, text in whole.items())
            + ".",
        ),
    )


def _median(seconds: list[float]) -> str:
    return format_seconds(Spread.of(seconds).median)
