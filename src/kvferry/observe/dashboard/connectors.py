"""Dashboard panels that show which of several connectors in one engine serves requests."""

from __future__ import annotations

from kvferry.observe.dashboard.panels import Panel, PanelRow, Query, level, rate
from kvferry.observe.exposed_names import CONNECTOR

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
