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
            "Used share of a tier's capacity. All engines that share a directory report the same value.",
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
            "Bytes in use and capacity of each tier. All engines and connectors that share a directory "
            "report the whole directory, so do not add their values.",
            "bytes",
            (
                Query(level("kvferry_tier_used_bytes", *_EACH), f"{_WHOSE} used"),
                Query(level("kvferry_tier_capacity_bytes", *_EACH), f"{_WHOSE} capacity"),
            ),
        ),
        Panel(
            "First snapshot for shared prefixes",
            "First position in a prompt at which tiers keep a snapshot of recurrent state, for prompts that "
            "share its beginning. If it is 0, they compute nearly all of it again. Models without recurrent "
            "state have no value.",
            "short",
            (
                Query(
                    level("kvferry_first_snapshot_tokens", "instance", "engine", CONNECTOR),
                    "{{instance}} {{engine}} {{connector}}",
                ),
            ),
        ),
        Panel(
            "Size of a snapshot",
            "Bytes of a snapshot of recurrent state in the tiers.",
            "bytes",
            (
                Query(
                    level("kvferry_snapshot_bytes", "instance", "engine", CONNECTOR),
                    "{{instance}} {{engine}} {{connector}}",
                ),
            ),
        ),
        Panel(
            "Chunks in and out",
            "Chunks stored to each tier, and chunks fetched from it by loads.",
            "ops",
            (
                Query(rate("kvferry_tier_stored_chunks_total", "tier"), "{{tier}} stored"),
                Query(rate("kvferry_tier_fetched_chunks_total", "tier"), "{{tier}} fetched"),
            ),
        ),
        Panel(
            "Bytes stored",
            "Bytes of the chunks that were stored to each tier.",
            "Bps",
            (Query(rate("kvferry_tier_stored_bytes_total", "tier"), "{{tier}}"),),
        ),
        Panel(
            "Chunks to be written",
            "Chunks that are not yet written to a tier. If the number grows, the tier falls behind.",
            "short",
            (Query(level("kvferry_tier_owed_chunks", "instance", "tier"), "{{instance}} {{tier}}"),),
        ),
        Panel(
            "Dropped chunks",
            "Chunks that were not stored, by reason. docs/metrics.md explains the reasons.",
            "ops",
            (Query(rate("kvferry_tier_dropped_chunks_total", "tier", "reason"), "{{tier}} {{reason}}"),),
        ),
        Panel(
            "Evicted and missed chunks",
            "Chunks evicted to make room, and chunks that a load expected in a tier but could not read, "
            "by reason.",
            "ops",
            (
                Query(rate("kvferry_tier_evicted_chunks_total", "tier"), "{{tier}} evicted"),
                Query(rate("kvferry_tier_missed_chunks_total", "tier", "reason"), "{{tier}} {{reason}}"),
            ),
        ),
        Panel(
            "Fetch time",
            "Time to fetch one chunk from a tier.",
            "s",
            quantiles("kvferry_tier_fetch_seconds", "tier"),
        ),
        Panel(
            "Store time",
            "Time to store one chunk to a tier.",
            "s",
            quantiles("kvferry_tier_store_seconds", "tier"),
        ),
    ),
)
