"""Shapes: what a model's KV cache comes to, and block tables in it."""

from __future__ import annotations

import numpy as np
import pytest
from kvferry.bench.shapes import SHAPES, Shape, block_table

from kvferry.errors import ConfigError
from kvferry.planning.template import build_templates


def test_llama_has_pages_of_64_kib_and_half_a_gigabyte_for_4096_tokens() -> None:
    llama = SHAPES["llama-3.1-8b"]
    assert llama.page_bytes == 64 << 10
    assert llama.blocks(4096) * llama.block_bytes == 512 << 20


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_page_is_one_descriptor_between_equal_shapes(shape: Shape) -> None:
    ours, theirs = shape.geometry(1 << 40, 5), shape.geometry(1 << 41, 5)
    ours.check()
    ((route,),) = (template.routes for template in build_templates([theirs], ours))
    (rows,) = route.phases
    assert rows.length.tolist() == [shape.page_bytes] * shape.layers


def test_small_pages_keep_what_planning_counts() -> None:
    llama = SHAPES["llama-3.1-8b"]
    small = llama.with_small_pages()
    assert (small.layers, small.block_tokens) == (llama.layers, llama.block_tokens)
    assert small.page_bytes < llama.page_bytes / 64


@pytest.mark.parametrize("sizes", [(0, 8, 128, 16, 2), (1, 1, 1, 1, 1)])
def test_sizes_that_cannot_be_are_refused_in_words(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"geometry odd: .*(at least 1|multiple of 16)"):
        Shape("odd", *sizes)


def test_tables_name_every_block_but_the_null_block_once() -> None:
    for order in ("scattered", "contiguous"):
        assert np.sort(block_table(100, order, 1)).tolist() == list(range(1, 101))
    assert (np.diff(block_table(100, "contiguous", 1)) == 1).all()
    assert (np.diff(block_table(100, "scattered", 1)) == 1).sum() < 10
    assert (block_table(100, "scattered", 1) != block_table(100, "scattered", 2)).any()
