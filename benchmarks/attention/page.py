"""What `benchmarks attention` contributes to the page of benchmarks."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.attention.measure import DECODE, HANDOVER, MEASURES, PREFILL, TRANSFER
from benchmarks.attention.report import ratio
from benchmarks.cpu_layouts import CPU_LAYOUTS, PER_LAYER
from benchmarks.page.figures import Comparison, Summary
from kvferry.tools.measuring.rounds import Spread

_BEST = "BHLNC"
_CROSS_LAYER = tuple(layout for layout in CPU_LAYOUTS if layout != PER_LAYER)


def summary(document: Any) -> Summary:
    """Return the summary of what the command prints with ``--json``."""
    rounds = document["seconds"]
    decode, handover = (_range(ratio(rounds[name], _BEST)) for name in (DECODE, HANDOVER))
    titles = {
        DECODE: f"decode step, {document['requests']} requests of {document['context']:,} tokens",
        PREFILL: f"prefill of {document['prompt']:,} tokens",
        HANDOVER: f"first token after a hand-over of {document['prompt']:,} tokens",
        TRANSFER: f"READ of {document['prompt']:,} tokens in it",
    }
    return Summary(
        answer=(
            f"With the cross-layer layout {_BEST}, a decode step takes {decode} of its time with a per-layer "
            f"layout. The first token after a hand-over takes {handover} of its time."
        ),
        comparisons=tuple(
            _comparison(titles[name], rounds[name], layout) for name in MEASURES for layout in _CROSS_LAYER
        ),
        low_is_good=True,
        notes=("Engines with all layouts gave the same tokens, in float32.",),
    )


def _comparison(title: str, rounds: Any, layout: str) -> Comparison:
    ours, theirs = (median(one[each] for one in rounds) for each in (layout, PER_LAYER))
    return Comparison(
        label=f"{title}, {layout}",
        against=f"{PER_LAYER}, per layer",
        ours=f"{ours * 1e3:.2f} ms",
        theirs=f"{theirs * 1e3:.2f} ms",
        ratio=ratio(rounds, layout),
    )


def _range(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f})"
