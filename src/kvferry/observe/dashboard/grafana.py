"""Render the dashboard as Grafana's JSON (classic model, schema 39, for Grafana 10.4 and later)."""

from __future__ import annotations

from typing import Any

from kvferry.observe.dashboard.panels import Panel, PanelRow, series
from kvferry.observe.dashboard.rows import CONNECTORS, ENGINES, FAILURES, HITS, LOADS, ROUTERS, TIERS

_ROWS = (ROUTERS, ENGINES, HITS, LOADS, TIERS, FAILURES, CONNECTORS)
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3
_ALWAYS = "vllm:num_requests_running"
"""Name of a series that every engine exports from its start."""


def dashboard() -> dict[str, Any]:
    """Return the Grafana dashboard for kvferry's metrics, as a JSON-serializable dict."""
    panels: list[dict[str, Any]] = []
    number, y = 1, 0
    for each in _ROWS:
        heading, *under = _row(each, number, y)
        number += 1 + len(under)
        if each.folded:
            # Grafana keeps the panels of a collapsed row inside its heading.
            panels.append({**heading, "panels": under})
            y += 1
        else:
            panels += [heading, *under]
            y += 1 + -(-len(under) // _COLUMNS) * _HEIGHT
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
        "templating": {"list": [_datasource(), *_variables()]},
        "annotations": {"list": []},
        "panels": panels,
    }


def _row(row: PanelRow, number: int, y: int) -> list[dict[str, Any]]:
    """Return the heading of a row at height `y`, and its panels, as Grafana's JSON objects.

    Args:
        number: panel id of the heading. The row's panels get the following ids.
    """
    places = [
        {"x": place % _COLUMNS * _WIDTH, "y": y + 1 + place // _COLUMNS * _HEIGHT}
        for place in range(len(row.panels))
    ]
    panels = [
        _panel(panel, number + 1 + place, at)
        for place, (panel, at) in enumerate(zip(row.panels, places, strict=True))
    ]
    return [_heading(row, number, y), *panels]


def _heading(row: PanelRow, number: int, y: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": "row",
        "title": row.title,
        "collapsed": row.folded,
        "gridPos": {"x": 0, "y": y, "w": _WIDTH * _COLUMNS, "h": 1},
        "panels": [],
    }


def _panel(panel: Panel, number: int, at: dict[str, int]) -> dict[str, Any]:
    stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
    custom = {"fillOpacity": 20 if panel.stacked else 0, "stacking": stacking, "showPoints": "never"}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": {**at, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": _SOURCE,
                "expr": query.expression,
                "legendFormat": query.legend,
            }
            for place, query in enumerate(panel.queries)
        ],
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _variables() -> list[dict[str, Any]]:
    model = series(_ALWAYS, {"model_name": "$model"})
    engine = series(_ALWAYS, {"model_name": "$model", "instance": "$instance"})
    return [
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
