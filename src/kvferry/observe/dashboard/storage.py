"""Dashboard panels about tiers: fullness, stores, fetches, evictions and dropped chunks."""

from __future__ import annotations

from kvferry.observe.dashboard.panels import Panel, PanelRow, Query, level, quantiles, rate
from kvferry.observe.exposed_names import CONNECTOR

_EACH = ("instance", "engine", CONNECTOR, "tier")
"""Labels by which usage gauges are shown.

Every engine that shares a tier reports the usage of the whole tier. So usage must not be summed over
engines.
"""
_WHOSE = "{{instance}} {{connector}} {{tier}}"

TIERS = PanelRow(
    "Storage",
    (
        Panel(
            "Fullness",
            "Of a directory, by all that share it.",
            "percentunit",
            (
                Query(
                    f"{level('kvferry_tier_used_bytes', *_EACH)}"
                    f" / {level('kvferry_tier_capacity_bytes', *_EACH)}",
                    _WHOSE,
                ),
            ),
        ),
        Panel(
            "Used and capacity",
            "Engines, and connectors of one engine, that share a directory each say the whole of it.",
            "bytes",
            (
                Query(level("kvferry_tier_used_bytes", *_EACH), f"{_WHOSE} used"),
                Query(level("kvferry_tier_capacity_bytes", *_EACH), f"{_WHOSE} capacity"),
            ),
        ),
        Panel(
            "Chunks in and out",
            "Stored to a tier, fetched from it.",
            "ops",
            (
                Query(rate("kvferry_tier_stored_chunks_total", "tier"), "{{tier}} stored"),
                Query(rate("kvferry_tier_fetched_chunks_total", "tier"), "{{tier}} fetched"),
            ),
        ),
        Panel(
            "Bytes stored",
            "Of chunks that a tier has taken.",
            "Bps",
            (Query(rate("kvferry_tier_stored_bytes_total", "tier"), "{{tier}}"),),
        ),
        Panel(
            "Owed",
            "Chunks that wait to be written. Growing: the tier falls behind.",
            "short",
            (Query(level("kvferry_tier_owed_chunks", "instance", "tier"), "{{instance}} {{tier}}"),),
        ),
        Panel(
            "Dropped",
            "Chunks that were not stored, by reason.",
            "ops",
            (Query(rate("kvferry_tier_dropped_chunks_total", "tier", "reason"), "{{tier}} {{reason}}"),),
        ),
        Panel(
            "Evicted and missed",
            "Chunks that made room; chunks that were thought to be there and were not given.",
            "ops",
            (
                Query(rate("kvferry_tier_evicted_chunks_total", "tier"), "{{tier}} evicted"),
                Query(rate("kvferry_tier_missed_chunks_total", "tier", "reason"), "{{tier}} {{reason}}"),
            ),
        ),
        Panel("Fetch seconds", "Of one chunk.", "s", quantiles("kvferry_tier_fetch_seconds", "tier")),
        Panel("Store seconds", "Of one chunk.", "s", quantiles("kvferry_tier_store_seconds", "tier")),
    ),
)
