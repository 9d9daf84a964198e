"""The rows of the dashboard, in the order of the page."""

from __future__ import annotations

from kvferry.observe import CONNECTOR
from kvferry.tiers import PEER
from kvferry.tools.dashboard.panels import (
    PanelRow,
    Query,
    level,
    levels,
    minus,
    panel,
    quantiles,
    rate,
    rates,
    row,
)

_DESCRIPTORS = rate("kvferry_transfer_descriptors_total")
# Every engine that shares a tier reports the usage of the whole tier, so usage is not summed over engines.
_EACH = ("instance", "engine", CONNECTOR, "tier")
_WHOSE = "{{instance}} {{connector}} {{tier}}"

ROWS: tuple[PanelRow, ...] = (
    row(
        "Router",
        panel(
            "Requests by outcome",
            "Requests that have ended: with KV of a prefill engine (split), computed by a decode engine, or "
            "failed. docs/metrics.md explains the reasons.",
            "reqps",
            rates("kvferry_router_requests_total", "outcome", "reason"),
            stacked=True,
        ),
        panel(
            "Streams continued",
            "Streams whose decode engine has failed and that another one has gone on with.",
            "reqps",
            rates("kvferry_router_continued_streams_total"),
        ),
        panel(
            "Requests with a hint",
            "Requests whose engine was told which other engines have a prefix of the prompt in host memory, "
            "and times that KV events, from which the router knows it, were lost.",
            "reqps",
            rates("kvferry_router_hinted_requests_total", also="hinted"),
            rates("kvferry_router_event_gaps_total", "url", also="gaps"),
        ),
        panel(
            "Blocks known",
            "Blocks of tokens that each engine has in host memory, by the KV events that the router follows.",
            "short",
            levels("kvferry_router_known_blocks", "url"),
        ),
        panel(
            "Engines by state",
            "Number of engines that the router finds up, resting, down or draining.",
            "short",
            levels("kvferry_router_engine_state", "role", "state"),
            stacked=True,
        ),
        panel(
            "Requests under way",
            "Requests under way in all, and those that each engine works on.",
            "short",
            levels("kvferry_router_active_requests", also="all"),
            levels("kvferry_router_engine_requests", "role", "url"),
        ),
        panel(
            "Time to the first byte",
            "Time from a request to the first byte of the answer's body.",
            "s",
            *quantiles("kvferry_router_first_byte_seconds"),
        ),
        panel(
            "Time of prefill, and of whole requests",
            "Time until a prefill engine has answered, and until the last byte of the answer.",
            "s",
            *quantiles("kvferry_router_prefill_seconds", also="prefill "),
            *quantiles("kvferry_router_request_seconds", also="request "),
        ),
        panel(
            "Bytes from and to callers",
            "Bytes of the bodies of requests and of answers.",
            "Bps",
            rates("kvferry_router_received_bytes_total", also="from callers"),
            rates("kvferry_router_sent_bytes_total", also="to callers"),
        ),
    ),
    row(
        "Engines",
        panel(
            "Requests",
            "Requests that vLLM runs, and requests that wait.",
            "short",
            levels("vllm:num_requests_running", "instance", also="running"),
            levels("vllm:num_requests_waiting", "instance", also="waiting"),
        ),
        panel(
            "Prompt tokens by origin",
            "Tokens that were computed, found in the engine's own prefix cache, or loaded by a connector.",
            "short",
            rates("vllm:prompt_tokens_by_source_total", "source"),
            stacked=True,
        ),
        panel(
            "Time to first token",
            "Time from a request to its first token, as the API server measures it.",
            "s",
            *quantiles("vllm:time_to_first_token_seconds"),
        ),
    ),
    row(
        "Hits and misses",
        panel(
            "Hit rate",
            "Share of requests for which a source loaded tokens. Requests whose prompt was already in the "
            "engine's own prefix cache do not count.",
            "percentunit",
            Query(
                f"{rate('kvferry_hits_total', 'source')} / "
                + minus(
                    rate("kvferry_queries_total", "source"),
                    rate("kvferry_misses_total", "source", reason="local"),
                ),
                "{{source}}",
            ),
        ),
        panel(
            "Queries",
            "Requests for which a source was asked for KV.",
            "reqps",
            rates("kvferry_queries_total", "source"),
        ),
        panel(
            "Tickets",
            "Requests whose prompt another engine had computed: hits, and why others were not loaded.",
            "reqps",
            rates("kvferry_tickets_total", "outcome"),
            stacked=True,
        ),
        panel(
            "Hit tokens",
            "Tokens loaded by each source, by the tier they came from.",
            "short",
            rates("kvferry_hit_tokens_total", "source", "tier"),
            stacked=True,
        ),
        panel(
            "Misses by reason",
            "Requests for which a source loaded nothing. docs/metrics.md explains the reasons.",
            "reqps",
            rates("kvferry_misses_total", "source", "reason", "group"),
            stacked=True,
        ),
    ),
    row(
        "Loads and transfers",
        panel(
            "Bytes by group and strategy",
            "Bytes loaded, summed over all ranks, by KV cache group and transfer strategy.",
            "Bps",
            rates("kvferry_load_bytes_total", "source", "group", "strategy"),
            stacked=True,
        ),
        panel(
            "Loads in flight",
            "Loads that have not ended. If the number grows, loads start faster than the source serves them.",
            "short",
            levels("kvferry_pending_loads", "source"),
        ),
        panel(
            "Load time",
            "Time that requests waited for successful loads.",
            "s",
            *quantiles("kvferry_load_seconds", "source"),
        ),
        panel(
            "Transfer time by stage",
            "Time of loads from peers on the slowest rank: planning, reading, and checking the lease.",
            "s",
            *quantiles("kvferry_transfer_seconds", "stage"),
        ),
        panel(
            "Descriptors",
            "Contiguous reads (descriptors) of loads from peers. Neighbouring pages share a descriptor.",
            "ops",
            Query(_DESCRIPTORS, "descriptors"),
        ),
        panel(
            "Speed of READs",
            "READs from the peer of the last load, measured at first contact, by the load's strategy. Slow "
            "READs with another strategy than shared point to a wrong transport.",
            "Bps",
            levels("kvferry_read_bytes_per_second", "instance", "strategy"),
        ),
        panel(
            "Coalescing",
            "Pages per descriptor of loads from peers. More is better.",
            "short",
            Query(f"{rate('kvferry_transfer_pages_total')} / {_DESCRIPTORS}", "pages per descriptor"),
        ),
        panel(
            "Bytes per descriptor",
            "Mean size of the descriptors of loads from peers. Small descriptors make reading slow.",
            "bytes",
            Query(f"{rate('kvferry_load_bytes_total', source=PEER)} / {_DESCRIPTORS}", "bytes"),
        ),
    ),
    row(
        "Storage",
        panel(
            "Fullness",
            "Used share of a tier's capacity. All engines that share a directory report the same value.",
            "percentunit",
            Query(
                f"{level('kvferry_tier_used_bytes', *_EACH)}"
                f" / {level('kvferry_tier_capacity_bytes', *_EACH)}",
                _WHOSE,
            ),
        ),
        panel(
            "Used and capacity",
            "Bytes in use and capacity of each tier. All engines and connectors that share a directory "
            "report the whole directory, so do not add their values.",
            "bytes",
            Query(level("kvferry_tier_used_bytes", *_EACH), f"{_WHOSE} used"),
            Query(level("kvferry_tier_capacity_bytes", *_EACH), f"{_WHOSE} capacity"),
        ),
        panel(
            "First snapshot for shared prefixes",
            "First position in a prompt at which tiers keep a snapshot of recurrent state, for prompts that "
            "share its beginning. If it is 0, they compute nearly all of it again. Models without recurrent "
            "state have no value.",
            "short",
            levels("kvferry_first_snapshot_tokens", "instance", "engine", CONNECTOR),
        ),
        panel(
            "Size of a snapshot",
            "Bytes of a snapshot of recurrent state in the tiers.",
            "bytes",
            levels("kvferry_snapshot_bytes", "instance", "engine", CONNECTOR),
        ),
        panel(
            "Chunks in and out",
            "Chunks stored to each tier, and chunks fetched from it by loads.",
            "ops",
            rates("kvferry_tier_stored_chunks_total", "tier", also="stored"),
            rates("kvferry_tier_fetched_chunks_total", "tier", also="fetched"),
        ),
        panel(
            "Bytes stored",
            "Bytes of the chunks that were stored to each tier.",
            "Bps",
            rates("kvferry_tier_stored_bytes_total", "tier"),
        ),
        panel(
            "Read by other engines",
            "Bytes of chunks in host memory that other engines of the fleet were told to read.",
            "Bps",
            rates("kvferry_tier_served_bytes_total", "instance", "tier"),
        ),
        panel(
            "Engines that others read",
            "Engines of the fleet, by the address at which others read their host memory.",
            "short",
            levels("kvferry_fleet_info", "instance", "address"),
        ),
        panel(
            "Chunks for other engines",
            "Chunks that other engines of the fleet were told to read, and those that they were told to read "
            "elsewhere, because of the limit serve_per_second.",
            "ops",
            rates("kvferry_tier_served_chunks_total", "instance", "tier", also="served"),
            rates("kvferry_tier_refused_chunks_total", "instance", "tier", also="refused"),
        ),
        panel(
            "Chunks to be written",
            "Chunks that are not yet written to a tier. If the number grows, the tier falls behind.",
            "short",
            levels("kvferry_tier_owed_chunks", "instance", "tier"),
        ),
        panel(
            "Dropped and declined chunks",
            "Chunks that were not stored, by reason. docs/metrics.md explains the reasons.",
            "ops",
            rates("kvferry_tier_dropped_chunks_total", "tier", "reason"),
            rates("kvferry_tier_declined_chunks_total", "tier", "reason"),
        ),
        panel(
            "Evicted and missed chunks",
            "Chunks evicted to make room, and chunks that a load expected in a tier but could not read, "
            "by reason.",
            "ops",
            rates("kvferry_tier_evicted_chunks_total", "tier", also="evicted"),
            rates("kvferry_tier_missed_chunks_total", "tier", "reason"),
        ),
        panel(
            "Hints of requests",
            "Hints by kind and outcome. partial and ignored: no room within hint_share, or not in the tiers.",
            "ops",
            rates("kvferry_hints_total", "hint", "outcome"),
        ),
        panel(
            "Retained by hints",
            "Bytes in host memory that hints of requests retain.",
            "bytes",
            levels("kvferry_retained_bytes", "instance"),
        ),
        panel(
            "Fetch time",
            "Time to fetch one chunk from a tier.",
            "s",
            *quantiles("kvferry_tier_fetch_seconds", "tier"),
        ),
        panel(
            "Store time",
            "Time to store one chunk to a tier.",
            "s",
            *quantiles("kvferry_tier_store_seconds", "tier"),
        ),
    ),
    row(
        "Tenants, if some have settings",
        panel(
            "Prompt tokens by tenant",
            "Prompt tokens of requests that could ask a source, and tokens that were loaded for them.",
            "short",
            rates("kvferry_tenant_prompt_tokens_total", "tenant", also="prompts"),
            rates("kvferry_tenant_hit_tokens_total", "tenant", "tier", also="loaded"),
        ),
        panel(
            "Used by tenant",
            "Bytes that each tenant uses in a tier. In a directory, those of all engines.",
            "bytes",
            Query(level("kvferry_tenant_used_bytes", *_EACH, "tenant"), f"{_WHOSE} {{{{tenant}}}}"),
        ),
        panel(
            "Evicted chunks by tenant",
            "Chunks of each tenant that were evicted to make room.",
            "ops",
            rates("kvferry_tenant_evicted_chunks_total", "tenant", "tier"),
        ),
    ),
    row(
        "Failures and leases",
        panel(
            "Failed, expired and dropped loads",
            "failed: see the engine's log. expired: not ended after load_timeout_seconds. dropped: the "
            "request ended first, or another part of its prefix failed.",
            "ops",
            rates("kvferry_loads_total", "source", "outcome", outcome="!ready"),
        ),
        panel(
            "Recomputed tokens",
            "Tokens that were computed because their load failed.",
            "short",
            rates("kvferry_recomputed_tokens_total", "source"),
        ),
        panel(
            "Late blocks",
            "Blocks that loads still hold after their deadline or their request has ended.",
            "short",
            levels("kvferry_late_blocks", "instance"),
        ),
        panel(
            "Leases",
            "Leases on blocks of prompts that another engine has not read yet.",
            "short",
            levels("kvferry_leases", "instance"),
        ),
        panel(
            "Leases granted and ended",
            "released: the consumer has read the KV, or the lease was given up. expired: the consumer was "
            "silent for lease_seconds, or the blocks were needed and nobody had claimed the lease.",
            "ops",
            rates("kvferry_leases_granted_total", also="granted"),
            rates("kvferry_leases_ended_total", "outcome"),
        ),
    ),
    row(
        "Connectors, if an engine has several",
        panel(
            "Hit rate by connector",
            "Share of the requests for which a connector was asked that it was chosen to load.",
            "percentunit",
            Query(
                f"{rate('kvferry_multi_hits_total', CONNECTOR)}"
                f" / {rate('kvferry_multi_queries_total', CONNECTOR)}",
                "{{connector}}",
            ),
        ),
        panel(
            "Tokens to load by connector",
            "Tokens that each connector was chosen to load. They count even if the load fails.",
            "short",
            rates("kvferry_multi_hit_tokens_total", CONNECTOR),
            stacked=True,
        ),
        panel(
            "Requests not loaded by connector",
            "passed over: the connector had tokens, but another connector or none was chosen. "
            "missed: the connector had no tokens, or did not answer in time.",
            "reqps",
            rates("kvferry_multi_passed_over_total", CONNECTOR, also="passed over"),
            rates("kvferry_multi_misses_total", CONNECTOR, also="missed"),
        ),
        panel(
            "Loads by connector and outcome",
            "Loads that have ended. After a failed load, another connector may load the request.",
            "ops",
            rates("kvferry_multi_loads_total", CONNECTOR, "outcome"),
        ),
        panel(
            "Loads in flight by connector",
            "Asynchronous loads that have not ended.",
            "short",
            levels("kvferry_multi_pending_loads", CONNECTOR),
        ),
        folded=True,
    ),
)
