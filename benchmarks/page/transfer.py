"""What `kvferry bench transfer` contributes to the page of benchmarks."""

from __future__ import annotations

from typing import Any

from benchmarks.page.figures import Comparison, Summary, format_ratio
from kvferry.common.units import format_bytes, format_seconds
from kvferry.tools.bench.transfer import SAME_DESCRIPTORS
from kvferry.tools.measuring.rounds import Spread
from kvferry.transport.costs import TransferSettings


def summary(document: Any) -> Summary:
    """Return the speed of a request, compared with raw NIXL and memcpy.

    Args:
        document: what the command prints with ``--json``.
    """
    others = [one["name"] for one in document["comparison"]["others"]]
    ratios = {name: Spread(**document["kvferry_as_multiple_of"][name]) for name in others}
    pages = document["blocks"] * document["layers"]
    label = (
        f"{document['geometry']}, {document['tokens']:,} tokens in {document['order']} blocks, "
        f"{format_bytes(pages * document['page_bytes'])}"
    )
    names = "planning", "reading", "lease check", "hand-over and acknowledgement"
    stages = zip(names, map(format_seconds, document["comparison"]["stages"]), strict=True)
    closest = format_ratio(ratios[others[SAME_DESCRIPTORS]])
    return Summary(
        answer=f"KV moves at {closest} of raw NIXL's speed with the same descriptors. "
        f"kvferry has {TransferSettings().lanes} lanes (threads), raw NIXL one.",
        comparisons=tuple(
            Comparison(
                label=label,
                against=name.partition(") ")[2],
                ours=_speed(document, "kvferry"),
                theirs=_speed(document, name),
                ratio=ratio,
            )
            for name, ratio in ratios.items()
        ),
        low_is_good=False,
        notes=(
            "memcpy has one thread, too.",
            f"kvferry's time: {', '.join(' '.join(stage) for stage in stages)}.",
        ),
    )


def _speed(document: Any, name: str) -> str:
    return f"{document['gigabytes_per_second'][name]['median']:.2f} GB/s"
