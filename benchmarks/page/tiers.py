"""What `kvferry bench tiers` contributes to the page of benchmarks."""

from __future__ import annotations

from typing import Any

from benchmarks.page.figures import Comparison, Summary, format_range
from kvferry.common.units import format_bytes
from kvferry.tools.measuring.rounds import Spread


def summary(document: Any) -> Summary:
    """Return the speeds of tiers, compared with those of the same bytes without kvferry.

    Args:
        document: what the command prints with ``--json``.
    """
    speeds = document["speeds"]
    medians: dict[str, list[float]] = {}
    for one in speeds:
        medians.setdefault(one["tier"].partition(",")[0], []).append(one["ratio"]["median"])
    found = ", ".join(f"{tier}: {format_range(each)}" for tier, each in medians.items())
    return Summary(
        answer=f"Speed as a share of the limit, medians of all rows: {found}.",
        comparisons=tuple(
            Comparison(
                label=f"{one['tier']}, {one['direction']}, depth {one['depth']}",
                against=one["limit"],
                ours=_speed(one, "kvferry"),
                theirs=_speed(one, one["limit"]),
                ratio=Spread(**one["ratio"]),
            )
            for one in speeds
        ),
        low_is_good=False,
        notes=(
            f"Chunks have {document['chunk_tokens']} tokens, {format_bytes(document['chunk_bytes'])}.",
            "Depth: chunks in flight, or threads for host memory.",
            "A limit moves the same bytes without kvferry: contiguous memcpy, or direct I/O of whole files.",
        ),
    )


def _speed(one: Any, name: str) -> str:
    return f"{one['gigabytes_per_second'][name]['median']:.2f} GB/s"
