"""`docs/metrics.md` and `docs/multi.md` list every metric, label and reason."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvferry.connector.events import MissReason
from kvferry.observe.metrics import CONNECTOR, METRICS, MULTI, PREFIX, ROUTER_PREFIX, MetricKind, exposed_name
from kvferry.tools.serving.role import Role
from kvferry.tools.serving.router.backends import Backend, BackendState
from kvferry.tools.serving.router.metrics import (
    AloneReason,
    FollowedRank,
    Outcome,
    RequestRecord,
    RouterMetrics,
)

DOCS = Path(__file__).parents[3] / "docs"
TEXT = (DOCS / "metrics.md").read_text()


def rows(text: str = TEXT) -> dict[str, list[str]]:
    """Cells after the first, of every row whose first cell is one name."""
    cells = [
        [cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines() if line[:1] == "|"
    ]
    return {row[0].strip("` "): row[1:] for row in cells if re.fullmatch(r"`\w+`", row[0].strip())}


def row(name: str, kind: str, labels: Iterable[str]) -> str:
    """Return the row of a metric, to paste into `docs/metrics.md`."""
    return f"| `{name}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | MEANING |\n"


def check_rows(page: str, told: dict[str, Any], expected: dict[str, Any], lines: dict[str, str]) -> None:
    """Fail if a page does not tell of every metric what is expected, with the rows to paste."""
    wrong = "".join(lines[name] for name in expected if told.get(name) != expected[name])
    assert not wrong, f"add these rows to {page}, or correct them:\n{wrong}"
    assert not told.keys() - expected.keys(), f"remove these rows from {page}"


def test_every_metric_is_listed_with_its_kind_and_labels() -> None:
    expected = {exposed_name(metric): (str(metric.kind), metric.labels) for metric in METRICS.values()}
    told = {
        name: (cells[0], tuple(re.findall(r"`(\w+)`", cells[1].partition(":")[0])))
        for name, cells in rows().items()
        if name.startswith(PREFIX) and not name.startswith(ROUTER_PREFIX)
    }
    check_rows(
        "docs/metrics.md", told, expected, {name: row(name, *cells) for name, cells in expected.items()}
    )
    assert not [name for name in told if not rows()[name][2]], "explain these metrics in docs/metrics.md"


def router() -> dict[str, tuple[str, set[str]]]:
    """Kind and labels of every metric of a router's page, by its name."""
    followed = [FollowedRank("http://d", 0, "127.0.0.1:1", 2, 3)]
    metrics = RouterMetrics(lambda: [Backend(Role.DECODE, "http://d")], followed)
    metrics.begin()
    metrics.end(RequestRecord(first_byte=0.0, prefill_seconds=0.0, status=200, complete=True))
    found = {}
    for family in text_string_to_metric_families(metrics.page().decode()):
        if family.name.startswith(ROUTER_PREFIX) and not family.name.endswith("_created"):
            name = family.name + ("_total" if family.type == "counter" else "")
            found[name] = (family.type, {label for one in family.samples for label in one.labels} - {"le"})
    return found


def test_every_metric_of_the_router_is_listed_with_its_kind_and_labels() -> None:
    told = {
        name: (cells[0], set(re.findall(r"`(\w+)`", cells[1])))
        for name, cells in rows().items()
        if name.startswith(ROUTER_PREFIX)
    }
    lines = {name: row(name, kind, sorted(labels)) for name, (kind, labels) in router().items()}
    check_rows("the section Router of docs/metrics.md", told, router(), lines)
    assert not [name for name in told if not rows()[name][2]], "explain these metrics in docs/metrics.md"


def test_every_outcome_of_the_router_is_listed() -> None:
    section = TEXT.partition("## Router")[2]
    missing = [
        f"`{value}`" for value in (*Outcome, *AloneReason, *BackendState) if f"`{value}`" not in section
    ]
    assert not missing, "explain these values of labels in the section Router of docs/metrics.md"


def test_every_metric_of_the_choice_between_connectors_is_listed_with_its_labels() -> None:
    told = {
        name: (CONNECTOR, *re.findall(r"`(\w+)`", cells[0].partition(":")[0]))
        for name, cells in rows((DOCS / "multi.md").read_text()).items()
        if name.startswith(PREFIX)
    }
    expected = {exposed_name(metric): metric.labels for metric in MULTI.values()}
    lines = {
        name: f"| `{name}` | {', '.join(f'`{label}`' for label in labels[1:])} | MEANING |\n"
        for name, labels in expected.items()
    }
    check_rows("docs/multi.md", told, expected, lines)


def test_every_reason_of_a_miss_is_listed() -> None:
    lines = "".join(f"| `{miss}` | MEANING |\n" for miss in MissReason if not rows().get(miss, [""])[0])
    assert not lines, f"add these rows to the reasons of a miss in docs/metrics.md:\n{lines}"


def test_every_name_in_the_text_is_a_metric() -> None:
    names = {f"{PREFIX}{name}" for name in METRICS} | {name.removesuffix("_total") for name in router()}
    suffixes = r"(_total|_bucket|_sum|_count)?$"
    unknown = [n for n in re.findall(rf"\b{PREFIX}\w+", TEXT) if re.sub(suffixes, "", n) not in names]
    assert not unknown, "correct these names in docs/metrics.md: no such metrics exist"


def test_names_of_metrics_follow_the_conventions() -> None:
    for metric in (*METRICS.values(), *MULTI.values()):
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", metric.name)
        assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket"))
        assert (metric.kind is MetricKind.HISTOGRAM) == metric.name.endswith("_seconds")
