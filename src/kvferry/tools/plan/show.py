"""Forecasts of handovers and tiers, and the table of models, as text and as values for JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from kvferry.common.units import counted, format_bytes, format_count, format_seconds
from kvferry.geometry import GroupKind, GroupPattern
from kvferry.tools.models import read_model
from kvferry.tools.models.store import LayerCache
from kvferry.tools.plan.find import entries
from kvferry.tools.plan.fleet import FleetForecast
from kvferry.tools.plan.forecast import Forecast, LayerForecast, TransferEstimate
from kvferry.tools.plan.kept import KeptGroup, TierForecast
from kvferry.tools.plan.side import EngineSide
from kvferry.tools.report import Column, Report

_ALL = "all"
_NAMES = {
    GroupKind.FULL: "full attention",
    GroupKind.SLIDING: "window",
    GroupKind.CHUNKED: "chunk",
    GroupKind.MLA: "latent",
    GroupKind.STATE: "state",
}

# The table shows the size of attention layers for this many tokens.
PER_TOKENS = 1024

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
_GROUP_COLUMNS = (
    Column("layers", left=True),
    Column("chunk or snapshot", rank=1),
    Column("file size"),
    Column(f"files of {PER_TOKENS:,} tokens", rank=2),
)
_FLEET_COLUMNS = (
    Column("prefix in another engine"),
    Column("read"),
    Column("time"),
    Column("computing is as fast at", rank=1),
)
_SHARED_COLUMNS = (
    Column("shared"),
    Column("second prompt"),
    Column("third prompt"),
    Column("first snapshot at", rank=2),
    Column("without first_snapshot_tokens", rank=1),
)


def show(forecast: Forecast, report: Report) -> None:
    """Print the forecast of a handover: both engines, a table with one row per kind of layer, and notes."""
    report.heading(f"{forecast.model}, a prompt of {counted(forecast.tokens, 'token')}")
    report.text(result(forecast))
    sides = zip((forecast.source, forecast.destination), forecast.blocks, strict=True)
    here, there = (engine(side, tokens) for side, tokens in sides)
    report.text(f"from {here}")
    report.text(f"to {'an engine with the same settings' if here == there else there}")
    if forecast.refused:
        report.text()
        for reason in forecast.refused:
            report.text(f"Refused: {reason}")
    else:
        kept = [f"{format_bytes(forecast.token_bytes)} per token"] if forecast.token_bytes else []
        if forecast.state_bytes:
            kept.append(f"{format_bytes(forecast.state_bytes)} of state per sequence")
        report.text(f"KV cache: {' and '.join(kept)}")
        report.text()
        report.table(COLUMNS, [*table_cells(forecast)], last_is_total=len(forecast.rows) > 1)
        report.text()
        report.note("A run is contiguous in both engines: one NIXL descriptor.")
    for note in forecast.notes:
        report.note(f"Note: {note}.")


def describe(cache: LayerCache) -> str:
    """Return a short name for a kind of layer, such as ``full attention``, ``window 1,024`` or ``latent``."""
    return _named(cache, cache.fields[0].name if cache.kind is GroupKind.MLA else _NAMES[cache.kind])


def _named(group: GroupPattern, name: str) -> str:
    return f"{name} {group.attention_span:,}" if group.attention_span else name


def result(forecast: Forecast) -> str:
    """Return the result of a forecast in a few words: bytes, time, and the share of full attention."""
    if forecast.refused:
        return "refused: the destination computes the prompt itself"
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
    for model in models_as_json():
        kinds = ", ".join(f"{layers['count']} {layers['kind']}" for layers in model["layers"])
        also = f" (also {', '.join(model['also'])})" if model["also"] else ""
        report.text(f"{model['name']}{also}: {kinds}")
        report.text(model["source"], "dim", indent=2)


def show_kept(kept: TierForecast, report: Report) -> None:
    """Print the forecast of what an engine's tiers store for a prompt."""
    report.text()
    if not kept.groups:
        report.heading("Tiers")
        report.text(f"This cache cannot be stored: {kept.why_not}.")
        return
    apart = f", snapshots at least {kept.first_tokens:,} tokens apart"
    report.heading(
        f"Tiers: chunks of {kept.chunk_tokens:,} tokens{apart * (kept.first_tokens != kept.chunk_tokens)}"
    )
    report.table(_GROUP_COLUMNS, [[*_kept_group(group, kept.chunk_tokens)] for group in kept.groups])
    report.text()
    report.heading(f"Storage for a prompt of {counted(kept.prompt, 'token')}, by settings")
    report.table(*_choices(kept))
    if kept.shared:
        report.text()
        report.heading("Tokens that prompts load of a prefix that they share, if all is stored")
        rows = [
            (one.tokens, one.second, one.third, kept.first_snapshot_tokens, one.without)
            for one in kept.shared
        ]
        report.table(_SHARED_COLUMNS, [[f"{tokens:,}" for tokens in row] for row in rows])
    if kept.why_not:
        report.text(f"No prefix can be loaded: {kept.why_not}.")


def show_fleet(fleet: FleetForecast, report: Report) -> None:
    """Print the forecast of a fleet: what its host memory keeps, and reads by the length of the prefix."""
    report.text()
    memory = f"{format_bytes(fleet.host_bytes)} of host memory each"
    report.heading(f"Fleet: {counted(fleet.engines, 'engine')} with {memory}")
    report.text(f"an engine keeps {counted(fleet.tokens, 'token')}")
    report.text(f"it finds up to {fleet.engines * fleet.tokens:,}, if no two engines keep the same")
    directory = format_bytes(fleet.directory_bytes)
    report.text(f"a directory of {counted(fleet.chunks, 'chunk')} takes {directory}")
    report.text()
    rows = [
        [
            f"{read.tokens:,}",
            format_bytes(read.bytes),
            format_seconds(read.seconds),
            f"{format_count(round(read.tokens_per_second))} tokens/s",
        ]
        for read in fleet.reads
    ]
    report.table(_FLEET_COLUMNS, rows)


def _kept_group(one: KeptGroup, chunk_tokens: int) -> Iterator[str]:
    yield f"{one.layers} {_named(one.group, _NAMES[one.group.kind])}"
    yield format_bytes(one.group.chunk_bytes)
    yield format_bytes(one.file_bytes)
    yield "" if one.is_state else format_bytes(one.file_bytes * PER_TOKENS / chunk_tokens)


def _choices(kept: TierForecast) -> tuple[list[Column], list[list[str]]]:
    """Return (columns, cells of each row) of a table of the storage, with one row per choice of settings."""
    state = any(group.is_state for group in kept.groups)
    thinned = any(group.group.attention_span for group in kept.groups) or any(
        choice.snapshot_tokens != kept.chunk_tokens for choice in kept.choices
    )
    columns, rows = list[Column](), [list[str]() for _ in kept.choices]
    if state:
        columns += [Column("retention"), Column("tokens per step"), Column("snapshots", rank=2)]
    if thinned:
        columns.append(Column("tokens between snapshots"))
    columns += [Column("files"), Column("recomputed at most", rank=1)]
    for row, choice in zip(rows, kept.choices, strict=True):
        if state:
            retention = choice.steps.retention
            row.append("None" if retention is None else f"{retention:,}")
            row += [f"{choice.steps.step_tokens:,}", f"{choice.snapshots:,}"]
        if thinned:
            row.append(f"{choice.snapshot_tokens:,}")
        row += [format_bytes(choice.bytes), f"{choice.gap_tokens:,}"]
    return columns, rows


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
        "groups": [
            {
                "label": one.group.label,
                "layers": one.layers,
                "content_bytes": one.group.content_bytes,
                "chunk_bytes": one.group.chunk_bytes,
                "file_bytes": one.file_bytes,
                "snapshot": one.is_state,
            }
            for one in kept.groups
        ],
        "settings": [
            {
                "prefix_cache_retention_interval": one.steps.retention,
                "max_num_batched_tokens": one.steps.step_tokens,
                "snapshot_tokens": one.snapshot_tokens,
                "snapshots": one.snapshots,
                "bytes": one.bytes,
                "gap_tokens": one.gap_tokens,
            }
            for one in kept.choices
        ],
        "first_snapshot_tokens": kept.first_snapshot_tokens,
        "shared_prefixes": [
            {
                "tokens": one.tokens,
                "second_prompt_tokens": one.second,
                "third_prompt_tokens": one.third,
                "without_setting_tokens": one.without,
            }
            for one in kept.shared
        ],
        "why_not": kept.why_not,
    }


def fleet_as_json(fleet: FleetForecast) -> dict[str, Any]:
    """Return the forecast of a fleet as values that can be written as JSON."""
    return {
        "engines": fleet.engines,
        "host_bytes": fleet.host_bytes,
        "tokens": fleet.tokens,
        "chunks": fleet.chunks,
        "directory_bytes": fleet.directory_bytes,
        "reads": [
            {"tokens": read.tokens, "bytes": read.bytes, "seconds": read.seconds} for read in fleet.reads
        ],
    }


def as_json(forecast: Forecast) -> dict[str, Any]:
    """Return the forecast of a handover as values that can be written as JSON."""
    rows, (block, to_block) = forecast.rows, forecast.blocks
    found: dict[str, Any] = {
        "model": forecast.model,
        "tokens": forecast.tokens,
        "source": _side(forecast.source, block),
        "destination": _side(forecast.destination, to_block),
    }
    if not forecast.refused:
        found |= {
            "kv_bytes_per_token": forecast.token_bytes,
            "state_bytes": forecast.state_bytes,
            "page_bytes": max(row.page_bytes for row in rows),
            "to_page_bytes": max(row.to_page_bytes for row in rows),
            **_estimate(forecast.whole),
            "groups": [_row(row) for row in rows],
        }
    return {**found, "refused": list(forecast.refused), "notes": list(forecast.notes)}


def _side(side: EngineSide, block_tokens: int) -> dict[str, Any]:
    return {
        "tp": side.tp,
        "pp": side.pp,
        "dcp": side.dcp,
        "interleave": side.turn_tokens,
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
