"""Output of commands fits every width, cuts no number, and has one line per row without a terminal."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from functools import lru_cache

import pytest
from hypothesis import given, strategies as st
from rich.cells import cell_len
from rich.console import Console

from kvferry.planning.strategy import Costs
from kvferry.tools.bench import tiers as tiers_report, transfer as transfer_report
from kvferry.tools.models import read_model
from kvferry.tools.plan import show as plan_show
from kvferry.tools.plan.find import entries, find_config
from kvferry.tools.plan.forecast import Pricing, forecast
from kvferry.tools.plan.kept import KeptSettings, forecast_tiers
from kvferry.tools.plan.show import show_kept
from kvferry.tools.plan.side import EngineSide, resolve_layout
from kvferry.tools.report import Column, Report, fit_table, wrap
from kvferry.tools.serving.demo import report as demo_report
from kvferry.tools.serving.demo.report import AnswerVerdict, RequestRow, Screen, Transfer
from kvferry.tools.top import detail as top_detail, lines as top_lines
from kvferry.tools.top.exposition import parse_page
from kvferry.tools.top.poller import PolledAddress, Unreachable, fleet_view
from support import bench_results
from support.examples import examples
from support.metrics_page import Page, busy, several

MODELS = [entry.name for entry in entries()]
_UNIT = r"(?: [KMG]iB| B| [mµ]?s|%|(?!\w))"
NUMBER = re.compile(rf"(?<![\w.,])(?:\d[\d,.]*)?\d{_UNIT}")
# "p99" is the field's word for a percentile, "KV" and "/s" are in every engine's metrics.
WORDS = {
    "all", "answer", "asked", "at", "attention", "between", "built", "by", "cached", "capacity",
    "chunk", "connector", "control", "depth", "direction", "dropped", "engine", "evicted", "expired",
    "failed", "file", "files", "first", "full", "gain", "hit", "if", "in", "kind", "kv", "layer",
    "layers", "least", "length", "limit", "limited", "load", "loaded", "measured", "median", "method",
    "missed", "most", "moved", "now", "of", "or", "over", "owed", "p99", "per", "planning", "prompt",
    "range", "ratio", "reached", "read", "recomputed", "retention", "run", "running", "runs", "s",
    "same", "share", "since", "size", "snapshot", "snapshots", "source", "speed", "start", "state",
    "step", "target", "text", "the", "tier", "time", "token", "tokens", "transfer", "under", "uptime",
    "used", "waiting", "way", "what", "whole", "write",
}  # fmt: skip


@lru_cache
def plan_of(model: str, tokens: int) -> Callable[[int | None], str]:
    name, config = find_config(model)
    reading = read_model(config, name=name)
    sides = EngineSide(), EngineSide(tp=2)
    found = forecast(reading, sides, tokens, Pricing(Costs()))
    kept = forecast_tiers(reading, EngineSide(layout=resolve_layout("auto", reading)), KeptSettings())

    def printed(width: int | None) -> str:
        out = io.StringIO()
        report = Report(Console(file=out), width)
        plan_show.show(found, report)
        show_kept(kept, report)
        return out.getvalue()

    return printed


@lru_cache
def top_of(rate: int, engines: int) -> Callable[[int | None], str]:
    def seen(number: int) -> PolledAddress:
        pages = [Page("organisation/model-70b"), Page("organisation/model-70b")]
        busy(pages[0], rate)
        busy(pages[1], 3 * rate)
        if number % 2:
            several(pages[1])
        before, now = (parse_page(page.text(), at) for page, at in zip(pages, (0.0, 1.0), strict=True))
        return PolledAddress(f"http://10.0.0.{number}:8000", "decode", before, now)

    silent = PolledAddress("http://10.0.0.99:8000", "prefill", silence=Unreachable(0.0, "status 404"))
    fleet = fleet_view([*map(seen, range(engines)), silent], 60.0)
    return lambda width: top_lines.text(fleet, width, 1.0)


@lru_cache
def demo_of(*sizes: int) -> Callable[[int | None], str]:
    rows = []
    for size in sizes:
        groups = {"0 full_attention": size, **{f"{n} sliding_window(64)": size // 3 for n in range(1, 6)}}
        moved = sum(groups.values())
        load = Transfer(
            "cmpl-a",
            "ready",
            1000,
            moved,
            groups,
            7 * size,
            1,
            size // 1000,
            12345,
            1e-4,
            0.00123,
            0.2,
            "a:1",
            None,
        )
        rows.append(RequestRow(size // 500, load, 0.0912, AnswerVerdict.YES))
    rows.append(RequestRow(70, None, 12.34, AnswerVerdict.OWN_GAP))

    def printed(width: int | None) -> str:
        out = io.StringIO()
        Screen(Console(file=out), width).results(rows)
        return out.getvalue()

    return printed


@lru_cache
def bench_of(milliseconds: int) -> Callable[[int | None], str]:
    seconds = milliseconds / 1000
    names = "host, LBNHC", "host, BHLNC", "file", "object"
    speeds = [
        bench_results.tier_speed(seconds / depth, depth, tier=name) for name in names for depth in (1, 8, 32)
    ]
    transfer = bench_results.transfer((seconds, 2 * seconds, seconds / 3))

    def printed(width: int | None) -> str:
        out = io.StringIO()
        report = Report(Console(file=out), width)
        transfer_report.show(transfer, report)
        tiers_report.show(bench_results.tiers(*speeds), report)
        return out.getvalue()

    return printed


OUTPUTS = st.one_of(
    st.builds(plan_of, st.sampled_from(MODELS), st.just(4096)),
    st.builds(top_of, st.integers(1, 3000), st.integers(1, 3)),
    st.builds(demo_of, st.integers(1000, 1 << 40), st.integers(1000, 1 << 20)),
    st.builds(bench_of, st.integers(10, 100_000)),
)


def headings() -> set[str]:
    columns = [*plan_show.COLUMNS, *demo_report.COLUMNS, *top_lines.COLUMNS]
    columns += [*top_detail.SOURCE, *top_detail.CONNECTOR, *top_detail.TIER]
    columns += [
        *transfer_report.COLUMNS,
        *tiers_report.SPEEDS,
        *tiers_report.NOTES,
    ]
    return {word.strip(",").lower() for column in columns for word in re.split(r"[ /]", column.heading)}


@examples(20)
@given(OUTPUTS, st.integers(40, 120))
def test_lines_fit_and_every_number_is_whole(printed, width):
    lines = printed(width).splitlines()
    assert max(map(cell_len, lines)) <= width, "\n".join(lines)
    whole = set(NUMBER.findall(printed(None)))
    for line in lines:
        for number in NUMBER.findall(line):
            assert number in whole, (number, line)
        assert "…" not in line


@pytest.mark.parametrize("printed", [plan_of("gemma-3-27b-it", 4096), demo_of(1 << 20), top_of(1000, 2)])
@pytest.mark.parametrize("width", [40, 57, 80, 100, 120])
def test_rows_have_all_numbers_of_the_columns_that_are_shown(printed, width):
    full, narrow = printed(None), printed(width)
    for name in ("moved", "time", "KV moved", "same text", "hit now", "capacity", "running"):
        for column in ("52 window 1,024", "10 full attention", "all", "peer", "host"):
            values = re.search(rf"^{re.escape(column)} .*$", full, re.MULTILINE)
            shown = re.search(rf"^{re.escape(column)} .*$", narrow, re.MULTILINE)
            assert (values is None) == (shown is None), (name, column)
            if values is not None and shown is not None:
                assert {*re.split(" {2,}", shown[0])} <= {*re.split(" {2,}", values[0])}


def test_headings_are_whole_words():
    new = sorted(headings() - WORDS)
    assert not new, f"write these out in the headings of tables, or add whole words to WORDS: {new}"


@examples(60)
@given(st.integers(1, 10), st.integers(0, 4), st.integers(4, 120), st.data())
def test_a_table_shows_whole_cells_or_none(columns, rows, width, data):
    cell = st.from_regex(r"[0-9]{1,9}( [KM]iB)?", fullmatch=True)
    table = [
        Column("name", left=True),
        *(Column(f"column {n}", rank=data.draw(st.integers(0, 3))) for n in range(columns)),
    ]
    cells = [[f"row-{row}", *(data.draw(cell) for _ in range(columns))] for row in range(rows)]
    fitted = fit_table(table, cells, width)
    if fitted.head:
        assert max(map(cell_len, fitted.lines)) <= width
    kept = [n for n, column in enumerate(table) if column.heading not in fitted.left_out]
    assert {n for n, column in enumerate(table) if not column.rank} <= {*kept}
    for row, lines in zip(cells, fitted.rows, strict=True):
        said = " ".join(lines)
        assert all(row[n] in said for n in kept if width >= 20)


def test_columns_of_the_highest_rank_are_left_out_first():
    columns = (
        Column("name", left=True),
        Column("one", rank=2),
        Column("two", rank=1),
        Column("three", rank=2),
    )
    assert fit_table(columns, [["a", "1", "2", "3"]], 21).lines == [
        "name  one  two  three",
        "a       1    2      3",
    ]
    assert fit_table(columns, [["a", "1", "2", "3"]], 20).left_out == ("three",)
    assert fit_table(columns, [["a", "1", "2", "3"]], 13).left_out == ("one", "three")


def test_a_row_without_a_limit_is_one_line_with_every_field():
    columns = (Column("name", left=True), Column("kinds of layer", left=True), Column("bytes", rank=9))
    assert fit_table(columns, [["a", "one\ntwo", ""], ["b", "three", "4 KiB"]], None).lines == [
        "name  kinds of layer  bytes",
        "a     one, two            -",
        "b     three           4 KiB",
    ]


@examples(60)
@given(st.text("0123456789 abc", max_size=200), st.integers(20, 120))
def test_wrapping_loses_no_word_and_parts_no_number_from_its_unit(text, width):
    lines = wrap(text, width)
    if all(len(word) <= width // 2 for word in re.findall(r"(?:\d+ )?\S+", text)):
        assert " ".join(" ".join(lines).split()) == " ".join(text.split())
    assert max(map(len, lines)) <= width
    assert wrap("moved 416 MiB", 10) == ["moved", "416 MiB"]
