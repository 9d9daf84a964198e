"""Output of a handover forecast as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from kvferry.common.text import Column, Report
from kvferry.common.units import counted, format_bytes, format_count, format_seconds
from kvferry.geometry import GroupKind, GroupPattern
from kvferry.geometry.models import read_model
from kvferry.geometry.store import LayerCache
from kvferry.tools.plan.cost import TransferEstimate
from kvferry.tools.plan.find import entries
from kvferry.tools.plan.forecast import Forecast, LayerForecast, RefusedTransfer
from kvferry.tools.plan.kept import KeptGroup, SharedPrefix, StorageChoice, TierForecast
from kvferry.tools.plan.side import EngineSide

_ALL = "all"
_NAMES = {
    GroupKind.FULL: "full attention",
    GroupKind.SLIDING: "window",
    GroupKind.CHUNKED: "chunk",
    GroupKind.MLA: "latent",
    GroupKind.STATE: "state",
}


# Columns of the table that shows a forecast.
COLUMNS = (
    Column("layers", left=True),
    Column("per token or state", rank=5),
    Column("run length", rank=4),
    Column("runs", rank=3),
    Column("moved"),
    Column("share of full attention", rank=1),
    Column("method", rank=2, left=True),
    Column("time"),
)


def show(forecast: Forecast, report: Report) -> None:
    """Print the forecast of a handover: both engines, a table with one row per kind of layer, and notes."""
    name, *lines = heading(forecast)
    report.heading(name)
    for line in lines:
        report.text(line)
    report.text()
    report.table(COLUMNS, [*table_cells(forecast)], last_is_total=len(forecast.rows) > 1)
    report.text()
    report.note("A run is contiguous in both engines: one NIXL descriptor.")
    for note in forecast.notes:
        report.note(f"Note: {note}.")


def show_refused(refused: RefusedTransfer, report: Report) -> None:
    """Print a handover that kvferry's connector refuses: both engines, the reasons, and notes."""
    report.heading(f"{refused.model}, a prompt of {counted(refused.tokens, 'token')}")
    report.text("refused: the destination computes the prompt itself")
    for line in _engines(refused):
        report.text(line)
    report.text()
    for reason in refused.reasons:
        report.text(f"Refused: {reason}")
    for note in refused.notes:
        report.note(f"Note: {note}.")


def describe(cache: LayerCache) -> str:
    """Return a short name for a kind of layer, such as ``full attention``, ``window 1,024`` or ``latent``."""
    return named(cache, cache.fields[0].name if cache.kind is GroupKind.MLA else "")


def named(group: GroupPattern, instead: str = "") -> str:
    """Return a short name for a kind of layer, with another word in place of its kind's if one is given."""
    name = instead or _NAMES[group.kind]
    return f"{name} {group.attention_span:,}" if group.attention_span else name


def heading(forecast: Forecast) -> Iterator[str]:
    """Yield lines about a forecast: the model, the result, both engines, and the size of the KV cache."""
    yield f"{forecast.model}, a prompt of {counted(forecast.tokens, 'token')}"
    yield result(forecast)
    yield from _engines(forecast)
    kept = [f"{format_bytes(forecast.token_bytes)} per token"] if forecast.token_bytes else []
    kept += [f"{format_bytes(forecast.state_bytes)} of state per sequence"] if forecast.state_bytes else []
    yield f"KV cache: {' and '.join(kept)}"


def _engines(transfer: Forecast | RefusedTransfer) -> Iterator[str]:
    sides = zip((transfer.source, transfer.destination), transfer.blocks, strict=True)
    here, there = (engine(side, tokens) for side, tokens in sides)
    yield f"from {here}"
    yield f"to {'an engine with the same settings' if here == there else there}"


def result(forecast: Forecast) -> str:
    """Return the result of a forecast in a few words: bytes, time, and the share of full attention."""
    whole = forecast.whole
    text = f"moves {format_bytes(whole.bytes)} in about {format_seconds(whole.seconds)}"
    if whole.full_bytes is None or whole.bytes >= whole.full_bytes:
        return text
    return f"{text}: {_share(whole)} of what full attention would take"


