"""The report of `benchmarks choice`, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.choice.measure import CONNECTORS, POLICIES, TARGET_RATIO, MeasuredChoice, Replay
from benchmarks.choice.policy_engine import FAR
from benchmarks.phrases import seconds, verdict
from kvferry.common.units import format_bytes
from kvferry.tools.measuring.rounds import Spread

_OTHERS = tuple(policy for policy in POLICIES if policy != "cost")
_TITLES = {"file": "near, files", "object": "far, objects", f"{FAR}object": "far, objects"}


def show(measured: MeasuredChoice, console: Console) -> None:
    """Print the results with at most 80 columns."""
    job, machine, probed = measured.job, measured.machine, measured.probed
    workload = job.workload
    of = f" of the first {workload.of:,}" if workload.of else ""
    between = "two connectors side by side" if job.sources == CONNECTORS else "tiers of one connector"
    console.print(
        f"[bold]{len(workload.prompts)} requests{of}[/], {workload.name}: {workload.tokens:,} tokens, "
        f"{workload.repeated:.0%} of their blocks of {workload.block_tokens} tokens asked for before\n"
        f"{machine.cores} cores, {machine.cpu}; median and range of {job.rounds} interleaved rounds\n\n"
        f"Between {between}: near, {format_bytes(job.file_bytes)} of files at {_rate(probed.near)};\n"
        f"far, an object store at {_rate(probed.far)}: {probed.apart:.1f}x apart (asked for: {job.apart:g}x)",
        highlight=False,
    )
    _show_rates(measured, console)
    _show_policies(measured, console)
    for other in _OTHERS:
        console.print(f"cost / {other}: {_ratio(measured.ratio(other))}{_first(measured, other)}")
    console.print(
        f"target at most {TARGET_RATIO:g} of either: {verdict(reached=measured.reached)}", highlight=False
    )
    if failed := sum(one.failed for rounds in measured.rounds.values() for one in rounds):
        console.print(f"[red]{failed} loads failed[/], and were computed; their time is in it")


def as_json(measured: MeasuredChoice) -> dict[str, Any]:
    """Return all requests in seconds, bytes and tokens, and the derived figures, as values for JSON."""
    job, workload = measured.job, measured.job.workload
    return {
        "machine": asdict(measured.machine),
        **{name: getattr(job, name) for name in ("sources", "apart", "near")},
        "file_bytes": job.file_bytes,
        "host_bytes": job.host_bytes,
        "workload": {
            "name": workload.name,
            "requests": len(workload.prompts),
            "of": workload.of,
            **{n: getattr(workload, n) for n in ("block_tokens", "tokens", "distinct_blocks", "repeated")},
        },
        "probed": {**asdict(measured.probed), "apart": measured.probed.apart},
        "policies": {
            policy: {
                "learning": _replayed(measured.learning[policy]),
                "rounds": [_replayed(one) for one in measured.rounds[policy]],
                "mean": asdict(measured.mean(policy)),
                "served": measured.served(policy),
            }
            for policy in POLICIES
        },
        "tokens_per_second": {place: asdict(rate) for place, rate in measured.rates.items()},
        "ratio": {f"cost / {other}": asdict(measured.ratio(other)) for other in _OTHERS},
        "reached": measured.reached,
    }


def _show_rates(measured: MeasuredChoice, console: Console) -> None:
    said = "; ".join(f"{_title(place)} {rate.median:,.0f}" for place, rate in measured.rates.items())
    console.print(f"Tokens per second in the replays: {said}", highlight=False)


def _show_policies(measured: MeasuredChoice, console: Console) -> None:
    served = {policy: measured.served(policy) for policy in POLICIES}
    places = sorted({place for of in served.values() for place in of} - {"computed"}, key=_order)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for title in ("first token", "computed", *map(_title, places)):
        table.add_column(title, justify="right", no_wrap=True)
    for policy, of in served.items():
        total = sum(of.values())
        shares = [f"{of.get(place, 0) / total:.1%}" for place in ("computed", *places)]
        table.add_row(policy, seconds(measured.mean(policy)), *shares)
    console.print()
    console.print(table)


def _title(place: str) -> str:
    return _TITLES.get(place, place)


def _rate(spread: Spread) -> str:
    return f"{spread.median / 1e6:,.0f} MB/s ({spread.low / 1e6:,.0f}-{spread.high / 1e6:,.0f})"


def _ratio(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.low:.2f}-{spread.high:.2f})"


def _first(measured: MeasuredChoice, other: str) -> str:
    """Return the ratio of `cost` to another policy in the replay in which the speeds are learnt, as text."""
    return f"; {measured.learning['cost'].mean / measured.learning[other].mean:.2f} while it learns"


def _replayed(replayed: Replay) -> dict[str, Any]:
    return {
        "mean": replayed.mean,
        "seconds": [answer.seconds for answer in replayed.answers],
        "served": dict(replayed.served),
        "failed": replayed.failed,
    }


def _order(place: str) -> tuple[bool, str]:
    """Return a sort key for places that puts the near source first."""
    return place.startswith(FAR) or place == "object", place
