"""Every rank gets its bytes, for every model of the table, from one tensor-parallel size to another.

Block sizes are those that vLLM derives, of hybrids from the size of their state: 784 tokens at
one size and 400 at another. What heads do not allow is refused in words.
"""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from kvferry.common.errors import GeometryError
from kvferry.geometry import RankGeometry
from kvferry.planning.template import Template, build_templates
from kvferry.tools.models import ModelReading, read_model
from kvferry.tools.models.layout import lay_out
from kvferry.tools.plan.find import ModelEntry, entries
from kvferry.tools.plan.side import EngineSide, block_tokens, resolve_layout, shape

pytestmark = pytest.mark.slow

SIZES = (1, 2, 4, 8, 16)
BLOCKS = 64


def sides(reading: ModelReading) -> dict[int, tuple[RankGeometry, ...]]:
    """The ranks of an engine of each size that the model's heads admit; the others say so."""
    heads = {field.heads for store in reading.cache.layers for field in store.fields if field.heads}
    found = {}
    for tp in SIZES:
        side = EngineSide(tp, layout=resolve_layout("auto", reading))
        if reading.cache.query_heads % tp:
            with pytest.raises(GeometryError, match=f"heads on {tp} tensor-parallel ranks"):
                lay_out(reading.cache, shape(reading, side, BLOCKS))
        elif odd := [count for count in heads if count % tp and tp % count]:
            said = rf"({'|'.join(map(str, odd))}) heads on {tp} tensor-parallel ranks: choose a size that"
            with pytest.raises(GeometryError, match=said):
                lay_out(reading.cache, shape(reading, side, BLOCKS))
        else:
            found[tp] = lay_out(reading.cache, shape(reading, side, BLOCKS))
    return found


def block_bytes(templates: tuple[Template, ...]) -> int:
    """Bytes that a rank gets of one block of each of its layers."""
    return sum(route.cell_bytes * route.dst_cells for each in templates for route in each.routes)


def check(srcs: tuple[RankGeometry, ...], dsts: tuple[RankGeometry, ...]) -> None:
    """Fail if the first or the last rank does not get every byte of its blocks."""
    for dst in {dsts[0], dsts[-1]}:
        wanted = sum(layer.page.content_bytes for group in dst.groups for layer in group.layers)
        assert block_bytes(build_templates(srcs, dst)) == wanted


@pytest.mark.long
@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_a_model_moves_between_any_two_sizes(entry: ModelEntry):
    for srcs, dsts in product(sides(read_model(entry.config)).values(), repeat=2):
        check(srcs, dsts)


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_a_model_moves_to_the_next_size_and_from_the_largest_to_the_smallest(entry: ModelEntry):
    ranks = [*sides(read_model(entry.config)).values()]
    assert len(ranks) >= len(SIZES) - 2
    for srcs, dsts in [*pairwise(ranks), (ranks[-1], ranks[0])]:
        check(srcs, dsts)


def test_the_table_has_pairs_of_sizes_with_unrelated_blocks():
    found = {
        (entry.name, src, dst): tuple(block_tokens(reading, EngineSide(tp))[0] for tp in (src, dst))
        for entry in entries()
        if entry.name in ("Qwen3.5-27B", "Kimi-K3", "Falcon-H1-7B")
        for reading in [read_model(entry.config)]
        for src, dst in [(1, 2), (4, 8), (1, 8)]
    }
    assert found["Qwen3.5-27B", 4, 8] == (784, 400)
    assert found["Kimi-K3", 1, 2] == (5760, 2944)
    assert found["Falcon-H1-7B", 1, 8] == (1568, 400)
