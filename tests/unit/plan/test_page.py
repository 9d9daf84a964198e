"""The picture: whole, self-contained, and true to the runs it shows."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest

from kvferry.planning.strategy import Costs
from kvferry.tools.models import read_model
from kvferry.tools.plan.find import find_config
from kvferry.tools.plan.forecast import Pricing, forecast
from kvferry.tools.plan.page import picture
from kvferry.tools.plan.page.draw import (
    WIDTH,
    DrawnRun,
    MemoryLane,
    Strip,
    by_strip,
    cut,
    place,
    runs_of,
    strips,
)
from kvferry.tools.plan.page.scene import MAX_RANKS, MAX_STRIPS, scene
from kvferry.tools.plan.setting import set_up
from kvferry.tools.plan.show import COLUMNS
from kvferry.tools.plan.side import EngineSide

DENSE = {
    "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 128, "num_attention_heads": 8,
    "num_key_value_heads": 4, "torch_dtype": "bfloat16",
}  # fmt: skip
PAGE = 16 * 4 * 64
LAYOUTS = ("LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


def setting(here=EngineSide(), there=None, config=DENSE):  # noqa: B008 - frozen
    return set_up(read_model(config), (here, there or here), 160)


def test_every_column_of_the_table_has_its_header():
    page = page_of("Qwen3-Next-80B-A3B", EngineSide(), EngineSide(tp=4))
    head, *rows = re.findall(r"<tr>(.*?)</tr>", page)
    assert {row.count("<td ") for row in rows} == {head.count("<th ")} == {len(COLUMNS)}


def test_the_page_fits_a_phone():
    page = page_of("Qwen3-Next-80B-A3B", EngineSide(), EngineSide(tp=4))
    assert '<meta name="viewport" content="width=device-width,initial-scale=1">' in page
    sizes = [float(size) for size in re.findall(r"font(?:-size)?:(?:\d+ )?([\d.]+)px", page)]
    assert min(sizes) >= 14
    # Text in a picture would shrink with it.
    assert "<text" not in page
    # The table scrolls in its own box, or is a box per row, which names each number.
    assert ".wide{overflow-x:auto" in page
    for column in COLUMNS:
        assert page.count(f'data-name="{column.heading}"') == 3


class Tags(HTMLParser):
    """Raises nothing, so tags are counted: every one that opens closes."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.links = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.links += [value for name, value in attrs if name in {"src", "href", "xlink:href"}]
        if tag not in {"meta", "br"}:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def page_of(model, *sides):
    name, config = find_config(model)
    reading = read_model(config, name=name)
    return picture(forecast(reading, sides, 4096, Pricing(Costs())), reading)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_page_is_whole_and_needs_nothing(layout):
    page = page_of("Llama-3.1-8B", EngineSide(layout=layout), EngineSide(2, layout=layout))
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.links == []
    assert not {"script", "link", "img", "iframe"} & set(tags.seen)
    assert "url(" not in page
    assert "@import" not in page
    assert "prefers-color-scheme:dark" in page
    assert "Llama-3.1-8B" in page
    assert tags.seen.count("svg") == 2
    assert len(page) < 2_000_000


def test_everything_that_is_drawn_says_what_it_is_and_stays_inside():
    page = page_of("Llama-3.1-8B", EngineSide(), EngineSide(2))
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        tree = ET.fromstring(svg)
        rects, ribbons = tree.findall("rect"), [p for p in tree.findall("path") if p.get("class") != "rule"]
        assert rects
        assert ribbons
        assert all(shape.find("title").text for shape in (*rects, *ribbons))
        for rect in rects:
            assert 0 <= float(rect.get("x")) <= float(rect.get("x")) + float(rect.get("width")) <= WIDTH + 0.5


def test_a_kind_of_layer_each_has_its_pictures():
    page = page_of("Nemotron-3-Nano-30B-A3B", EngineSide(), EngineSide(2))
    assert re.findall(r"<h2>(.*?)</h2>", page) == ["23 state", "6 full attention"]
    assert page.count("<svg") == 4
    assert "one of 4 block tables" in page


def test_names_from_outside_cannot_become_markup():
    reading = read_model(DENSE, name="<script>alert(1)</script>")
    page = picture(forecast(reading, (EngineSide(), EngineSide()), 64, Pricing(Costs())), reading)
    assert "<script" not in page
    assert "&lt;script&gt;" in page


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("one_layer", [False, True])
def test_all_bytes_of_a_block_are_drawn_once_on_either_side(layout, one_layer):
    found = scene(setting(EngineSide(layout=layout), EngineSide(2, layout="LBHNC")), 0, one_layer=one_layer)
    size = PAGE if one_layer else 3 * PAGE
    for lanes in (found.src, found.dst):
        assert sum(strip.length for lane in lanes for strip in lane.strips) == size
    assert sum(ribbon.run.bytes for ribbon in found.ribbons) == size
    assert (found.src_blocks, found.dst_blocks) == (1, 1)


