"""The forecast of the tiers as plain numbers, for scripts. docs/plan.md explains every key."""

from __future__ import annotations

from typing import Any

from kvferry.plan.choices import StorageChoice
from kvferry.plan.kept import KeptGroup, TierForecast


def kept_as_json(kept: TierForecast) -> dict[str, Any]:
    """Return the forecast of the tiers as JSON values, in bytes and tokens."""
    return {
        "prompt_tokens": kept.prompt,
        "chunk_tokens": kept.chunk_tokens,
        "first_tokens": kept.first_tokens,
        "groups": [_group(one) for one in kept.groups],
        "settings": [_choice(one) for one in kept.choices],
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


def _choice(one: StorageChoice) -> dict[str, Any]:
    return {
        "prefix_cache_retention_interval": one.steps.retention,
        "max_num_batched_tokens": one.steps.step_tokens,
        "snapshot_tokens": one.snapshot_tokens,
        "snapshots": one.snapshots,
        "bytes": one.bytes,
        "gap_tokens": one.gap_tokens,
    }
