"""What `benchmarks streaming` contributes to the page of benchmarks."""

from __future__ import annotations

from typing import Any

from benchmarks.page.figures import Comparison, Summary, format_range
from kvferry.common.units import format_bytes, format_seconds
from kvferry.tools.measuring.rounds import Spread


def summary(document: Any) -> Summary:
    """Return the times to the first token of streamed hand-overs, compared with those at the end.

    Args:
        document: what the command prints with ``--json``.
    """
    requests = document["requests"]
    comparisons, left = [], []
    medians: dict[str, list[float]] = {}
    for gigabits, tokens in dict.fromkeys((one["gigabits"], one["tokens"]) for one in requests):
        link = f"{gigabits:g} Gbit/s" if gigabits else "no limit"
        here = [one for one in requests if (one["gigabits"], one["tokens"]) == (gigabits, tokens)]
        after, during = ([one for one in here if one["streamed"] is streamed] for streamed in (False, True))
        ratio = Spread.of([b["seconds"] / a["seconds"] for a, b in zip(after, during, strict=True)])
        medians.setdefault(link, []).append(ratio.median)
        size = format_bytes(tokens * document["kv_bytes_per_token"])
        label = f"{link}, {tokens:,} tokens, {size}"
        comparisons.append(
            Comparison(
                label=label,
                against="hand-over at the end",
                ours=_median(during, "seconds"),
                theirs=_median(after, "seconds"),
                ratio=ratio,
            )
        )
        left.append(f"{label}: {_median(during, 'left_seconds')}, not {_median(after, 'left_seconds')}")
    found = ", ".join(f"{link}: {format_range(each)}" for link, each in medians.items())
    return Summary(
        answer=f"Time to first token, streamed, as a share of that with a hand-over at the end: {found}.",
        comparisons=tuple(comparisons),
        low_is_good=True,
        notes=("Time that is left after the prefill: " + "; ".join(left) + ".",),
    )


def _median(requests: list[Any], key: str) -> str:
    return format_seconds(Spread.of([one[key] for one in requests]).median)
