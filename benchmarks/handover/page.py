"""What `benchmarks handover` contributes to the page of benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.conditions import Conditions
from benchmarks.handover.engine import Stamps
from benchmarks.handover.measure import Handover
from benchmarks.handover.mix import CPU_TIME, PER_REQUEST, MixTimes, TokenTimes
from benchmarks.handover.report import figure_of
from benchmarks.handover.verdict import LEAST_QUIET, Runs, compare, runs_of
from benchmarks.page.figures import Comparison, Summary, format_range
from kvferry.tools.measuring.rounds import Spread

_PEERS = {"nixl+": "nixl+", "nixl": "NixlConnector", "aggregated": "one server"}
"""Names of the peers on the page, by name of the connector. The closest peer is first."""

_EXPLAINED = {
    "nixl+": "nixl+: NixlConnector with a progress thread that sleeps, huge pages, and an engine that rests "
    "between polls of its queues, as kvferry has.",
    "nixl": "NixlConnector: as its users run it, with progress threads that spin.",
    "aggregated": "one server: it prefills and decodes, with the computing threads of both.",
}


@dataclass(slots=True)
class _Ratios:
    """Medians of the rows, by peer: ratios, and differences in seconds."""

    ratios: dict[str, list[float]] = field(default_factory=dict)
    differences: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, ratio: Spread, difference: float) -> None:
        self.ratios.setdefault(name, []).append(ratio.median)
        self.differences.setdefault(name, []).append(difference)

    def sentence(self, subject: str, *, differences: bool) -> str:
        """Return a sentence with the ranges of all rows; it says so if there is no row to compare."""
        if not self.ratios:
            return f"{subject} could not be compared in any row."
        parts = [
            f"{format_range(each)} of {_PEERS[name]}'s"
            + (f" ({_range_ms(self.differences[name])})" if differences else "")
            for name, each in self.ratios.items()
        ]
        return f"{subject} is {', and '.join(parts)}."


def summary(document: Any) -> Summary:
    """Return the times to the first token after a hand-over, and those of mixes, compared with the peers'.

    Args:
        document: what the command prints with ``--json``.
    """
    comparisons: list[Comparison] = []
    loads, mixes = _Ratios(), _Ratios()
    runs: dict[str, list[Runs]] = {}
    for model, works in document.items():
        for work in works:
            times = {name: [_times(one) for one in rounds] for name, rounds in work["connectors"].items()}
            for name, one in runs_of(times).items():
                runs.setdefault(name, []).append(one)
            rows = _mix_rows if work["kind"] == "mix" else _load_rows
            comparisons += rows(model, work, times, mixes if work["kind"] == "mix" else loads)
            comparisons += _failed_rows(model, work)
    kinds = {work["kind"] for works in document.values() for work in works}
    answers = []
    if "load" in kinds:
        subject = "The time from a request's arrival at the decode engine to its first token"
        answers.append(loads.sentence(subject, differences=True))
    if "mix" in kinds:
        answers.append(mixes.sentence("The time per request of a mix", differences=False))
    return Summary(
        answer=" ".join(answers),
        comparisons=tuple(comparisons),
        low_is_good=True,
        notes=(*(text for name, text in _EXPLAINED.items() if name in runs), *_ran(runs)),
    )


def _load_rows(model: str, work: Any, times: Mapping[str, Any], found: _Ratios) -> Iterator[Comparison]:
    label = f"{model}, {work['tokens']:,} tokens x {work['requests']}"
    for name in [one for one in _PEERS if one in times]:
        yield _row(label, name, times, lambda one: one.seconds, _milliseconds, found, needs_quiet=True)


def _mix_rows(model: str, work: Any, times: Mapping[str, Any], found: _Ratios) -> Iterator[Comparison]:
    for figure in times["kvferry"][0].figures():
        whole = figure == PER_REQUEST
        label = f"{model}, {work['requests']} requests, {work['clients']} clients: {figure}"
        for name in [one for one in _PEERS if one in times]:
            kept = found if whole else _Ratios()
            shown, quiet = _throughput if whole else _milliseconds, figure != CPU_TIME
            yield _row(label, name, times, figure_of(figure), shown, kept, needs_quiet=quiet)


def _failed_rows(model: str, work: Any) -> Iterator[Comparison]:
    for name, why in work["failures"].items():
        label = " x ".join(str(work[one]) for one in ("tokens", "requests", "clients") if one in work)
        against = _PEERS.get(name, name)
        yield Comparison(label=f"{model}, {label}", against=against, ours="", theirs=why, ratio=None)


def _row(
    label: str,
    name: str,
    times: Mapping[str, Any],
    figure: Callable[[Any], float],
    shown: Callable[[Sequence[Any], Callable[[Any], float]], str],
    found: _Ratios,
    *,
    needs_quiet: bool,
) -> Comparison:
    """Compare one figure with a peer's, and add the ratio to `found`. A reason takes the place of a ratio."""
    verdict = compare(times, name, figure, needs_quiet=needs_quiet)
    rounds = verdict.rounds or range(len(times["kvferry"]))
    ours, theirs = ([times[each][number] for number in rounds] for each in ("kvferry", name))
    if verdict.ratio is not None:
        difference = Spread.of([figure(a) - figure(b) for a, b in zip(ours, theirs, strict=True)])
        found.add(name, verdict.ratio, difference.median)
    return Comparison(
        label=label,
        against=_PEERS[name],
        ours=shown(ours, figure),
        theirs=verdict.reason or shown(theirs, figure),
        ratio=verdict.ratio,
    )


