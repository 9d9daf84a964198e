"""The report of `benchmarks offload`, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.offload import asking, engine_report
from benchmarks.offload.asking import SHARES, AskResults
from benchmarks.offload.lookup import TARGET_SECONDS, LookUpResults, LookUpTimes
from benchmarks.offload.measure import MeasuredOffload
from benchmarks.phrases import PLACES, seconds, verdict
from kvferry.common.units import format_bytes, format_seconds


def show(measured: MeasuredOffload, console: Console) -> None:
    """Print the results of all measured parts with at most 80 columns."""
    job, machine = measured.job, measured.machine
    console.print(
        f"[bold]{job.reading.cache.name}[/]: chunks of {measured.chunk_tokens} tokens, "
        f"{format_bytes(measured.chunk_bytes)}\n"
        f"{machine.cores} cores, {machine.cpu}; median and range of {job.repeats} interleaved rounds",
        highlight=False,
    )
    if measured.lookup:
        _show_lookup(measured.lookup, console)
    if measured.asking:
        _show_asking(measured.asking, console)
    if measured.hooks:
        engine_report.show_hooks(measured.hooks, console)
    if measured.first_token:
        engine_report.show_first_token(measured.first_token, console)


def as_json(measured: MeasuredOffload) -> dict[str, Any]:
    """Return all rounds in seconds and bytes, and the derived figures, as values for JSON."""
    job = measured.job
    return {
        "geometry": job.reading.cache.name,
        "machine": asdict(measured.machine),
        **{name: getattr(job, name) for name in ("parts", "repeats")},
        "path": str(job.path),
        **{name: getattr(measured, name) for name in ("chunk_tokens", "chunk_bytes")},
        "lookup": measured.lookup and {**asdict(measured.lookup), "reached": measured.lookup.reached},
        "asking": measured.asking and {**asdict(measured.asking), "reached": measured.asking.reached},
        "hooks": measured.hooks and engine_report.hooks_json(measured.hooks),
        "first_token": measured.first_token and engine_report.first_token_json(measured.first_token),
    }


def _show_lookup(lookup: LookUpResults, console: Console) -> None:
    console.print(
        f"\n[bold]Look-up[/] of {lookup.tokens:,} tokens, {lookup.chunks:,} chunks, among {lookup.stored:,} "
        f"chunks, {lookup.in_host:,} of them in host memory",
        highlight=False,
    )
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("prompt", no_wrap=True)
    for title in ("first look-up", "next look-up"):
        table.add_column(title, justify="right", no_wrap=True)
    for looks in lookup.looks:
        table.add_row(_place(looks), seconds(looks.first), seconds(looks.again))
    console.print(table)
    console.print(
        f"target under {format_seconds(TARGET_SECONDS)}: {verdict(reached=lookup.reached)}\n"
        f"digesting the keys, once per request: {seconds(lookup.keys)}",
        highlight=False,
    )


def _show_asking(found: AskResults, console: Console) -> None:
    console.print(
        f"\n[bold]Asking five sources[/] for {found.tokens:,} tokens, {found.chunks:,} chunks of every "
        f"group: a peer, and tiers that know {', '.join(f'{count:,}' for count in found.known)} chunks",
        highlight=False,
    )
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title in ("layers", "policy", "chunks at"):
        table.add_column(title, no_wrap=True)
    for title in ("first", "p99", "again", "p99"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in found.asks:
        times = (one.first.median, one.first.p99, one.again.median, one.again.p99)
        table.add_row(one.layers, one.policy, one.place, *map(format_seconds, times))
    console.print(table)
    longest = found.longest
    shares = ", ".join(
        f"{name} {format_seconds(took)}" for name, took in zip(SHARES, longest.shares, strict=True)
    )
    console.print(
        f"target under {format_seconds(asking.TARGET_SECONDS)}: {verdict(reached=found.reached)}\n"
        f"the slowest, {longest.layers}, {longest.policy}, {longest.place}: {shares}\n"
        f"digesting the keys and the offer, once per request: {format_seconds(longest.arriving.median)}",
        highlight=False,
    )


def _place(looks: LookUpTimes) -> str:
    return PLACES.get(looks.place, looks.place)
