"""Draw plots with matplotlib, and write them as SVG pictures that are equal for equal figures."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

LINE = "#24303a"
"""Colour of ranges and of the line that bars are compared with."""

_STYLE: Any = {
    "svg.hashsalt": "kvferry",  # else ids in the file are random
    "svg.fonttype": "none",  # text instead of outlines: small files, and text can be searched
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "grid.color": "#e6eaed",
}


def svg(width: float, height: float, draw: Callable[[Figure], None]) -> str:
    """Return the text of an SVG picture on a white background.

    Args:
        width, height: size in inches.
        draw: function that draws into a figure.
    """
    with rc_context(_STYLE):
        figure = Figure(figsize=(width, height), facecolor="white")
        draw(figure)
        out = io.StringIO()
        figure.savefig(out, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    return out.getvalue()
