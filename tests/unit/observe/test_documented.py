"""What `docs/metrics.md` says is what there is."""

from __future__ import annotations

import re
from pathlib import Path

from kvferry.connector.decisions import MissReason
from kvferry.observe.exposed_names import CONNECTOR, exposed_name
from kvferry.observe.metrics import METRICS, MULTI, PREFIX, MetricKind

DOCS = Path(__file__).parents[3] / "docs"
TEXT = (DOCS / "metrics.md").read_text()


def rows(text: str = TEXT) -> dict[str, list[str]]:
    """Cells after the first, of every row whose first cell is one name."""
    cells = [
        [cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines() if line[:1] == "|"
    ]
    return {row[0].strip("` "): row[1:] for row in cells if re.fullmatch(r"`\w+`", row[0].strip())}


def test_every_metric_is_there_with_its_kind_and_labels() -> None:
    found = {name: cells for name, cells in rows().items() if name.startswith(PREFIX)}
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
    names = {f"{PREFIX}{name}" for name in METRICS}
    suffixes = r"(_total|_bucket|_sum|_count)?$"
    for name in re.findall(rf"\b{PREFIX}\w+", TEXT):
        assert re.sub(suffixes, "", name) in names, name


def test_names_follow_the_conventions() -> None:
    for metric in (*METRICS.values(), *MULTI.values()):
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", metric.name)
        assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket"))
        assert (metric.kind is MetricKind.HISTOGRAM) == metric.name.endswith("_seconds")