def test_runs_are_counted_as_they_travel_not_as_they_are_drawn():
    found = scene(setting(EngineSide(layout="BHLNC"), EngineSide(2, layout="BHLNC")), 0, one_layer=False)
    assert found.runs == 2
    assert len(found.ribbons) == 3 * 4
    assert {ribbon.run.longest for ribbon in found.ribbons} == {3 * PAGE // 2}
    assert not found.joined


def test_several_small_blocks_stand_above_a_large_one():
    found = scene(setting(EngineSide(), EngineSide(block_tokens=48)), 0, one_layer=True)
    assert (found.src_blocks, found.dst_blocks) == (3, 1)
    assert [strip.block for strip in found.src[0].strips] == [0, 1, 2]
    found = scene(setting(EngineSide(block_tokens=48), EngineSide()), 0, one_layer=True)
    assert (found.src_blocks, found.dst_blocks) == (1, 3)
    assert sum(ribbon.run.bytes for ribbon in found.ribbons) == 3 * PAGE


def test_only_the_first_ranks_are_drawn_and_as_many_strips_as_can_be_told_apart():
    found = scene(setting(EngineSide(), EngineSide(8)), 0, one_layer=False)
    assert len(found.dst) == MAX_RANKS
    deep = {**DENSE, "num_hidden_layers": 500}
    found = scene(setting(EngineSide(layout="LHBNC"), config=deep), 0, one_layer=False)
    assert found.of_layers == 500
    assert len(found.layers) == 125
    assert sum(len(lane.strips) for lane in (*found.src, *found.dst)) <= MAX_STRIPS


def test_a_pipeline_rank_without_these_layers_has_no_lane():
    config = {**DENSE, "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 64,
              "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}  # fmt: skip
    found = scene(setting(EngineSide(pp=2), EngineSide(), config), 2, one_layer=False)
    assert [lane.label for lane in found.src] == ["source, PP rank 1 of 2, TP rank 0 of 1"]
    assert {ribbon.src for ribbon in found.ribbons} == {0}


def test_strips_are_the_pages_memory():
    rank = setting(EngineSide(layout="LHBNC")).src.ranks[0]
    found = strips(rank.groups[0], [1], 2)
    # Heads are outside of blocks: a stretch per head and block.
    assert [strip.length for strip in found] == [PAGE // 4] * 8
    assert [strip.block for strip in found] == [0, 1] * 4
    assert found[0].address == rank.groups[0].layers[1].address


def test_a_run_is_cut_where_strips_end_and_skips_what_is_not_drawn():
    src = [Strip(100, 10, 0, 0, "a"), Strip(120, 10, 0, 0, "a")]
    dst = [Strip(1000, 40, 0, 0, "a")]
    parts = list(cut(DrawnRun(95, 995, 40, 40, 40, 40), src, dst))
    assert [(a, b, part.src, part.dst, part.bytes) for a, b, part in parts] == [
        (0, 0, 100, 1000, 10),
        (1, 0, 120, 1020, 10),
    ]
    assert list(cut(DrawnRun(500, 2000, 8, 8, 8, 8), src, dst)) == []


def test_parts_between_two_strips_are_joined():
    parts = [
        (0, 0, DrawnRun(100, 1000, 4, 4, 4, 8)),
        (0, 0, DrawnRun(108, 1004, 4, 4, 4, 4)),
        (0, 1, DrawnRun(112, 2000, 4, 4, 4, 4)),
    ]
    assert by_strip(parts) == [DrawnRun(100, 1000, 12, 8, 8, 8, 2), DrawnRun(112, 2000, 4, 4, 4, 4)]


def test_runs_of_every_cell_of_the_blocks_that_are_drawn():
    (template,) = setting(EngineSide(), EngineSide(block_tokens=32)).templates(0)
    runs = list(runs_of(template.routes[0], 2, 1))
    assert len(runs) == 2 * 3
    assert len({run.dst for run in runs}) == 6


def test_memory_that_touches_is_drawn_touching_and_the_rest_apart():
    lane = MemoryLane("a", (Strip(0, 50, 0, 0, "a"), Strip(50, 50, 1, 0, "b"), Strip(900, 100, 2, 0, "c")))
    (placed,) = place([lane])
    width = (WIDTH - 5) / 200
    assert placed.starts == pytest.approx((0, 50 * width, 100 * width + 5))
    assert placed.interval(40, 20) == pytest.approx((40 * width, 60 * width))
    assert placed.at(950) == pytest.approx(100 * width + 5 + 50 * width)
