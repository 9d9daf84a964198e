"""Engines of the benchmark are what the planner takes them for."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.overhead.planning import small_pages
from kvferry.common.errors import GeometryError
from kvferry.geometry import GroupKind
from kvferry.planning.select import select_cells
from kvferry.planning.template import build_templates
from kvferry.tools.measuring.simulated import (
    SimulatedEngine,
    block_ids,
    read_geometry,
    simulate_engine,
)
from kvferry.tools.models.layout import lay_out
from kvferry.tools.plan.side import EngineSide


def _engine(name: str, tokens: int, **side: int | str) -> SimulatedEngine:
    return simulate_engine(name, read_geometry(name), EngineSide(**side), tokens)


def test_llama_has_pages_of_64_kib_and_half_a_gigabyte_for_4096_tokens() -> None:
    llama = _engine("Llama-3.1-8B", 4096)
    (group,) = lay_out(llama.model, llama.shape)[0].groups
    assert (len(group.layers), group.layers[0].page.page_bytes) == (32, 64 << 10)
    assert llama.rank_bytes(0) == 512 << 20


def test_a_rank_of_two_has_half() -> None:
    assert _engine("Llama-3.1-8B", 4096, tp=2).rank_bytes(1) == 256 << 20


def test_tables_name_every_block_but_the_null_block_once() -> None:
    for order in ("scattered", "contiguous"):
        assert np.sort(block_ids(100, order, 1)).tolist() == list(range(1, 101))
    assert (np.diff(block_ids(100, "contiguous", 1)) == 1).all()
    assert (np.diff(block_ids(100, "scattered", 1)) == 1).sum() < 10
    assert (block_ids(100, "scattered", 1) != block_ids(100, "scattered", 2)).any()


@pytest.mark.parametrize("model", ["gpt-oss-20b", "Qwen3-Next-80B-A3B", "Llama-3.1-8B"])
def test_every_table_has_what_its_group_needs_and_nothing_twice(model: str) -> None:
    one = _engine(model, 4352)
    (rank,) = lay_out(one.model, one.shape)
    (template,) = build_templates([rank], rank)
    for route in template.routes:
        group, table = rank.groups[route.dst_group], one.tables[route.dst_group]
        cells = select_cells(route, group, one.span, table, table)
        assert len(np.unique(cells.dst_block)) == (table > 0).sum()
        assert group.kind is not GroupKind.STATE or len(table) == 1
    ids = np.concatenate([table[table > 0] for table in one.tables])
    assert np.sort(ids).tolist() == list(range(1, one.shape.num_blocks))


def test_small_pages_keep_what_planning_counts() -> None:
    llama = read_geometry("Llama-3.1-8B")
    small = small_pages(llama)
    assert len(small.cache.layers) == len(llama.cache.layers)
    assert small.cache.layers[0].whole_bytes < llama.cache.layers[0].whole_bytes / 64


def test_a_layout_that_cannot_hold_a_model_says_why() -> None:
    with pytest.raises(GeometryError, match="BHLNC has heads outside of pages"):
        _engine("Qwen3-Next-80B-A3B", 544, layout="BHLNC")


def test_a_model_may_be_changed() -> None:
    changed = read_geometry("Llama-3.1-8B", {"num_key_value_heads": 2, "num_hidden_layers": 5}, "float32")
    assert changed.cache.name == "Llama-3.1-8B, changed"
    assert [store.whole_bytes for store in changed.cache.layers] == [2 * 2 * 128 * 4] * 5
