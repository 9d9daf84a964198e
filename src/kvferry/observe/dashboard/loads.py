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
            "Over all ranks.",
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
            "Loads under way",
            "More than a disk can serve add up.",
            "short",
            (Query(level("kvferry_pending_loads", "source"), "{{source}}"),),
        ),
        Panel(
            "Load seconds",
            "As the request waited, of loads that are ready.",
            "s",
            quantiles("kvferry_load_seconds", "source"),
        ),
        Panel(
            "Transfer seconds by stage",
            "Of loads from peers, the slowest rank: plan, read, check of the lease.",
            "s",
            quantiles("kvferry_transfer_seconds", "stage"),
        ),
        Panel(
            "Descriptors",
            "Of loads from peers, after neighbours were merged.",
            "ops",
            (Query(_DESCRIPTORS, "descriptors"),),
        ),
        Panel(
            "Coalescing",
            "Prepared pages by descriptors: what merging neighbours saves.",
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
            "Few make reading slow.",
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
            "Loads that did not serve",
            "failed; expired: passed load_timeout_seconds; dropped: nobody waited for it any more.",
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
            "Computed although a source had bid them, after its load had failed.",
            "short",
            (Query(rate("kvferry_recomputed_tokens_total", "source"), "{{source}}"),),
        ),
        Panel(
            "Late blocks",
            "Held by loads past their deadline.",
            "short",
            (Query(level("kvferry_late_blocks", "instance"), "{{instance}}"),),
        ),
        Panel(
            "Leases",
            "Prompts that wait for their consumer, with their blocks.",
            "short",
            (Query(level("kvferry_leases", "instance"), "{{instance}}"),),
        ),
        Panel(
            "Leases granted and ended",
            "expired: the consumer was silent for lease_seconds.",
            "ops",
            (
                Query(rate("kvferry_leases_granted_total"), "granted"),
                Query(rate("kvferry_leases_ended_total", "outcome"), "{{outcome}}"),
            ),
        ),
    ),
)
