"""Output of the forecast of the tiers as text."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.tools.plan.choices import SharedPrefix, StorageChoice
from kvferry.tools.plan.kept import KeptGroup, TierForecast
from kvferry.tools.plan.show import named
from kvferry.report import Report
from kvferry.table import Column
from kvferry.units import counted, format_bytes

# The table shows the size of attention layers for this many tokens.
PER_TOKENS = 1024


def show_kept(kept: TierForecast, report: Report) -> None:
    """Print the forecast of what an engine's tiers store for a prompt."""
    report.text()
    if not kept.groups:
        report.heading("Tiers")
        report.text(f"This cache cannot be stored: {kept.why_not}.")
        return
    report.heading(f"Tiers: chunks of {kept.chunk_tokens:,} tokens{_first(kept)}")
    report.table(_GROUP_COLUMNS, [[*_group(group, kept.chunk_tokens)] for group in kept.groups])
    report.text()
    report.heading(f"Storage for a prompt of {counted(kept.prompt, 'token')}, by settings")
    report.table(*_choices(kept))
    if kept.shared:
        report.text()
        report.heading("Tokens that prompts load of a prefix that they share, if all is stored")
        report.table(_SHARED_COLUMNS, [[*_shared(one, kept)] for one in kept.shared])
    if kept.why_not:
        report.text(f"No prefix can be loaded: {kept.why_not}.")


def _first(kept: TierForecast) -> str:
    alone = kept.first_tokens == kept.chunk_tokens
    return "" if alone else f", snapshots at least {kept.first_tokens:,} tokens apart"


_SHARED_COLUMNS = (
    Column("shared"),
    Column("second prompt"),
    Column("third prompt"),
    Column("first snapshot at", rank=2),
    Column("without first_snapshot_tokens", rank=1),
)


def _shared(one: SharedPrefix, kept: TierForecast) -> Iterator[str]:
    for tokens in (one.tokens, one.second, one.third, kept.first_snapshot_tokens, one.without):
        yield f"{tokens:,}"


_GROUP_COLUMNS = (
    Column("layers", left=True),
    Column("chunk or snapshot", rank=1),
    Column("file size"),
    Column(f"files of {PER_TOKENS:,} tokens", rank=2),
)


def _group(one: KeptGroup, chunk_tokens: int) -> Iterator[str]:
    yield f"{one.layers} {named(one.group)}"
    yield format_bytes(one.group.chunk_bytes)
    yield format_bytes(one.file_bytes)
    yield "" if one.is_state else format_bytes(one.file_bytes * PER_TOKENS / chunk_tokens)


def _choices(kept: TierForecast) -> tuple[tuple[Column, ...], list[tuple[str, ...]]]:
    """Return (columns, cells of each row) of a table of the storage, with one row per choice of settings."""
    state = any(group.is_state for group in kept.groups)
    thinned = any(group.group.attention_span for group in kept.groups) or any(
        choice.snapshot_tokens != kept.chunk_tokens for choice in kept.choices
    )
    columns = (Column("retention"), Column("tokens per step"), Column("snapshots", rank=2)) if state else ()
    more = (Column("tokens between snapshots"),) if thinned else ()
    return (*columns, *more, Column("files"), Column("recomputed at most", rank=1)), [
        tuple(_choice(choice, state=state, thinned=thinned)) for choice in kept.choices
    ]


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
