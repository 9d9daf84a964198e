"""What `benchmarks router` contributes to the page of benchmarks."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.page.figures import Comparison, Summary, format_ratio
from kvferry.tools.measuring.rounds import Spread

_KINDS = {"whole": "an answer as a whole", "stream": "a streamed answer"}


def summary(document: Any) -> Summary:
    """Return the summary of what the command prints with ``--json``.

    Without `vllm-router` on the machine there are no ratios, and so no comparisons.
    """
    ratios = {kind: Spread(**ratio) for kind, ratio in document["ratios"].items()}
    said = " and ".join(
        f"{format_ratio(ratios[kind])} for {_KINDS[kind]}" for kind in _KINDS if kind in ratios
    )
    return Summary(
        answer=(
            f"kvferry's router takes {said} of the CPU time of vllm-router, per request."
            if ratios
            else "vllm-router is not installed, so nothing was compared."
        ),
        comparisons=tuple(_comparison(document, kind, ratio) for kind, ratio in ratios.items()),
        low_is_good=True,
    )


def _comparison(document: Any, kind: str, ratio: Spread) -> Comparison:
    times = {
        one["router"]: median(one["milliseconds"])
        for one in document["cpu"]
        if one["stream"] is (kind == "stream")
    }
    return Comparison(
        label=_KINDS[kind],
        against="vllm-router",
        ours=f"{times['kvferry']:.2f} ms",
        theirs=f"{times['vllm-router']:.2f} ms",
        ratio=ratio,
    )
