"""Dashboard panels about the router: how requests end, its engines, and the times that callers see."""

from __future__ import annotations

from kvferry.observe.dashboard.panels import Panel, PanelRow, Query, level, quantiles, rate

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
