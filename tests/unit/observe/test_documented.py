"""What `docs/metrics.md` says is what there is."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kvferry.connector.decisions import MissReason
from kvferry.observe.exposed_names import CONNECTOR, ROUTER_PREFIX, exposed_name
from kvferry.observe.metrics import METRICS, MULTI, PREFIX, MetricKind
from kvferry.serving.router.backends import Backend, BackendState
from kvferry.serving.router.metrics import AloneReason, Outcome, RequestRecord, RouterMetrics

DOCS = Path(__file__).parents[3] / "docs"
TEXT = (DOCS / "metrics.md").read_text()


def rows(text: str = TEXT) -> dict[str, list[str]]:
    """Cells after the first, of every row whose first cell is one name."""
    cells = [
        [cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines() if line[:1] == "|"
    ]
    return {row[0].strip("` "): row[1:] for row in cells if re.fullmatch(r"`\w+`", row[0].strip())}


def test_every_metric_is_there_with_its_kind_and_labels() -> None:
    found = {
        name: cells
        for name, cells in rows().items()
        if name.startswith(PREFIX) and not name.startswith(ROUTER_PREFIX)
    }
    expected = {}
    for metric in METRICS.values():
        name = f"{PREFIX}{metric.name}{'_total' if metric.kind is MetricKind.COUNTER else ''}"
        expected[name] = (str(metric.kind), metric.labels)
    told = {
        name: (cells[0], tuple(re.findall(r"`(\w+)`", cells[1].partition(":")[0])))
        for name, cells in found.items()
    }
    assert told == expected
    for name, cells in found.items():
        assert cells[2], f"{name} is not explained"


def router() -> dict[str, tuple[str, set[str]]]:
    """Kind and labels of every metric of a router's page, by its name."""
    metrics = RouterMetrics(lambda: [Backend("decode", "http://d")])
    metrics.begin()
    metrics.end(RequestRecord(first_byte=0.0, prefill_seconds=0.0, status=200, complete=True))
    found = {}
    for family in text_string_to_metric_families(metrics.page().decode()):
        if family.name.startswith(ROUTER_PREFIX) and not family.name.endswith("_created"):
            name = family.name + ("_total" if family.type == "counter" else "")
            found[name] = (family.type, {label for one in family.samples for label in one.labels} - {"le"})
    return found


def test_every_metric_of_the_router_is_there_with_its_kind_and_labels() -> None:
    told = {
        name: (cells[0], set(re.findall(r"`(\w+)`", cells[1])))
        for name, cells in rows().items()
        if name.startswith(ROUTER_PREFIX)
    }
    assert told == router()
    assert all(rows()[name][2] for name in told)


def test_every_outcome_of_the_router_is_there() -> None:
    for value in (*Outcome, *AloneReason, *BackendState):
        assert f"`{value}`" in TEXT.partition("## Router")[2], value


def test_every_metric_of_the_choice_between_connectors_is_there_with_its_labels() -> None:
    told = {
        name: (CONNECTOR, *re.findall(r"`(\w+)`", cells[0].partition(":")[0]))
        for name, cells in rows((DOCS / "multi.md").read_text()).items()
        if name.startswith(PREFIX)
    }
    assert told == {exposed_name(metric): metric.labels for metric in MULTI.values()}


def test_every_reason_of_a_miss_is_there() -> None:
    found = rows()
    assert {str(miss) for miss in MissReason} <= found.keys()
    assert all(found[miss][0] for miss in MissReason)


def test_every_name_in_the_text_is_a_metric() -> None:
    names = {f"{PREFIX}{name}" for name in METRICS} | {name.removesuffix("_total") for name in router()}
    suffixes = r"(_total|_bucket|_sum|_count)?$"
    for name in re.findall(rf"\b{PREFIX}\w+", TEXT):
        assert re.sub(suffixes, "", name) in names, name


def test_names_follow_the_conventions() -> None:
    for metric in (*METRICS.values(), *MULTI.values()):
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", metric.name)
        assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket"))
        assert (metric.kind is MetricKind.HISTOGRAM) == metric.name.endswith("_seconds")
