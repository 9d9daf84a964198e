"""The report of the parts that need a real engine, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.offload.first_token import FirstToken
from benchmarks.offload.tier_hooks import TARGET_SHARE, HookCost
from benchmarks.phrases import PLACES, seconds, verdict
from kvferry.common.units import format_bytes, format_seconds
from kvferry.tools.measuring.rounds import Spread

_MOST_HOOKS = 3


def show_hooks(hooks: HookCost, console: Console) -> None:
    """Print the time inside the connector's hooks, with at most 80 columns."""
    console.print(
        f"\n[bold]Inside hooks[/] of tiers that have nothing for {hooks.requests} requests of "
        f"{hooks.prompt_tokens} tokens",
        highlight=False,
    )
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("step", no_wrap=True)
    for title in ("count", "in hooks", "p99", "longest", "whole step", "share"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, times in (("compute and store", hooks.storing), ("decode", hooks.decoding)):
        table.add_row(
            name,
            str(len(times.steps)),
            format_seconds(Spread.of(times.hooks).median),
            format_seconds(times.p99),
            format_seconds(max(times.hooks)),
            format_seconds(Spread.of(times.steps).median),
            f"{times.share.median:.2%}",
        )
    console.print(table)
    most = ", ".join(f"{name} {format_seconds(s)}" for name, s in list(hooks.by_hook.items())[:_MOST_HOOKS])
    console.print(
        f"target under {TARGET_SHARE:.0%} of a decoding step of this engine's model: "
        f"{verdict(reached=hooks.reached)}\n"
        f"most of the time of decoding: {most}; "
        f"as a request arrives: {format_seconds(hooks.arriving.median)}",
        highlight=False,
    )


def hooks_json(hooks: HookCost) -> dict[str, Any]:
    """Return the times of all steps in seconds, as values for JSON."""
    shares = {name: asdict(getattr(hooks, name).share) for name in ("storing", "decoding")}
    return {**asdict(hooks), "share": shares, "reached": hooks.reached}


def show_first_token(first: FirstToken, console: Console) -> None:
    """Print the time to first token, with at most 80 columns."""
    console.print(
        f"\n[bold]First token[/] of a prompt of {first.tokens:,} tokens, {format_bytes(first.bytes)} of "
        "KV cache",
        highlight=False,
    )
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("prompt", no_wrap=True)
    for title in ("first token", "speed-up"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_row("computed", seconds(Spread.of(first.computed)), "")
    for tier, took in first.warm.items():
        times = first.times(tier)
        said = f"{times.median:.1f}x ({times.low:.1f}-{times.high:.1f})"
        table.add_row(PLACES[tier], seconds(Spread.of(took)), said)
    console.print(table)
    console.print(f"prefetching took {seconds(Spread.of(first.prefetching))}", highlight=False)


def first_token_json(first: FirstToken) -> dict[str, Any]:
    """Return the times of all rounds in seconds, and the speed-ups, as values for JSON."""
    return {**asdict(first), "as_fast": {tier: asdict(first.times(tier)) for tier in first.warm}}
