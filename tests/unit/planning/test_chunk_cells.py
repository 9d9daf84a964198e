"""Which cells of which chunks, against a selection over whole tables, and token by token."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from kvferry.common.errors import TransferError
from kvferry.geometry import Attention, GroupKind
from kvferry.geometry.canonical import canonical_form_of, chunk_pool
from kvferry.planning.chunk_cells import (
    TableSlice,
    cells_to_blank,
    cells_to_load,
    cells_to_store,
    runs_of,
    slice_table,
)
from kvferry.planning.select import LoadSpan, needed_tokens, select_cells
from kvferry.planning.template import Route, build_templates
from support.engines import EngineSpec, Family, GroupSpec, Interior, Stored, ranks
from support.examples import examples
from support.pages import kv_page, rank_of, state_page

TOKENS = 96
KINDS = st.sampled_from([GroupKind.FULL, GroupKind.SLIDING, GroupKind.CHUNKED])


def routes(block: int, chunk: int) -> tuple[Route, Route]:
    """From a rank to chunks, and from chunks to a rank."""
    rank, pool = rank_of(kv_page(block), blocks=200), rank_of(kv_page(chunk), blocks=200)
    return tuple(build_templates([a], b)[0].routes[0] for a, b in ((rank, pool), (pool, rank)))


def triples(cells):
    """(source, destination, number) of every cell, over several selections."""
    found = [
        triple
        for each in cells
        for triple in zip(
            each.src_block.tolist(), each.dst_block.tolist(), each.dst_number.tolist(), strict=True
        )
    ]
    assert len(set(found)) == len(found)
    return set(found)


def blocks_of(block: int) -> list[int]:
    return list(range(3, 3 + -(-TOKENS // block)))


def slots(numbers) -> np.ndarray:
    """A table of all chunks, of which some are at hand."""
    table = np.zeros(TOKENS, np.int64)
    for index, number in enumerate(numbers):
        table[number] = index + 1
    return table


SIZES = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16])


@examples(100)
@given(data=st.data(), block=SIZES, chunk=SIZES)
def test_chunks_are_filled_from_all_cells_that_hold_their_tokens(data, block, chunk):
    until = data.draw(st.integers(1, TOKENS))
    numbers = sorted(data.draw(st.sets(st.integers(0, (until - 1) // chunk), min_size=1)))
    out, _ = routes(block, chunk)
    high = min((numbers[-1] + 1) * chunk, until)
    cells = range(
        numbers[0] * chunk // out.cell_tokens, -(-min((numbers[0] + 1) * chunk, until) // out.cell_tokens)
    )
    low = data.draw(st.sampled_from(cells)) * out.cell_tokens
    stretch = slice_table([0] * (low // block) + blocks_of(block)[low // block :], low, high, block)
    found = cells_to_store(out, chunk, numbers, range(low, until), stretch)
    whole = [
        select_cells(
            out,
            Attention(GroupKind.FULL, 0),
            LoadSpan(max(n * chunk, low), min((n + 1) * chunk, until), TOKENS),
            np.array(blocks_of(block)),
            slots(numbers),
        )
        for n in numbers
    ]
    assert triples(found) == triples(whole)
    for index in (0, len(numbers) - 1):
        beside = cells_to_blank(out, chunk, numbers[index], range(low, until)).tolist()
        filled, blank = {t[2] for t in triples(found) if t[1] == index + 1}, set(beside)
        first = numbers[index] * chunk // out.cell_tokens
        of_chunk = range(first, first + chunk // out.cell_tokens)
        assert not filled & blank
        assert sorted(filled | blank) == list(of_chunk)
        assert len(beside) + sum(t[1] == index + 1 for t in triples(found)) == len(of_chunk)


@examples(100)
@given(data=st.data(), block=SIZES, chunk=SIZES, kind=KINDS, attention_span=st.integers(1, 40))
def test_parts_of_a_load_select_the_cells_of_the_whole_load(data, block, chunk, kind, attention_span):
    _, into = routes(block, chunk)
    total = data.draw(st.integers(1, TOKENS))
    local_tokens = data.draw(st.integers(0, (total - 1) // into.cell_tokens)) * into.cell_tokens
    span = LoadSpan(local_tokens, total, data.draw(st.sampled_from([total, total + 1, total + 50])))
    group = Attention(kind, 0 if kind is GroupKind.FULL else attention_span)
    low, high = needed_tokens(group, span)
    assume(low < high)
    numbers = list(range(low // chunk, -(-high // chunk)))
    blocks = TableSlice(0, tuple(blocks_of(block)))
    everything = select_cells(into, group, span, slots(numbers), blocks.table())
    split = data.draw(st.permutations(numbers))
    cut = data.draw(st.integers(0, len(split)))
    found = set()
    for part in (sorted(split[:cut]), sorted(split[cut:])):
        if not part:
            continue
        brought = triples(cells_to_load(into, chunk, group, span, part, blocks.table()))
        found |= {(numbers.index(part[src - 1]) + 1, dst, number) for src, dst, number in brought}
    assert found == triples([everything])


def test_a_snapshot_moves_whole():
    rank, pool = (rank_of(state_page(), kind=GroupKind.STATE, blocks=9) for _ in range(2))
    route = build_templates([rank], pool)[0].routes[0]
    assert triples(cells_to_store(route, 64, [3], range(256), TableSlice(0, (7,)))) == {(7, 1, 0)}
    group = Attention(GroupKind.STATE, 0)
    assert triples(cells_to_load(route, 64, group, LoadSpan(64, 256, 300), [3], np.array([7]))) == {(1, 7, 0)}
    assert len(cells_to_blank(route, 64, 3, range(250))) == 0


def test_null_or_missing_block_is_refused():
    out, into = routes(8, 16)
    for stretch, says in (
        (TableSlice(0, (1, 2, 0, 4)), "null block"),
        (TableSlice(0, (1, 2, 3)), "need block 3"),
    ):
        with pytest.raises(TransferError, match=says):
            cells_to_store(out, 16, [1], range(32), stretch)
        with pytest.raises(TransferError, match=says):
            cells_to_load(into, 16, Attention(GroupKind.FULL, 0), LoadSpan(16, 32, 40), [1], stretch.table())


@pytest.mark.parametrize("span", [LoadSpan(5, 32, 40), LoadSpan(0, 32, 40, (5, 32))])
def test_a_prefix_or_a_part_that_ends_inside_a_cell_or_a_block_is_refused(span):
    _, into = routes(8, 16)
    with pytest.raises(TransferError, match=r"inside the cell|inside a block"):
        cells_to_load(into, 16, Attention(GroupKind.FULL, 0), span, [0, 1], np.array([1, 2, 3, 4]))


@examples(30)
@given(st.sets(st.integers(0, 30)))
def test_runs_are_the_numbers_and_never_touch(numbers):
    runs = runs_of(sorted(numbers))
    assert [n for run in runs for n in run] == sorted(numbers)
    assert all(a.stop < b.start for a, b in itertools.pairwise(runs))


@examples(30)
@given(st.integers(1, 9), st.integers(0, 60), st.integers(1, 30))
def test_table_slice_has_the_blocks_of_its_tokens(block, low, length):
    ids = list(range(1, 100))
    stretch = slice_table(ids, low, low + length, block)
    wanted = sorted({token // block for token in range(low, low + length)})
    assert (stretch.first, list(stretch.ids)) == (wanted[0], [ids[at] for at in wanted])
    assert stretch.table()[wanted].tolist() == [ids[at] for at in wanted]


@pytest.mark.parametrize("interleave", [1, 4, 16])
def test_ranks_that_share_tokens_blank_and_fill_each_token_of_a_chunk_once(interleave):
    family = Family(GroupKind.MLA, fields=(Stored("latent", 1, 0, (("content", 1),)),))
    group = GroupSpec(GroupKind.MLA, 0, (0,), 16, turns=(2, interleave))
    sources = ranks(EngineSpec(2, (1,), (group,), "LBNHC", Interior(), 9), [family])
    pool = chunk_pool(canonical_form_of(sources, 48), 0, 1 << 50, 9)
    touched = np.zeros(48, np.int64)
    for (route,) in (template.routes for template in build_templates(sources, pool)):
        (cells,) = cells_to_store(route, 48, [1], range(64, 80), TableSlice(0, (1, 2, 3)))
        blank = cells_to_blank(route, 48, 1, range(64, 80))
        for number in (*cells.dst_number.tolist(), *blank.tolist()):
            for part in route.cell_copies:
                start = part.dst_offsets[number % route.dst_cells] - pool.groups[0].layers[0].address
                for first, length in zip(part.descriptors.dst, part.descriptors.length, strict=True):
                    touched[first + start : first + start + length] += 1
    assert (touched == 1).all()