def engine(side: EngineSide, block_tokens: int) -> str:
    """Return a short description of an engine: parallel sizes, layout and block size."""
    return f"{side.label}, blocks of {counted(block_tokens, 'token')}"


def table_cells(forecast: Forecast) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table that shows a forecast: a text per column.

    If there are several kinds of layers, a row for all layers follows.
    """
    for row in forecast.rows:
        kept = format_bytes(row.layers * row.cache.bytes_of(1))
        *cells, method, seconds = _estimate_cells(row.estimate)
        method = f"{method}, whole" if row.whole else method
        yield f"{row.layers} {describe(row.cache)}", kept, *cells, method, seconds
    if len(forecast.rows) > 1:
        yield _ALL, "", *_estimate_cells(forecast.whole)


def _estimate_cells(estimate: TransferEstimate) -> Iterator[str]:
    yield format_bytes(estimate.run_bytes)
    yield format_count(estimate.descriptors)
    yield format_bytes(estimate.bytes)
    yield _share(estimate)
    yield estimate.strategy
    yield format_seconds(estimate.seconds)


def _share(estimate: TransferEstimate) -> str:
    return "" if not estimate.full_bytes else f"{estimate.bytes / estimate.full_bytes:.0%}"


def show_models(report: Report) -> None:
    """Print each model of the built-in table with its kinds of layers and the origin of its configuration."""
    for entry in entries():
        reading = read_model(entry.config)
        kinds = Counter(reading.cache.layers)
        kinds_text = ", ".join(f"{count} {describe(cache)}" for cache, count in kinds.items())
        also = f" (also {', '.join(entry.also)})" if entry.also else ""
        report.text(f"{entry.name}{also}: {kinds_text}")
        report.text(entry.source, "dim", indent=2)


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
    report.table(_GROUP_COLUMNS, [[*_kept_group(group, kept.chunk_tokens)] for group in kept.groups])
    report.text()
    report.heading(f"Storage for a prompt of {counted(kept.prompt, 'token')}, by settings")
    report.table(*_choices(kept))
    if kept.shared:
        report.text()
        report.heading("Tokens that prompts load of a prefix that they share, if all is stored")
        report.table(_SHARED_COLUMNS, [[*_kept_shared(one, kept)] for one in kept.shared])
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


def _kept_shared(one: SharedPrefix, kept: TierForecast) -> Iterator[str]:
    for tokens in (one.tokens, one.second, one.third, kept.first_snapshot_tokens, one.without):
        yield f"{tokens:,}"


_GROUP_COLUMNS = (
    Column("layers", left=True),
    Column("chunk or snapshot", rank=1),
    Column("file size"),
    Column(f"files of {PER_TOKENS:,} tokens", rank=2),
)


def _kept_group(one: KeptGroup, chunk_tokens: int) -> Iterator[str]:
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
        tuple(_kept_choice(choice, state=state, thinned=thinned)) for choice in kept.choices
    ]


def _kept_choice(choice: StorageChoice, *, state: bool, thinned: bool) -> Iterator[str]:
    if state:
        retention = choice.steps.retention
        yield "None" if retention is None else f"{retention:,}"
        yield f"{choice.steps.step_tokens:,}"
        yield f"{choice.snapshots:,}"
    if thinned:
        yield f"{choice.snapshot_tokens:,}"
    yield format_bytes(choice.bytes)
    yield f"{choice.gap_tokens:,}"


def models_as_json() -> list[dict[str, Any]]:
    """Return the built-in table of models as values that can be written as JSON."""
    found = []
    for entry in entries():
        layers = Counter(read_model(entry.config).cache.layers)
        kinds = [{"count": count, "kind": describe(cache)} for cache, count in layers.items()]
        found.append({"name": entry.name, "also": entry.also, "source": entry.source, "layers": kinds})
    return found


def kept_as_json(kept: TierForecast) -> dict[str, Any]:
    """Return the forecast of the tiers as values that can be written as JSON."""
    return {
        "prompt_tokens": kept.prompt,
        "chunk_tokens": kept.chunk_tokens,
        "first_tokens": kept.first_tokens,
        "groups": [_group_json(one) for one in kept.groups],
        "settings": [_choice_json(one) for one in kept.choices],
        "first_snapshot_tokens": kept.first_snapshot_tokens,
        "shared_prefixes": [_shared_json(one) for one in kept.shared],
        "why_not": kept.why_not,
    }


def _group_json(one: KeptGroup) -> dict[str, Any]:
    return {
        "label": one.group.label,
        "layers": one.layers,
        "content_bytes": one.group.content_bytes,
        "chunk_bytes": one.group.chunk_bytes,
        "file_bytes": one.file_bytes,
        "snapshot": one.is_state,
    }


def _shared_json(one: SharedPrefix) -> dict[str, int]:
    return {
        "tokens": one.tokens,
        "second_prompt_tokens": one.second,
        "third_prompt_tokens": one.third,
        "without_setting_tokens": one.without,
    }


def _choice_json(one: StorageChoice) -> dict[str, Any]:
    return {
        "prefix_cache_retention_interval": one.steps.retention,
        "max_num_batched_tokens": one.steps.step_tokens,
        "snapshot_tokens": one.snapshot_tokens,
        "snapshots": one.snapshots,
        "bytes": one.bytes,
        "gap_tokens": one.gap_tokens,
    }


def as_json(forecast: Forecast) -> dict[str, Any]:
    """Return the forecast of a handover as values that can be written as JSON."""
    rows = forecast.rows
    return {
        **_handover(forecast),
        "kv_bytes_per_token": forecast.token_bytes,
        "state_bytes": forecast.state_bytes,
        "page_bytes": max(row.page_bytes for row in rows),
        "to_page_bytes": max(row.to_page_bytes for row in rows),
        **_estimate(forecast.whole),
        "groups": [_row(row) for row in rows],
        "refused": [],
        "notes": list(forecast.notes),
    }


def refused_as_json(refused: RefusedTransfer) -> dict[str, Any]:
    """Return a refused handover as values that can be written as JSON: the engines and the reasons."""
    return {**_handover(refused), "refused": list(refused.reasons), "notes": list(refused.notes)}


def _handover(transfer: Forecast | RefusedTransfer) -> dict[str, Any]:
    sides = zip((transfer.source, transfer.destination), transfer.blocks, strict=True)
    source, destination = (_side(side, tokens) for side, tokens in sides)
    return {"model": transfer.model, "tokens": transfer.tokens, "source": source, "destination": destination}


def _side(side: EngineSide, block_tokens: int) -> dict[str, Any]:
    return {
        "tp": side.tp,
        "pp": side.pp,
        "block_size": block_tokens,
        "layout": side.layout,
        "backend": side.backend,
    }


def _row(row: LayerForecast) -> dict[str, Any]:
    kept = row.layers * row.cache.bytes_of(1)
    return {
        "kind": row.cache.kind.value,
        "attention_span": row.cache.attention_span,
        "fields": [field.name for field in row.cache.fields],
        "layers": row.layers,
        "block_tables": row.tables,
        "tokens": row.tokens,
        "kv_bytes_per_token": 0 if row.is_state else kept,
        "state_bytes": kept if row.is_state else 0,
        "page_bytes": row.page_bytes,
        "to_page_bytes": row.to_page_bytes,
        "moves_as": "whole pages" if row.whole else "fields",
        **_estimate(row.estimate),
    }


def _estimate(estimate: TransferEstimate) -> dict[str, Any]:
    return {
        "pages": estimate.pages,
        "descriptors": estimate.descriptors,
        "bytes": estimate.bytes,
        "full_attention_bytes": estimate.full_bytes,
        "run_bytes": estimate.run_bytes,
        "block_run_bytes": estimate.block_run_bytes,
        "strategy": estimate.strategy,
        "read_descriptors": estimate.read_descriptors,
        "read_bytes": estimate.read_bytes,
        "seconds": estimate.seconds,
    }
