"""The contribution of `benchmarks accuracy` to the page of benchmarks."""

from __future__ import annotations

from typing import Any

from benchmarks.page.figures import Summary


def summary(document: Any) -> Summary:
    """Return the scores and the number of equal answers. There is no ratio, so there are no comparisons.

    Args:
        document: what the command prints with ``--json``.
    """
    scores = ", ".join(
        f"{one['pair']['value']:.3f} and {one['single']['value']:.3f} by {name}"
        for name, one in document["scores"].items()
    )
    answer = (
        f"A prefill/decode pair and a single engine score {scores}; {document['same']} of "
        f"{document['count']} answers are the same text."
    )
    return Summary(answer=answer, comparisons=(), low_is_good=False, notes=tuple(document["failures"]))
