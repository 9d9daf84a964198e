"""Render the dashboard as Grafana's JSON (classic model, schema 39, for Grafana 10.4 and later)."""

from __future__ import annotations

from itertools import count
from string import ascii_uppercase
from typing import Any

from kvferry.tools.dashboard.panels import Panel, series
from kvferry.tools.dashboard.rows import ROWS

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3
_ALWAYS = "vllm:num_requests_running"
"""Name of a series that every engine exports from its start."""


def dashboard() -> dict[str, Any]:
    """Return the Grafana dashboard for kvferry's metrics, as a JSON-serializable dict."""
    panels: list[dict[str, Any]] = []
    y, ids = 0, count(1)
    for row in ROWS:
        heading: dict[str, Any] = {
            "id": next(ids),
            "type": "row",
            "title": row.title,
            "collapsed": row.folded,
            "gridPos": {"x": 0, "y": y, "w": _WIDTH * _COLUMNS, "h": 1},
        }
        under = [_panel(panel, next(ids), place, y + 1) for place, panel in enumerate(row.panels)]
        # Grafana keeps the panels of a collapsed row inside its heading.
        heading["panels"] = under if row.folded else []
        panels += [heading] if row.folded else [heading, *under]
        y += 1 if row.folded else 1 + -(-len(under) // _COLUMNS) * _HEIGHT
    return {
        "uid": "kvferry",
        "title": "kvferry",
        "description": "KV cache between engines and tiers: requests, hits, loads, storage, failures.",
        "tags": ["kvferry", "vllm"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "panels": panels,
    }


def _panel(panel: Panel, number: int, place: int, top: int) -> dict[str, Any]:
    x, y = place % _COLUMNS * _WIDTH, top + place // _COLUMNS * _HEIGHT
    stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
    custom = {"fillOpacity": 20 if panel.stacked else 0, "stacking": stacking, "showPoints": "never"}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": {"x": x, "y": y, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": letter, "datasource": _SOURCE, "expr": query.expression, "legendFormat": query.legend}
            for letter, query in zip(ascii_uppercase, panel.queries, strict=False)
        ],
    }


def _variables() -> list[dict[str, Any]]:
    model = series(_ALWAYS, {"model_name": "$model"})
    engine = series(_ALWAYS, {"model_name": "$model", "instance": "$instance"})
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        _variable("model", "Model", f"label_values({series(_ALWAYS)}, model_name)"),
        _variable("instance", "Engine", f"label_values({model}, instance)"),
        _variable("engine", "Number", f"label_values({engine}, engine)"),
    ]


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        # When the time range changes.
        "refresh": 2,
        # By alphabet.
        "sort": 1,
        "multi": True,
        "includeAll": True,
        # Not a list of all values, which could be too long for a query.
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }
