"""The forecasts of the handover and of the tiers as JSON, for scripts. docs/plan.md explains every key."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvferry.geometry.models import read_model
from kvferry.tools.plan.choices import SharedPrefix, StorageChoice
from kvferry.tools.plan.find import entries
from kvferry.tools.plan.forecast import Forecast, LayerForecast, RefusedTransfer
from kvferry.tools.plan.kept import KeptGroup, TierForecast
from kvferry.tools.plan.show import describe
from kvferry.tools.plan.side import EngineSide
from kvferry.tools.plan.totals import TransferEstimate


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
        "groups": [_group(one) for one in kept.groups],
        "settings": [_choice(one) for one in kept.choices],
        "first_snapshot_tokens": kept.first_snapshot_tokens,
        "shared_prefixes": [_shared(one) for one in kept.shared],
        "why_not": kept.why_not,
    }


def _group(one: KeptGroup) -> dict[str, Any]:
    return {
        "label": one.group.label,
        "layers": one.layers,
        "content_bytes": one.group.content_bytes,
        "chunk_bytes": one.group.chunk_bytes,
        "file_bytes": one.file_bytes,
        "snapshot": one.is_state,
    }


def _shared(one: SharedPrefix) -> dict[str, int]:
    return {
        "tokens": one.tokens,
        "second_prompt_tokens": one.second,
        "third_prompt_tokens": one.third,
        "without_setting_tokens": one.without,
    }


def _choice(one: StorageChoice) -> dict[str, Any]:
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
