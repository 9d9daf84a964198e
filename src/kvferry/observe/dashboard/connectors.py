"""Dashboard panels that show which of several connectors in one engine serves requests."""

from __future__ import annotations

from kvferry.observe.dashboard.panels import Panel, PanelRow, Query, level, rate
from kvferry.observe.exposed_names import CONNECTOR

_LINE = "{{connector}}"

CONNECTORS = PanelRow(
    "Connectors, where an engine has several",
    (
        Panel(
            "Hit rate by connector",
            "Requests that it was chosen to load, of those that it was asked for.",
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
            "Of requests that it was chosen for, whatever came of its load.",
            "short",
            (Query(rate("kvferry_multi_hit_tokens_total", CONNECTOR), _LINE),),
            stacked=True,
        ),
        Panel(
            "Not served",
            "passed over: another was better, or none; nothing: it had none of the request, or no answer.",
            "reqps",
            (
                Query(rate("kvferry_multi_passed_over_total", CONNECTOR), f"{_LINE} passed over"),
                Query(rate("kvferry_multi_misses_total", CONNECTOR), f"{_LINE} nothing"),
            ),
        ),
        Panel(
            "Loads by connector and outcome",
            "After one that failed, the next best connector is asked.",
            "ops",
            (Query(rate("kvferry_multi_loads_total", CONNECTOR, "outcome"), f"{_LINE} {{{{outcome}}}}"),),
        ),
        Panel(
            "Loads under way by connector",
            "Those that are loaded between steps.",
            "short",
            (Query(level("kvferry_multi_pending_loads", CONNECTOR), _LINE),),
        ),
    ),
    folded=True,
)
