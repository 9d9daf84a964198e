"""The view fits every size of the terminal and every length of names."""

from __future__ import annotations

import re

import pytest
from rich.cells import cell_len

from kvferry.tools.report import shortened
from kvferry.tools.top.exposition import parse_page
from kvferry.tools.top.lines import screen, text
from kvferry.tools.top.poller import PolledAddress, Unreachable, fleet_view
from support.metrics_page import Page, busy, several

NAME = "decode-{}.kvferry-system.svc.cluster.local:8000"
MODEL = "organisation/模型-fp8-dynamic"
GONE = "prefill-0.kvferry-system.svc.cluster.local:8000"


def seen(number: int) -> PolledAddress:
    page = Page(f"{MODEL}-{number}")
    busy(page, 1000)
    if number == 2:
        several(page)
    return PolledAddress(
        f"http://{NAME.format(number)}", "decode", parse_page(page.text(), 0.0), parse_page(page.text(), 1.0)
    )


@pytest.fixture(scope="module")
def engines():
    silent = PolledAddress(
        f"http://{GONE}", "prefill", silence=Unreachable(0.0, "/metrics answers with status 404")
    )
    return fleet_view([*map(seen, range(4)), silent], 60.0)


@pytest.mark.parametrize("width", [24, 40, 60, 80, 100, 119, 120, 200])
def test_no_line_is_longer_than_the_terminal_is_wide(engines, width):
    for line in text(engines, width, 1.0).splitlines():
        assert cell_len(line) <= width, line
    for height in (3, 5, 12, 24, 60):
        shown = screen(engines, width, height, chosen=1, every=1.0)
        assert len(shown) <= height
        assert max(cell_len(line.text) for line in shown) <= width


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_narrow_print_leaves_out_only_columns_and_the_middle_of_names(engines, width):
    said = " ".join(text(engines, width, 1.0).split())
    for words in (
        "tiers not_stored (1 sliding_window(64)) 20.0k", "first token 37.5 ms, p99 49.8 ms",
        f"all engines: {MODEL}-0, {MODEL}-1, ", "(60 s): /metrics answers with status 404",
        "file: no space on the device 8,000",
    ):  # fmt: skip
        assert words in said, words
    for number in range(4):
        assert f" decode-{number}.kv" in said
    assert len(re.findall(r"decode-\S+ decode 5 1\b", said)) == 4


def test_numbers_of_engines_are_near_their_names_in_a_wide_terminal(engines):
    lines = text(engines, 200, 1.0).splitlines()
    (line,) = [line for line in lines if line.startswith(f"{NAME.format(0)} decode")]
    assert re.match(r"\S+ decode {1,8}5 ", line)


def test_silent_engines_are_shown_first_if_there_is_not_room_for_all(engines):
    shown = [line.text for line in screen(engines, 80, 24, chosen=None, every=1.0)]
    assert any(line.startswith("prefill-0.kv") and "no answer since" in line for line in shown)
    assert shown[-1] == "and 3 more"
    shown = [line.text for line in screen(engines, 80, 12, chosen=3, every=1.0)]
    assert any(line.startswith("decode-3.kv") for line in shown[2:])
    assert re.fullmatch(r"and \d more", shown[-1])


def test_the_name_of_an_engine_has_the_path_of_its_address():
    names = [
        one.name
        for one in fleet_view(
            [PolledAddress("http://a:1/x"), PolledAddress("http://a:1/y"), PolledAddress("http://a:1")], 0
        ).engines
    ]
    assert names == ["a:1/x", "a:1/y", "a:1"]


@pytest.mark.parametrize("width", range(12))
def test_a_shortened_name_fits_its_width(width):
    for name in ("decode-0:8000", "模型模型模型", "a", ""):
        assert cell_len(shortened(name, width)) <= width
