"""The dashboard and the alerts query existing metrics, in files that Grafana and Prometheus accept."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import grafana_foundation_sdk.cog.plugins as grafana_plugins
import promql_parser
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client.parser import text_string_to_metric_families

from kvferry.observe.metrics import (
    CONNECTOR,
    EXPOSED,
    METRICS,
    MULTI,
    PREFIX,
    ROUTER,
    ROUTER_PREFIX,
    SUFFIXES,
    MetricKind,
)
from kvferry.tools.dashboard import dashboard, rules
from kvferry.tools.dashboard.alerts import ALERTS
from kvferry.tools.dashboard.panels import series
from kvferry.tools.serving.role import Role
from kvferry.tools.serving.router.backends import Backend
from kvferry.tools.serving.router.metrics import FollowedRank, RouterMetrics

BESIDE = {"instance", "job", "model_name", "engine"}
"""Labels that Prometheus and vLLM give every series."""


def panels() -> list[dict]:
    """Of all rows, folded or not."""
    return [each for panel in dashboard()["panels"] for each in (panel, *panel.get("panels", ()))]


def charts() -> list[dict]:
    return [panel for panel in panels() if panel["type"] == "timeseries"]


def queries() -> list[tuple[str, str]]:
    """Expressions and legends of all panels, with values in place of Grafana's variables."""
    found = [(target["expr"], target["legendFormat"]) for panel in charts() for target in panel["targets"]]
    return [(expression.replace("$__rate_interval", "5m"), legend) for expression, legend in found]


def expressions() -> list[str]:
    return [expression for expression, _ in queries()] + [alert.expression for alert in ALERTS]


def labels() -> dict[str, set[str]]:
    """By the name of every series that an engine or the router shows, its labels."""
    found: dict[str, set[str]] = {}
    for name, metric in (EXPOSED | ROUTER).items():
        beside = BESIDE | ({CONNECTOR} if name.startswith(PREFIX) else set())
        own = set(metric.labels) | ({"instance", "job"} if name in ROUTER else beside)
        if metric.kind is MetricKind.HISTOGRAM:
            found |= {f"{name}_sum": own, f"{name}_count": own, f"{name}_bucket": own | {"le"}}
        else:
            found[name] = own
    return found


def parts(node) -> Iterator:
    """A parsed expression and all that is in it."""
    yield node
    for name in ("expr", "lhs", "rhs", "args", "vector_selector", "param"):
        inner = getattr(node, name, None)
        for each in inner if isinstance(inner, list) else [inner]:
            if each is not None:
                yield from parts(each)


def selectors(expression: str) -> list:
    found = [
        each for each in parts(promql_parser.parse(expression)) if type(each).__name__ == "VectorSelector"
    ]
    # Whatever the parser's tree is like, no selector is left out.
    assert len(found) == len(re.findall(r"(?:kvferry_|vllm:)\w+", expression)) > 0
    return found


def summed_by(expression: str) -> list[set[str]]:
    return [set(re.split(r",\s*", by)) for by in re.findall(r"sum by \(([^)]*)\)", expression)]


@pytest.mark.parametrize("expression", expressions())
def test_every_expression_queries_existing_metrics_and_labels(expression):
    known = labels()
    asked = selectors(expression)
    for selector in asked:
        assert selector.name in known
        assert {matcher.name for matcher in selector.matchers.matchers} <= known[selector.name]
    # A sum is over one metric, or it could not be said whose labels it is by.
    for by, inside in re.findall(r"sum by \(([^)]*)\) \((?:\w+\()?((?:kvferry_|vllm:)\w+)", expression):
        assert set(re.split(r",\s*", by)) <= known[inside]


def test_an_unknown_metric_or_label_is_refused():
    with pytest.raises(ValueError, match="kvferry_gone_total is no series of an engine or of the router"):
        series("kvferry_gone_total")
    with pytest.raises(ValueError, match="kvferry_load_seconds is no series"):
        series("kvferry_load_seconds")
    with pytest.raises(ValueError, match="kvferry_hits_total has no label tier, only "):
        series("kvferry_hits_total", tier="file")


def test_the_router_shows_the_metrics_that_the_dashboard_queries():
    backends = [Backend(Role.DECODE, "http://127.0.0.1:1")]
    shown = {}
    followed = [FollowedRank("http://127.0.0.1:1", 0, "127.0.0.1:2", 3, 4)]
    page = RouterMetrics(lambda: backends, followed).page().decode()
    for family in text_string_to_metric_families(page):
        shown |= {sample.name: family.type for sample in family.samples}
    wanted = {
        name + suffix: metric.kind
        for name, metric in ROUTER.items()
        for suffix in (SUFFIXES if metric.kind is MetricKind.HISTOGRAM else [""])
        if metric.labels != ("outcome", "reason")  # no series before a request has ended
    }
    own = {
        name: kind
        for name, kind in shown.items()
        if name.startswith(ROUTER_PREFIX) and not name.endswith("_created")
    }
    assert own == {name: str(kind) for name, kind in wanted.items()}


