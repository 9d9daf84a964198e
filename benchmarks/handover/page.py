"""What `benchmarks handover` contributes to the page of benchmarks."""

from __future__ import annotations

from typing import Any

from benchmarks.handover.engine import Stamps
from benchmarks.handover.measure import Handover
from benchmarks.page.figures import Comparison, Summary, format_range
from kvferry.tools.measuring.rounds import Spread

_PEERS = {"nixl+": "nixl+", "nixl": "NixlConnector"}
"""Names of the peers on the page, by name of the connector. The closest peer is first."""


def summary(document: Any) -> Summary:
    """Return the times to the first token after a hand-over, compared with those of NixlConnector.

    Args:
        document: what the command prints with ``--json``.
    """
    comparisons = []
    medians: dict[str, list[float]] = {}
    differences: dict[str, list[float]] = {}
    for model, loads in document.items():
        for load in loads:
            times = {name: _seconds(rounds) for name, rounds in load["connectors"].items()}
            ours = times["kvferry"]
            for name in [one for one in _PEERS if one in times]:
                theirs = times[name]
                ratio = Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])
                medians.setdefault(name, []).append(ratio.median)
                difference = Spread.of([a - b for a, b in zip(ours, theirs, strict=True)]).median
                differences.setdefault(name, []).append(difference)
                comparisons.append(
                    Comparison(
                        label=f"{model}, {load['tokens']:,} tokens x {load['requests']}",
                        against=_PEERS[name],
                        ours=_milliseconds(ours),
                        theirs=_milliseconds(theirs),
                        ratio=ratio,
                    )
                )
    found = ", and ".join(
        f"{format_range(medians[name])} of {_PEERS[name]}'s ({_range_ms(differences[name])})"
        for name in medians
    )
    return Summary(
        answer=f"The time from a request's arrival at the decode engine to its first token is {found}.",
        comparisons=tuple(comparisons),
        low_is_good=True,
        notes=(
            "NixlConnector: as its users run it, with progress threads that spin.",
            "nixl+: NixlConnector with a progress thread that sleeps and with huge pages, as kvferry has.",
            *_stalls(document),
        ),
    )


def _stalls(document: Any) -> tuple[str, ...]:
    """Return a sentence about hand-overs that took more than a second; none if there are no such."""
    stalled = {
        _PEERS.get(name, name)
        for loads in document.values()
        for load in loads
        for name, rounds in load["connectors"].items()
        if max(_seconds(rounds)) > 1
    }
    if not stalled:
        return ()
    sentence = (
        f"In some rounds {' and '.join(sorted(stalled))} took more than a second. The cause is not known. "
        "Servers that wait are paused, and a transfer may stall after a pause. So these ratios compare no "
        "speeds."
    )
    return (sentence,)


def _seconds(rounds: Any) -> list[float]:
    return [Handover(tuple(Stamps(**one) for one in stamps)).seconds for stamps in rounds]


def _milliseconds(seconds: list[float]) -> str:
    return f"{Spread.of(seconds).median * 1e3:.1f} ms"


def _range_ms(seconds: list[float]) -> str:
    return " to ".join(dict.fromkeys(f"{one * 1e3:+.1f}" for one in (min(seconds), max(seconds)))) + " ms"
