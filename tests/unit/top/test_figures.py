"""Figures of engines, from the text of their `/metrics`."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st
from rich.cells import cell_len

from kvferry.common.errors import ProtocolError
from kvferry.observe.metrics import MetricsDelta
from kvferry.tools.top.exposition import HistogramBucket, Scrape, parse_page, quantile, window
from kvferry.tools.top.figures import Figures, compute_figures
from kvferry.tools.top.layout import number
from kvferry.tools.top.lines import cached_share, screen, text
from kvferry.tools.top.poller import PolledAddress, fleet_view
from support.examples import examples
from support.metrics_page import Page, busy, several


def of(before: Scrape | None, now: Scrape, engine: str = "0") -> Figures:
    return compute_figures([window(before, now, engine)])


def test_a_page_has_figures_of_each_engine():
    page = Page("a model", engines=2)
    busy(page, 1, engine=0)
    busy(page, 2, engine=1)
    found = parse_page(page.text(), 5.0)
    assert (found.at, found.started, found.model, found.ferry) == (5.0, 1000.0, "a model", True)
    assert [of(None, found, engine).totals.prompt_tokens for engine in ("0", "1")] == [1500, 3000]
    assert compute_figures([window(None, found, engine) for engine in "01"]).totals.prompt_tokens == 4500


def test_an_engine_without_kvferry_has_figures():
    found = parse_page('vllm:num_requests_running{engine="0",model_name="m"} 3.0\n', 0.0)
    assert not found.ferry
    assert of(None, found).levels.running == 3


def test_escaped_labels_are_read_as_they_were_written():
    strange = (
        r'kvferry_misses_total{engine="0",group="1 \"x\"\\,{}",model_name="m",reason="a\nb",source="peer"} 1'
        "\n"
    )
    [one] = of(None, parse_page(strange, 0.0)).totals.misses
    assert (one.reason, one.group) == ("a\nb", '1 "x"\\,{}')


@pytest.mark.parametrize("page", ["", "<html>\n", "up 1\n", "process_start_time_seconds 3\n"])
def test_a_page_of_something_else_is_refused(page):
    with pytest.raises(ProtocolError, match="has nothing of vllm: or kvferry_"):
        parse_page(page, 0.0)


@pytest.mark.parametrize("line", ['{engine="0"', '{engine="0"} many', "{engine=0} 1", ""])
def test_a_broken_page_is_refused(line):
    with pytest.raises(ProtocolError, match="/metrics is not in the format of Prometheus"):
        parse_page(f"vllm:num_requests_running{line}\n", 0.0)


PAGE = Page()
busy(PAGE)
SCRAPE = parse_page(PAGE.text(), 0.0)
LINES = PAGE.text().splitlines()
PIECES = [
    "",
    '"',
    "{",
    "}",
    "=",
    ",",
    " ",
    "\\",
    "NaN",
    "+Inf",
    "-1",
    "1e400",
    "#",
    'le="x"',
    "\x1b[2J",
    "\u202e",
]


@given(
    st.lists(st.tuples(st.integers(0, len(LINES) - 1), st.floats(0, 1), st.sampled_from(PIECES)), max_size=4)
)
@examples(60)
def test_a_damaged_page_is_refused_or_shown_without_control_characters(changes):
    lines = list(LINES)
    for number_of_line, place, piece in changes:
        line = lines[number_of_line]
        at = int(place * len(line))
        lines[number_of_line] = line[:at] + piece + line[at + 1 :]
    try:
        seen = PolledAddress("http://a:1", before=SCRAPE, now=parse_page("\n".join(lines), 1.0))
    except ProtocolError:
        return
    found = fleet_view([seen], 0.0)
    shown = screen(found, 80, 24, chosen=None, every=1.0)
    assert len(shown) <= 24
    assert all(line.text.isprintable() for line in shown)
    assert text(found, 80, 1.0).replace("\n", "").isprintable()


def scrape(at: float, times: int, started: float = 1000.0) -> Scrape:
    page = Page(started=started)
    busy(page, times)
    return parse_page(page.text(), at)


def test_one_reading_has_no_rates():
    assert of(None, scrape(0.0, 1)).rates is None


def test_rates_are_differences_by_the_time_between_readings():
    found = of(scrape(10.0, 3), scrape(14.0, 5))
    assert found.rates is not None
    assert found.rates.prompt_tokens == 2 * 1500 / 4
    assert found.rates.sources["peer"].queries == 2 * 10 / 4
    assert found.rates.sources["peer"].hit_rate == pytest.approx(6 / 8)
    assert found.totals.prompt_tokens == 5 * 1500
    assert found.rates.sources["peer"].load_seconds.p99 == pytest.approx(0.02485)


def test_equal_readings_have_rates_of_0_and_no_quantiles():
    found = of(scrape(0.0, 2), scrape(1.0, 2)).rates
    assert found is not None
    assert found.prompt_tokens == 0
    assert found.sources["peer"].hit_rate is None
    assert found.sources["peer"].load_seconds.median is None
    assert found.misses == ()


@pytest.mark.parametrize("started", [1000.0, 2000.0], ids=["unseen", "seen"])
def test_counts_that_decreased_have_restarted_at_0(started):
    found = of(scrape(0.0, 5), scrape(10.0, 1, started)).rates
    assert found is not None
    assert found.prompt_tokens == 150


def test_counts_of_another_process_have_restarted_at_0_even_if_they_are_larger():
    found = of(scrape(0.0, 2), scrape(10.0, 3, started=2000.0)).rates
    assert found is not None
    assert found.prompt_tokens == 450


def test_a_new_series_has_started_at_0():
    empty = Page()
    empty.vllm("num_requests_running").set(0)
    found = of(parse_page(empty.text(), 0.0), scrape(2.0, 1)).rates
    assert found is not None
    assert found.misses[0].count == 2.5


def test_levels_are_those_of_the_last_reading():
    levels = of(scrape(0.0, 1), scrape(1.0, 2)).levels
    assert (levels.running, levels.late_blocks, levels.pending_loads) == (5, 3, {"peer": 2})
    assert levels.tiers["file"].owed_chunks == 7
    assert list(levels.tiers) == ["host", "file"]


def test_the_fullest_engine_decides_how_full_a_tier_of_several_engines_is():
    other = Page()
    busy(other)
    smaller = MetricsDelta()
    smaller.set("tier_capacity_bytes", "file", to=9.8e9)
    other.count(smaller)
    more = parse_page(other.text(), 0.0)
    both = compute_figures([window(None, scrape(0.0, 1), "0"), window(None, more, "0")])
    assert both.levels.tiers["file"].capacity == 9.8e9
    assert both.levels.running == 10


def test_tokens_are_counted_by_source():
    assert of(None, scrape(0.0, 1)).totals.tokens == {
        "computed": 300, "local": 300, "peer": 600, "host": 200, "file": 100,
    }  # fmt: skip


def test_tokens_of_other_connectors_are_counted_as_others():
    page = Page()
    busy(page)
    several(page)
    page.vllm("prompt_tokens_by_source_total", "external_kv_transfer").inc(500)
    found = of(None, parse_page(page.text(), 0.0))
    assert found.totals.tokens == {
        "computed": 300, "local": 300, "peer": 600, "host": 200, "file": 100, "others": 500,
    }  # fmt: skip
    assert cached_share(dict(found.totals.tokens)) == 0.85


INF = math.inf


@pytest.mark.parametrize(
    ("q", "buckets", "expected"),
    [
        (0.5, [(1, 10), (2, 10), (INF, 10)], 0.5),
        (0.99, [(1, 10), (2, 10), (INF, 10)], 0.99),
        (0.5, [(1, 0), (2, 4), (4, 8), (INF, 8)], 2.0),
        (0.75, [(1, 0), (2, 4), (4, 8), (INF, 8)], 3.0),
        (0.99, [(1, 1), (2, 1), (INF, 10)], 2.0),
        (0.5, [(1, 0), (INF, 0)], None),
        (0.5, [(INF, 3)], None),
        (0.5, [(1, 2), (2, 3)], None),
        (0.5, [], None),
    ],
)
def test_quantiles_are_those_of_histogram_quantile(q, buckets, expected):
    assert quantile(q, [HistogramBucket(*each) for each in buckets]) == (
        None if expected is None else pytest.approx(expected)
    )


def test_silence_lasts_from_the_first_failure_to_the_next_answer():
    seen = (
        PolledAddress("http://a:1")
        .answered(scrape(0.0, 1))
        .failed(100.0, "cannot connect")
        .failed(101.0, "silent for 5 s")
    )
    assert (seen.silence.since, seen.silence.why) == (100.0, "silent for 5 s")
    assert list(seen.windows()) == []
    [engine] = fleet_view([seen], 102.0).engines
    assert engine.figures is None
    again = seen.answered(scrape(9.0, 1))
    assert again.silence is None
    assert fleet_view([again], 103.0).answering == 1


def test_several_engines_at_one_address_have_a_line_each():
    page = Page(engines=2)
    for engine in (0, 1):
        busy(page, engine=engine)
    seen = PolledAddress("http://a:1").answered(parse_page(page.text(), 0.0))
    assert [engine.name for engine in fleet_view([seen], 0.0).engines] == ["a:1/0", "a:1/1"]


def test_a_router_is_shown_only_if_it_does_not_answer():
    router = PolledAddress("http://r:1", role="router")
    assert fleet_view([router], 0.0).engines == ()
    assert [engine.name for engine in fleet_view([router.failed(1.0, "cannot connect")], 2.0).engines] == [
        "r:1"
    ]


@pytest.mark.parametrize("name", ["x" * 200, "\u4e2d" * 50, "a b" * 80], ids=["x", "wide", "ab"])
def test_a_name_wider_than_the_screen_is_cut(name):
    page = Page()
    counted = MetricsDelta()
    counted.count("misses", "peer", name, "full", by=3)
    page.count(counted)
    seen = PolledAddress("http://a:1").answered(parse_page(page.text(), 5.0))
    for line in screen(fleet_view([seen], 5.0), 80, 40, chosen=None, every=1.0):
        assert cell_len(line.text) <= 80, line.text


def test_numbers_are_short():
    assert [number(each) for each in (999.4, 9_999, 10_000, 1e6, 1.5e9)] == [
        "999",
        "9,999",
        "10.0k",
        "1.0M",
        "1.5G",
    ]


def test_credentials_are_not_shown() -> None:
    assert PolledAddress("http://user:secret@10.0.0.1:8000").name == "10.0.0.1:8000"


def test_tenants_have_tokens_hits_bytes_and_evictions():
    found = of(scrape(10.0, 3), scrape(14.0, 5))
    acme = found.totals.tenants["acme"]
    assert (acme.prompt_tokens, acme.hit_rate, acme.evicted_chunks) == (1500, 0.4, {"host": 5})
    assert found.rates is not None
    assert found.rates.tenants["others"].prompt_tokens == 50
    assert found.levels.tenants["acme"]["file"] == 3 << 30
    said = " ".join(
        text(
            fleet_view([PolledAddress("http://a:1", before=scrape(10.0, 3), now=scrape(14.0, 5))], 14.0),
            160,
            1.0,
        ).split()
    )
    assert "acme 150 40% 40% 1.50 GiB 3 GiB 5" in said


def test_a_tenant_of_several_engines_uses_what_it_uses_in_the_engine_where_that_is_most():
    page = Page(engines=2)
    for engine, used in enumerate((3, 5)):
        counted = MetricsDelta()
        counted.set("tenant_used_bytes", "file", "acme", to=used)
        page.count(counted, engine)
    found = parse_page(page.text(), 0.0)
    both = compute_figures([window(None, found, engine) for engine in "01"])
    assert both.levels.tenants == {"acme": {"file": 5}}
