"""The report of `benchmarks handover`, as text and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.handover.engine import Stamps
from benchmarks.handover.measure import Found, Handover, Load, Measured
from benchmarks.handover.mix import CPU_TIME, PER_REQUEST, Mix, MixTimes
from benchmarks.handover.model import HandoverModel
from benchmarks.handover.verdict import compare, runs_of
from kvferry.tools.measuring.rounds import Spread

_ENDS = ("added", "answered")
"""Stamps of a request to a server."""

LIMIT_SECONDS = 1e-3
"""Goal: kvferry's median is at most this much above that of NixlConnector with the same advantages."""


def show(model: HandoverModel, measured: Measured, console: Console, *, served: bool) -> None:
    """Print the times of one model, with at most 80 columns.

    Args:
        model: model family.
        measured: times of the model.
        console: console to print on.
        served: True if the engines were servers, so that there are no stages.
    """
    found = measured.found
    console.print(f"\n{model.name} ({model.title})")
    if any("nixl+" in times for times in found.values()):
        console.print("nixl+: NixlConnector with a sleeping progress thread, huge pages, and rests")
        console.print("between polls")
    loads = {work: times for work, times in found.items() if isinstance(work, Load)}
    if loads:
        _show_loads(loads, console, served=served)
    for work, times in found.items():
        if isinstance(work, Mix):
            _show_mix(work, times, console)
    _show_runs(found, console)
    for name, why in measured.failures.items():
        console.print(f"{name} failed: {why}")


def _show_loads(
    found: Mapping[Load, Mapping[str, Sequence[Handover]]], console: Console, *, served: bool
) -> None:
    console.print("milliseconds to the first token, difference: kvferry minus nixl+")
    table = _table("tokens", "requests", *next(iter(found.values())), "difference")
    for load, times in found.items():
        row = [_milliseconds([one.seconds for one in each]) for each in times.values()]
        table.add_row(f"{load.tokens:,}", str(load.requests), *row, _difference(times))
    console.print(table)
    for load, times in found.items():
        for other in _others(times):
            if reason := compare(times, other, lambda one: one.seconds).reason:
                console.print(f"{name_of(load)}: not comparable with {other}: {reason}")
    if served:
        console.print("time over HTTP, from sending the decode request to its answer")
        console.print("for the stages, run without --served")
    else:
        _show_stages(found, console)


def _show_stages(found: Mapping[Load, Mapping[str, Sequence[Handover]]], console: Console) -> None:
    console.print("stages, medians in milliseconds (other: threads, and NixlConnector's transfer):")
    names = list(next(iter(found.values()))["kvferry"][0].stages())
    stages = _table("load", "connector", *names)
    for load, times in found.items():
        for connector, handovers in times.items():
            each = [one.stages() for one in handovers]
            row = [f"{Spread.of([one[name] for one in each]).median * 1e3:.2f}" for name in names]
            stages.add_row(name_of(load), connector, *row)
    console.print(stages)


def _show_mix(mix: Mix, found: Mapping[str, Sequence[MixTimes]], console: Console) -> None:
    console.print(f"{mix}: medians over rounds")
    console.print("first token, and time between tokens: milliseconds")
    table = _table("connector", "requests/s", "tokens/s", "first: p50", "p99", "between: p50", "p99")
    for name, times in found.items():
        per_second = [[len(one.requests) / one.seconds for one in times]]
        per_second.append([one.tokens / one.seconds for one in times])
        waits = [one for one in times[0].figures() if one not in (PER_REQUEST, CPU_TIME)]
        row = [f"{Spread.of(each).median:.1f}" for each in per_second]
        row += [f"{_median(times, each) * 1e3:.1f}" for each in waits]
        table.add_row(name, *row)
    console.print(table)
    for other in _others(found):
        for figure in found[other][0].figures():
            verdict = compare(found, other, figure_of(figure), needs_quiet=figure != CPU_TIME)
            said = verdict.reason
            if verdict.ratio is not None:
                said = f"{verdict.ratio.median:.2f} ({verdict.ratio.low:.2f}-{verdict.ratio.high:.2f})"
            console.print(f"{figure}: kvferry / {other}: {said}")


def _show_runs(found: Found, console: Console) -> None:
    """Print how each connector's rounds ran."""
    console.print("other processes and the hypervisor: highest share of the machine in a round")
    table = _table("work", "connector", "rounds", "quiet", "stalled", "others", "stolen")
    for work, times in found.items():
        for name, runs in runs_of(times).items():
            shares = [f"{one.high:.0%}" for one in (runs.others, runs.stolen)]
            counts = (runs.rounds, sum(runs.quiet), len(runs.stalls))
            table.add_row(name_of(work), name, *map(str, counts), *shares)
    console.print(table)


def name_of(work: Load | Mix) -> str:
    """Return the short name of a work, as on the command line."""
    return (
        f"{work.tokens}x{work.requests}" if isinstance(work, Load) else f"mix {work.requests}x{work.clients}"
    )


def figure_of(name: str) -> Callable[[MixTimes], float]:
    """Return a function that returns a figure of a mix, by its name."""
    return lambda times: times.figures()[name]


def as_json(measured: Mapping[str, Measured], *, served: bool) -> dict[str, Any]:
    """Return the times of all requests, in seconds, as values for JSON.

    Args:
        measured: times of each model, by its name.
        served: True if the engines were servers: of a hand-over, only the stamps ``added`` (the client began
            to send the request) and ``answered`` are given.
    """
    stamped = _ENDS if served else tuple(field.name for field in fields(Stamps))

    def round_of(times: Any) -> dict[str, Any]:
        if isinstance(times, MixTimes):
            requests: Any = [asdict(one) for one in times.requests]
            values = {"requests": requests, "recomputed": times.recomputed}
        else:
            values = {"stamps": [{name: getattr(one, name) for name in stamped} for one in times.stamps]}
        return {**values, "conditions": times.conditions.as_json()}

    return {
        model: [
            {
                "kind": "load" if isinstance(work, Load) else "mix",
                **asdict(work),
                "served": served,
                "connectors": {name: [round_of(one) for one in each] for name, each in times.items()},
                "failures": dict(one.failures),
            }
            for work, times in one.found.items()
        ]
        for model, one in measured.items()
    }


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in ("connector", "work") else "right", no_wrap=True)
    return table


def _others(times: Mapping[str, Any]) -> list[str]:
    return [name for name in times if name != "kvferry"]


def _median(times: Sequence[MixTimes], figure: str) -> float:
    return Spread.of([one.figures()[figure] for one in times]).median


def _milliseconds(seconds: Sequence[float]) -> str:
    spread = Spread.of(seconds)
    return f"{spread.median * 1e3:.1f} ({spread.low * 1e3:.1f}-{spread.high * 1e3:.1f})"


def _difference(times: Mapping[str, Sequence[Handover]]) -> str:
    """Return the median of kvferry's time minus nixl+'s in comparable rounds, in milliseconds, as a text."""
    if "nixl+" not in times:
        return "-"
    rounds = compare(times, "nixl+", lambda one: one.seconds).rounds
    found = [times["kvferry"][number].seconds - times["nixl+"][number].seconds for number in rounds]
    return f"{Spread.of(found).median * 1e3:+.1f}" if found else "-"
