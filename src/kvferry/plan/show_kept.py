"""Output of the forecast of the tiers on a terminal, in 80 columns."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvferry.plan.choices import StorageChoice
from kvferry.plan.kept import KeptGroup, TierForecast
from kvferry.units import format_bytes

PER_TOKENS = 1024
"""Number of tokens for which the table shows the size of attention layers."""


def show_kept(kept: TierForecast, console: Console) -> None:
    """Print the forecast of what an engine's tiers store for a prompt.

    Args:
        kept: forecast to print.
        console: console to print to.
    """
    console.print()
    if not kept.groups:
        console.print(
            f"[bold]Tiers[/]: this cache cannot be stored: {escape(kept.why_not)}.", highlight=False
        )
        return
    console.print(f"[bold]Tiers[/]: chunks of {kept.chunk_tokens:,} tokens{_first(kept)}.", highlight=False)
    console.print(_groups(kept))
    console.print()
    console.print(f"Storage for a prompt of {kept.prompt:,} tokens, by settings:", highlight=False)
    console.print(_choices(kept))
    if kept.why_not:
        console.print(f"[bold]No prefix can be loaded[/]: {escape(kept.why_not)}.", highlight=False)


def _first(kept: TierForecast) -> str:
    alone = kept.first_tokens == kept.chunk_tokens
    return "" if alone else f", snapshots at least {kept.first_tokens:,} tokens apart"


def _table(titles: tuple[str, ...]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for title in titles:
        left = title == "layers"
        table.add_column(title, justify="left" if left else "right", no_wrap=True, vertical="bottom")
    return table


def _groups(kept: TierForecast) -> Table:
    table = _table(("layers", "chunk or\nsnapshot", "file size", f"files of\n{PER_TOKENS:,} tokens"))
    for group in kept.groups:
        table.add_row(*_group(group, kept.chunk_tokens))
    return table


def _group(one: KeptGroup, chunk_tokens: int) -> Iterator[str]:
    yield f"{one.layers} {one.group.label}"
    yield format_bytes(one.group.chunk_bytes)
    yield format_bytes(one.file_bytes)
    yield "" if one.is_state else format_bytes(one.file_bytes * PER_TOKENS / chunk_tokens)


def _choices(kept: TierForecast) -> Table:
    """Return a table of the storage that a prompt's KV takes, with one row per combination of settings.

    The first row is for the requested settings, and the other rows are for alternative settings.
    """
    state = any(group.is_state for group in kept.groups)
    thinned = any(group.group.attention_span for group in kept.groups) or any(
        choice.snapshot_tokens != kept.chunk_tokens for choice in kept.choices
    )
    titles = ("retention", "tokens\nper step", "snapshots") if state else ()
    more = ("tokens between\nsnapshots",) if thinned else ()
    table = _table((*titles, *more, "files", "recomputed\nat most"))
    for choice in kept.choices:
        table.add_row(*_choice(choice, state=state, thinned=thinned))
    return table


def _choice(choice: StorageChoice, *, state: bool, thinned: bool) -> Iterator[str]:
    if state:
        retention = choice.steps.retention
        yield "None" if retention is None else f"{retention:,}"
        yield f"{choice.steps.step_tokens:,}"
        yield f"{choice.snapshots:,}"
    if thinned:
        yield f"{choice.snapshot_tokens:,}"
    yield format_bytes(choice.bytes)
    yield f"{choice.gap_tokens:,}"