def _ran(runs: Mapping[str, Sequence[Runs]]) -> Iterator[str]:
    """Yield sentences about how each connector's rounds ran."""
    for name, each in runs.items():
        rounds, quiet = sum(one.rounds for one in each), sum(sum(one.quiet) for one in each)
        others, stolen = (max(getattr(one, kind).high for one in each) for kind in ("others", "stolen"))
        stalled = sum(len(one.stalls) for one in each)
        longest = max((stall for one in each for stall in one.stalls), default=0.0)
        stalls = f" {stalled} rounds stalled, up to {longest:.1f} s." if stalled else " None stalled."
        yield (
            f"{_PEERS.get(name, name)} ran {rounds} rounds, {quiet} of them on a quiet machine. At most, "
            f"other processes took {others:.0%} of the machine, and the hypervisor {stolen:.0%}.{stalls}"
        )
    yield (
        f"A ratio is of rounds in which the machine was quiet for both, at least {LEAST_QUIET} if there were "
        "as many. CPU time is of all rounds. A row in which either side stalled has no ratio."
    )


def _times(values: Any) -> Handover | MixTimes:
    conditions = Conditions.of(values["conditions"])
    if "stamps" in values:
        return Handover(tuple(Stamps(**one) for one in values["stamps"]), conditions)
    requests = tuple(TokenTimes(one["sent"], tuple(one["tokens"])) for one in values["requests"])
    return MixTimes(requests, values["recomputed"], conditions)


def _milliseconds(times: Sequence[Any], figure: Callable[[Any], float]) -> str:
    return f"{Spread.of([figure(one) for one in times]).median * 1e3:.1f} ms"


def _throughput(times: Sequence[MixTimes], _: Callable[[Any], float]) -> str:
    requests, tokens = (
        Spread.of([number(one) / one.seconds for one in times]).median
        for number in (lambda one: len(one.requests), lambda one: one.tokens)
    )
    return f"{requests:.2f} requests/s, {tokens:.0f} tokens/s"


def _range_ms(seconds: list[float]) -> str:
    return " to ".join(dict.fromkeys(f"{one * 1e3:+.1f}" for one in (min(seconds), max(seconds)))) + " ms"
