"""What `benchmarks startup` contributes to the page of benchmarks."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.page.figures import Comparison, Summary
from benchmarks.startup.variants import NIXL, NONE, PEERS, TIERS
from kvferry.tools.measuring.rounds import Spread

_LABELS = {PEERS: "start with kvferry, peers only", TIERS: "start with kvferry, host and file tier"}


def summary(document: Any) -> Summary:
    """Return the summary of what the command prints with ``--json``."""
    rounds = document["rounds"]
    added = {
        name: Spread.of([one[name]["seconds"] - one[NONE]["seconds"] for one in rounds])
        for name in (NIXL, PEERS, TIERS)
    }
    return Summary(
        answer=(
            f"kvferry adds {_range(added[PEERS])} s to an engine's start if it exchanges KV with peers, and "
            f"{_range(added[TIERS])} s with a host tier of 1 GiB and a file tier. NixlConnector adds "
            f"{_range(added[NIXL])} s."
        ),
        comparisons=tuple(
            _comparison(rounds, name, other) for name in (PEERS, TIERS) for other in (NONE, NIXL)
        ),
        low_is_good=True,
        notes=(_imports(rounds), _stops(rounds), _memory(rounds)),
    )


def _comparison(rounds: Any, name: str, other: str) -> Comparison:
    ours, theirs = ([one[each]["seconds"] for one in rounds] for each in (name, other))
    return Comparison(
        label=_LABELS[name],
        against=other,
        ours=f"{median(ours):.2f} s",
        theirs=f"{median(theirs):.2f} s",
        ratio=Spread.of([a / b for a, b in zip(ours, theirs, strict=True)]),
    )


def _range(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f})"


def _imports(rounds: Any) -> str:
    said = (
        f"{median(one[name]['ready']['import_seconds'] for one in rounds):.2f} s ({name})"
        for name in (NIXL, PEERS)
    )
    return f"Of the start, the import of the connector's modules takes {' and '.join(said)}."


def _stops(rounds: Any) -> str:
    said = (
        f"{median(one[name]['stop_seconds'] for one in rounds):.2f} s ({name})"
        for name in (NONE, NIXL, PEERS, TIERS)
    )
    return f"The stop takes {', '.join(said)}."


def _memory(rounds: Any) -> str:
    said = (f"{_more_mib(rounds, name):,.0f} MiB ({name})" for name in (NIXL, PEERS, TIERS))
    return f"More proportional memory (PSS) than without a connector: {', '.join(said)}."


def _more_mib(rounds: Any, name: str) -> float:
    pss = [{each: one[each]["ready"]["pss_bytes"] for each in (name, NONE)} for one in rounds]
    return float(median(one[name] - one[NONE] for one in pss)) / (1 << 20)