def test_every_metric_of_kvferry_is_on_the_dashboard():
    asked = {selector.name for expression, _ in queries() for selector in selectors(expression)}
    shown = {re.sub(r"_bucket$", "", name) for name in asked if name.startswith(PREFIX)}
    missing = sorted({name for name in EXPOSED | ROUTER if name.startswith(PREFIX)} - shown)
    assert not missing, "add a panel for these metrics to a module of kvferry/tools/dashboard"
    assert len(shown) == len(METRICS) + len(MULTI) + len(ROUTER)


@pytest.mark.parametrize(("expression", "legend"), queries())
def test_a_legend_names_the_labels_that_its_expression_keeps(expression, legend):
    named = set(re.findall(r"{{(\w+)}}", legend))
    assert all(named <= by for by in summed_by(expression)) or not named
    # Lines that a legend does not tell apart cannot be read.
    left = set.union(set(), *summed_by(expression)) - {"le"}
    assert left - named <= {"engine"}


def test_bytes_of_a_tier_are_never_summed_over_engines_that_share_it():
    said = {"instance", "engine", CONNECTOR, "tier"}
    for expression in expressions():
        for by, _ in re.findall(r"sum by \(([^)]*)\) \((kvferry_tier_(?:used|capacity)_bytes)", expression):
            assert said <= set(re.split(r",\s*", by)), expression


def test_every_query_filters_by_all_variables():
    variables = {f"${each['name']}" for each in dashboard()["templating"]["list"][1:]}
    assert variables == {"$model", "$instance", "$engine"}
    for expression, _ in queries():
        for selector in selectors(expression):
            values = {matcher.value for matcher in selector.matchers.matchers}
            assert variables <= values or selector.name.startswith(ROUTER_PREFIX), expression


def test_grafanas_own_types_know_every_field_of_the_dashboard():
    grafana_plugins.register_default_plugins()
    written = json.loads(json.dumps(dashboard()))
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(written)))
    assert not list(lost(written, read, ""))


def lost(written, read, path: str) -> Iterator[str]:
    if isinstance(written, dict):
        for name, value in written.items():
            yield from [f"{path}/{name}"] if name not in read else lost(value, read[name], f"{path}/{name}")
    elif isinstance(written, list):
        assert len(written) == len(read)
        for number, (one, other) in enumerate(zip(written, read, strict=True)):
            yield from lost(one, other, f"{path}/{number}")
    elif written != read:
        yield path


def test_panels_have_ids_and_places_of_their_own():
    assert len({panel["id"] for panel in panels()}) == len(panels())
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert all(panel["description"] for panel in charts())


def test_the_last_row_has_the_metrics_of_several_connectors_and_is_collapsed():
    *rest, last = dashboard()["panels"]
    assert (last["type"], last["collapsed"]) == ("row", True)
    assert all("kvferry_multi_" in target["expr"] for panel in last["panels"] for target in panel["targets"])
    assert not any(panel.get("collapsed") or panel.get("panels") for panel in rest)


def test_every_panel_uses_the_variable_data_source():
    assert dashboard()["templating"]["list"][0]["type"] == "datasource"
    uids = set(re.findall(r'"uid": "([^"]*)"', json.dumps(dashboard()))) - {"kvferry"}
    assert uids == {"${datasource}"}


def test_rules_are_the_alerts_as_yaml():
    [group] = yaml.safe_load(rules())["groups"]
    assert [rule["alert"] for rule in group["rules"]] == [alert.name for alert in ALERTS]
    for rule, alert in zip(group["rules"], ALERTS, strict=True):
        assert (rule["expr"], rule["for"]) == (alert.expression, alert.lasts)
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert rule["annotations"] == {"summary": alert.summary, "description": alert.action}


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_names_labels_of_its_expression_and_existing_metrics(alert):
    named = set(re.findall(r"\$labels\.(\w+)", alert.summary + alert.action))
    assert named <= summed_by(alert.expression)[0]
    assert named >= {"instance"} | (set() if ROUTER_PREFIX in alert.expression else {"model_name", "engine"})
    for name in re.findall(rf"{PREFIX}\w+", alert.action):
        assert name in EXPOSED | ROUTER, name
    assert re.fullmatch(r"\d+m", alert.lasts)


def test_every_alert_is_documented():
    page = (Path(__file__).parents[3] / "docs" / "top.md").read_text()
    said = dict(re.findall(r"^\| `(KVFerry\w+)` \|.*\| (\d+) min \|$", page, re.MULTILINE))
    expected = {alert.name: alert.lasts.removesuffix("m") for alert in ALERTS}
    lines = "".join(
        f"| `{n}` | MEANING | {lasts} min |\n" for n, lasts in expected.items() if said.get(n) != lasts
    )
    assert not lines, f"add these rows to the alerts in docs/top.md, or correct them:\n{lines}"
    assert said.keys() == expected.keys(), "remove the rows of other alerts from docs/top.md"
