"""Dashboard panels about KV loads: bytes, durations, failures and leases."""

from __future__ import annotations

from kvferry.observe.dashboard.panels import Panel, PanelRow, Query, level, quantiles, rate
from kvferry.tiers.names import PEER

_DESCRIPTORS = rate("kvferry_transfer_descriptors_total")

LOADS = PanelRow(
    "Loads and transfers",
    (
        Panel(
            "Bytes by group and strategy",
            "Bytes loaded, summed over all ranks, by KV cache group and transfer strategy.",
            "Bps",
            (
                Query(
                    rate("kvferry_load_bytes_total", "source", "group", "strategy"),
                    "{{source}} {{group}} {{strategy}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Loads in flight",
            "Loads that have not ended. If the number grows, loads start faster than the source serves them.",
            "short",
            (Query(level("kvferry_pending_loads", "source"), "{{source}}"),),
        ),
        Panel(
            "Load time",
            "Time that requests waited for successful loads.",
            "s",
            quantiles("kvferry_load_seconds", "source"),
        ),
        Panel(
            "Transfer time by stage",
            "Time of loads from peers on the slowest rank: planning, reading, and checking the lease.",
            "s",
            quantiles("kvferry_transfer_seconds", "stage"),
        ),
        Panel(
            "Descriptors",
            "Contiguous reads (descriptors) of loads from peers. Neighbouring pages share a descriptor.",
            "ops",
            (Query(_DESCRIPTORS, "descriptors"),),
        ),
        Panel(
            "Speed of READs",
            "READs from the peer of the last load, measured at first contact, by the load's strategy. Slow "
            "READs with another strategy than shared point to a wrong transport.",
            "Bps",
            (
                Query(
                    level("kvferry_read_bytes_per_second", "instance", "strategy"),
                    "{{instance}} {{strategy}}",
                ),
            ),
        ),
        Panel(
            "Coalescing",
            "Pages per descriptor of loads from peers. More is better.",
            "short",
            (
                Query(
                    f"{rate('kvferry_transfer_pages_total')} / {_DESCRIPTORS}",
                    "pages per descriptor",
                ),
            ),
        ),
        Panel(
            "Bytes per descriptor",
            "Mean size of the descriptors of loads from peers. Small descriptors make reading slow.",
            "bytes",
            (
                Query(
                    f"{rate('kvferry_load_bytes_total', source=PEER)} / {_DESCRIPTORS}",
                    "bytes",
                ),
            ),
        ),
    ),
)

FAILURES = PanelRow(
    "Failures and leases",
    (
        Panel(
            "Failed, expired and dropped loads",
            "failed: see the engine's log. expired: not ended after load_timeout_seconds. dropped: the "
            "request ended first, or another part of its prefix failed.",
            "ops",
            (
                Query(
                    rate("kvferry_loads_total", "source", "outcome", outcome="!ready"),
                    "{{source}} {{outcome}}",
                ),
            ),
        ),
        Panel(
            "Recomputed tokens",
            "Tokens that were computed because their load failed.",
            "short",
            (Query(rate("kvferry_recomputed_tokens_total", "source"), "{{source}}"),),
        ),
        Panel(
            "Late blocks",
            "Blocks that loads still hold after their deadline or their request has ended.",
            "short",
            (Query(level("kvferry_late_blocks", "instance"), "{{instance}}"),),
        ),
        Panel(
            "Leases",
            "Leases on blocks of prompts that another engine has not read yet.",
            "short",
            (Query(level("kvferry_leases", "instance"), "{{instance}}"),),
        ),
        Panel(
            "Leases granted and ended",
            "released: the consumer has read the KV, or the lease was given up. expired: the consumer was "
            "silent for lease_seconds, or the blocks were needed and nobody had claimed the lease.",
            "ops",
            (
                Query(rate("kvferry_leases_granted_total"), "granted"),
                Query(rate("kvferry_leases_ended_total", "outcome"), "{{outcome}}"),
            ),
        ),
    ),
)
