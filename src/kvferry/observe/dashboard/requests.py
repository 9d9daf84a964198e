"""Dashboard panels about requests: sources of prompt tokens, hits, and misses with their reasons."""

from __future__ import annotations

from kvferry.observe.dashboard.expressions import minus
from kvferry.observe.dashboard.panels import Panel, PanelRow, Query, level, quantiles, rate

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
