"""Dashboard panels about KV loads: bytes, durations, failures and leases."""

from __future__ import annotations

from kvferry.observe.dashboard.panels import Panel, PanelRow, Query, level, minus, quantiles, rate
from kvferry.observe.metrics import CONNECTOR
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


_LINE = "{{connector}}"

CONNECTORS = PanelRow(
    "Connectors, if an engine has several",
    (
        Panel(
            "Hit rate by connector",
            "Share of the requests for which a connector was asked that it was chosen to load.",
            "percentunit",
            (
                Query(
                    f"{rate('kvferry_multi_hits_total', CONNECTOR)}"
                    f" / {rate('kvferry_multi_queries_total', CONNECTOR)}",
                    _LINE,
                ),
            ),
        ),
        Panel(
            "Tokens to load by connector",
            "Tokens that each connector was chosen to load. They count even if the load fails.",
            "short",
            (Query(rate("kvferry_multi_hit_tokens_total", CONNECTOR), _LINE),),
            stacked=True,
        ),
        Panel(
            "Requests not loaded by connector",
            "passed over: the connector had tokens, but another connector or none was chosen. "
            "missed: the connector had no tokens, or did not answer in time.",
            "reqps",
            (
                Query(rate("kvferry_multi_passed_over_total", CONNECTOR), f"{_LINE} passed over"),
                Query(rate("kvferry_multi_misses_total", CONNECTOR), f"{_LINE} missed"),
            ),
        ),
        Panel(
            "Loads by connector and outcome",
            "Loads that have ended. After a failed load, another connector may load the request.",
            "ops",
            (Query(rate("kvferry_multi_loads_total", CONNECTOR, "outcome"), f"{_LINE} {{{{outcome}}}}"),),
        ),
        Panel(
            "Loads in flight by connector",
            "Asynchronous loads that have not ended.",
            "short",
            (Query(level("kvferry_multi_pending_loads", CONNECTOR), _LINE),),
        ),
    ),
    folded=True,
)


ENGINES = PanelRow(
    "Engines",
    (
        Panel(
            "Requests",
            "Requests that vLLM runs, and requests that wait.",
            "short",
            (
                Query(level("vllm:num_requests_running", "instance"), "{{instance}} running"),
                Query(level("vllm:num_requests_waiting", "instance"), "{{instance}} waiting"),
            ),
        ),
        Panel(
            "Prompt tokens by origin",
            "Tokens that were computed, found in the engine's own prefix cache, or loaded by a connector.",
            "short",
            (Query(rate("vllm:prompt_tokens_by_source_total", "source"), "{{source}}"),),
            stacked=True,
        ),
        Panel(
            "Time to first token",
            "Time from a request to its first token, as the API server measures it.",
            "s",
            quantiles("vllm:time_to_first_token_seconds"),
        ),
    ),
)

HITS = PanelRow(
    "Hits and misses",
    (
        Panel(
            "Hit rate",
            "Share of requests for which a source loaded tokens. Requests whose prompt was already in the "
            "engine's own prefix cache do not count.",
            "percentunit",
            (
                Query(
                    f"{rate('kvferry_hits_total', 'source')} / "
                    + minus(
                        rate("kvferry_queries_total", "source"),
                        rate("kvferry_misses_total", "source", reason="local"),
                    ),
                    "{{source}}",
                ),
            ),
        ),
        Panel(
            "Queries",
            "Requests for which a source was asked for KV.",
            "reqps",
            (Query(rate("kvferry_queries_total", "source"), "{{source}}"),),
        ),
        Panel(
            "Tickets",
            "Requests whose prompt another engine had computed: hits, and why others were not loaded.",
            "reqps",
            (Query(rate("kvferry_tickets_total", "outcome"), "{{outcome}}"),),
            stacked=True,
        ),
        Panel(
            "Hit tokens",
            "Tokens loaded by each source, by the tier they came from.",
            "short",
            (Query(rate("kvferry_hit_tokens_total", "source", "tier"), "{{source}} {{tier}}"),),
            stacked=True,
        ),
        Panel(
            "Misses by reason",
            "Requests for which a source loaded nothing. docs/metrics.md explains the reasons.",
            "reqps",
            (
                Query(
                    rate("kvferry_misses_total", "source", "reason", "group"),
                    "{{source}} {{reason}} {{group}}",
                ),
            ),
            stacked=True,
        ),
    ),
)


ROUTERS = PanelRow(
    "Router",
    (
        Panel(
            "Requests by outcome",
            "Requests that have ended: with KV of a prefill engine (split), computed by a decode engine, or "
            "failed. docs/metrics.md explains the reasons.",
            "reqps",
            (
                Query(
                    rate("kvferry_router_requests_total", "outcome", "reason"),
                    "{{outcome}} {{reason}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Engines by state",
            "Number of engines that the router finds up, resting, down or draining.",
            "short",
            (Query(level("kvferry_router_engine_state", "role", "state"), "{{role}} {{state}}"),),
            stacked=True,
        ),
        Panel(
            "Requests under way",
            "Requests under way in all, and those that each engine works on.",
            "short",
            (
                Query(level("kvferry_router_active_requests"), "all"),
                Query(level("kvferry_router_engine_requests", "role", "url"), "{{role}} {{url}}"),
            ),
        ),
        Panel(
            "Time to the first byte",
            "Time from a request to the first byte of the answer's body.",
            "s",
            quantiles("kvferry_router_first_byte_seconds"),
        ),
        Panel(
            "Time of prefill, and of whole requests",
            "Time until a prefill engine has answered, and until the last byte of the answer.",
            "s",
            (
                *quantiles("kvferry_router_prefill_seconds", title="prefill"),
                *quantiles("kvferry_router_request_seconds", title="request"),
            ),
        ),
        Panel(
            "Bytes from and to callers",
            "Bytes of the bodies of requests and of answers.",
            "Bps",
            (
                Query(rate("kvferry_router_received_bytes_total"), "from callers"),
                Query(rate("kvferry_router_sent_bytes_total"), "to callers"),
            ),
        ),
    ),
)


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
