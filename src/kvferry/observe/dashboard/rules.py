"""The alerts as a file of Prometheus rules."""

from __future__ import annotations

import json
from collections.abc import Iterator

from kvferry.observe.dashboard.alerts import ALERTS, Alert


def rules() -> str:
    """Return the alerts as YAML."""
    return "\n".join(["groups:", "  - name: kvferry", "    rules:", *_lines()]) + "\n"


def _lines() -> Iterator[str]:
    for alert in ALERTS:
        yield from _rule(alert)


def _rule(alert: Alert) -> Iterator[str]:
    # What JSON quotes, YAML reads alike.
    yield f"      - alert: {alert.name}"
    yield f"        expr: {json.dumps(alert.expression)}"
    yield f"        for: {alert.lasts}"
    yield "        labels:"
    yield f"          severity: {alert.severity}"
    yield "        annotations:"
    yield f"          summary: {json.dumps(alert.summary)}"
    yield f"          description: {json.dumps(alert.action)}"
