"""Dashboard panels about requests: sources of prompt tokens, hits, and misses with their reasons."""

from __future__ import annotations

from kvferry.observe.dashboard.expressions import less
from kvferry.observe.dashboard.panels import Panel, PanelRow, Query, level, quantiles, rate

ENGINES = PanelRow(
    "Engines",
    (
        Panel(
            "Requests",
            "Of vLLM.",
            "short",
            (
                Query(level("vllm:num_requests_running", "instance"), "{{instance}} running"),
                Query(level("vllm:num_requests_waiting", "instance"), "{{instance}} waiting"),
            ),
        ),
        Panel(
            "Prompt tokens, by where they come from",
            "Computed, from the engine's own prefix cache, or brought from outside.",
            "short",
            (Query(rate("vllm:prompt_tokens_by_source_total", "source"), "{{source}}"),),
            stacked=True,
        ),
        Panel(
            "Time to first token",
            "As the API server sees it.",
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
            "Of requests that had something to look for: the engine's own cache lacked it.",
            "percentunit",
            (
                Query(
                    f"{rate('kvferry_hits_total', 'source')} / "
                    + less(
                        rate("kvferry_queries_total", "source"),
                        rate("kvferry_misses_total", "source", reason="local"),
                    ),
                    "{{source}}",
                ),
            ),
        ),
        Panel(
            "Queries",
            "Requests that a source was asked for.",
            "reqps",
            (Query(rate("kvferry_queries_total", "source"), "{{source}}"),),
        ),
        Panel(
            "Hit tokens",
            "Brought by a source, by the tier where they rested.",
            "short",
            (Query(rate("kvferry_hit_tokens_total", "source", "tier"), "{{source}} {{tier}}"),),
            stacked=True,
        ),
        Panel(
            "Misses by reason",
            "One reason per query; docs/metrics.md says what each means.",
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
