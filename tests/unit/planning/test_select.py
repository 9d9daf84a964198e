from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from kvferry.common.errors import TransferError
from kvferry.geometry import Attention, Group, GroupKind
from kvferry.planning.select import (
    STATE_BLOCKS,
    LoadSpan,
    first_attended,
    max_writable_blocks,
    needed_tokens,
    partial_block,
    select_cells,
    unfilled_cells,
    unwritten_blocks_needed,
    windows_survive_load,
    writable_blocks,
)
from kvferry.planning.template import Route, build_templates
from support.examples import examples
from support.pages import kv_page, rank_of, state_page

FULL, SLIDING, CHUNKED, MLA, STATE = (
    GroupKind.FULL, GroupKind.SLIDING, GroupKind.CHUNKED, GroupKind.MLA, GroupKind.STATE
)  # fmt: skip


def route(src_tokens: int = 16, dst_tokens: int = 16) -> Route:
    (template,) = build_templates([rank_of(kv_page(src_tokens))], rank_of(kv_page(dst_tokens)))
    return template.routes[0]


def state_route() -> Route:
    (template,) = build_templates([rank_of(state_page(), kind=STATE)], rank_of(state_page(), kind=STATE))
    return template.routes[0]


def table(*ids: int) -> np.ndarray:
    return np.array(ids, np.int64)


@pytest.mark.parametrize(
    ("prompt", "low", "blocks"),
    [(64, 40, 2), (71, 47, 3), (72, 48, 2), (80, 56, 2), (87, 63, 3), (88, 64, 2)],
)
def test_a_window_of_24_needs_two_blocks_of_16_or_three_by_alignment(prompt, low, blocks):
    span = LoadSpan(0, prompt, prompt)
    assert needed_tokens(Attention(SLIDING, 24), span) == (low, prompt)
    ids = np.arange(1, 7)
    cells = select_cells(route(), Attention(SLIDING, 24), span, ids, ids)
    assert len(cells) == blocks
    assert cells.src_block[-1] == -(-prompt // 16)


def test_the_last_prompt_token_is_computed_again_so_its_window_decides():
    assert needed_tokens(Attention(SLIDING, 24), LoadSpan(0, 64, 64)) == (40, 64)
    assert needed_tokens(Attention(SLIDING, 24), LoadSpan(0, 64, 65)) == (41, 64)
    assert needed_tokens(Attention(SLIDING, 24), LoadSpan(0, 63, 64)) == (40, 63)


@examples(80)
@given(
    kind=st.sampled_from((SLIDING, CHUNKED)),
    span=st.integers(1, 40),
    block=st.integers(1, 20),
    tokens=st.integers(1, 120),
)
def test_a_whole_prompt_may_be_loaded_if_the_window_of_its_last_token_stays(kind, span, block, tokens):
    groups = [Group(FULL, 16, 0, ()), Group(kind, block, span, ())]
    freed = max(first_attended(Attention(kind, span), tokens), 0) // block * block
    stays = max(first_attended(Attention(kind, span), tokens - 1), 0) >= freed
    assert windows_survive_load(groups, tokens) == stays


def test_layers_that_attend_to_all_tokens_survive_every_load():
    assert windows_survive_load([Group(FULL, 16, 0, ()), Group(STATE, 16, 0, ())], 32)


def test_a_window_longer_than_the_prompt_needs_all_of_it():
    assert needed_tokens(Attention(SLIDING, 100), LoadSpan(0, 64, 64)) == (0, 64)


def test_a_window_does_not_reach_into_what_is_there_already():
    assert needed_tokens(Attention(SLIDING, 24), LoadSpan(48, 64, 64)) == (48, 64)


def test_chunked_attention_needs_the_current_chunk():
    assert needed_tokens(Attention(CHUNKED, 32), LoadSpan(0, 80, 80)) == (64, 80)
    assert needed_tokens(Attention(CHUNKED, 32), LoadSpan(0, 64, 64)) == (32, 64)
    assert needed_tokens(Attention(CHUNKED, 32), LoadSpan(0, 64, 65)) == (64, 64)


@pytest.mark.parametrize(("kind", "attention_span"), [(FULL, 0), (SLIDING, 24), (CHUNKED, 32)])
def test_a_full_local_hit_moves_nothing(kind, attention_span):
    assert (
        len(
            select_cells(
                route(),
                Attention(kind, attention_span),
                LoadSpan(64, 64, 64),
                table(1, 2, 3, 4),
                table(4, 3, 2, 1),
            )
        )
        == 0
    )
    assert len(select_cells(state_route(), Attention(STATE), LoadSpan(64, 64, 64), table(1), table(2))) == 0


def test_a_snapshot_is_needed_whenever_anything_is():
    cells = select_cells(state_route(), Attention(STATE), LoadSpan(16, 63, 64), table(5), table(6))
    assert (cells.src_block.tolist(), cells.dst_block.tolist()) == ([5], [6])


def test_a_local_prefix_is_skipped_and_the_partial_last_block_moves_whole():
    cells = select_cells(route(), Attention(FULL), LoadSpan(16, 40, 40), table(1, 2, 3), table(7, 6, 5))
    assert (cells.src_block.tolist(), cells.dst_block.tolist()) == ([2, 3], [6, 5])


def test_blocks_of_48_and_32_meet_in_cells_of_16():
    cells = select_cells(route(48, 32), Attention(FULL), LoadSpan(0, 96, 96), table(1, 2), table(3, 4, 5))
    assert cells.src_block.tolist() == [1, 1, 1, 2, 2, 2]
    assert cells.dst_block.tolist() == [3, 3, 4, 4, 5, 5]
    assert cells.src_number.tolist() == cells.dst_number.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("src", "dst", "side"),
    [((1, 0, 3), (4, 5, 6), "source"), ((1, 2, 3), (4, 5, 0), "destination")],
)
def test_a_null_block_in_a_needed_place_is_an_error(src, dst, side):
    with pytest.raises(TransferError, match=f"the {side} no longer holds"):
        select_cells(route(), Attention(FULL), LoadSpan(0, 48, 48), table(*src), table(*dst))


def test_null_blocks_behind_the_window_do_not_matter():
    cells = select_cells(
        route(), Attention(SLIDING, 16), LoadSpan(0, 64, 64), table(0, 0, 0, 3), table(0, 0, 0, 6)
    )
    assert cells.src_block.tolist() == [3]


def test_a_null_snapshot_is_an_error():
    with pytest.raises(TransferError, match="source no longer holds"):
        select_cells(state_route(), Attention(STATE), LoadSpan(0, 16, 16), table(0), table(1))


@pytest.mark.parametrize("block", [8, -1])
def test_a_block_that_is_not_in_the_pool_is_an_error(block):
    with pytest.raises(TransferError, match="its pool has 8"):
        select_cells(route(), Attention(FULL), LoadSpan(0, 16, 16), table(block), table(1))


@pytest.mark.parametrize(("src", "dst", "side"), [((1,), (1, 2), "source"), ((1, 2), (1,), "destination")])
def test_a_table_that_is_too_short_is_an_error(src, dst, side):
    with pytest.raises(TransferError, match=f"block 1 of the {side}'s table, which has 1"):
        select_cells(route(), Attention(FULL), LoadSpan(0, 17, 17), table(*src), table(*dst))


def test_a_state_table_names_one_block():
    with pytest.raises(TransferError, match="the tables name 2 and 1"):
        select_cells(state_route(), Attention(STATE), LoadSpan(0, 16, 16), table(1, 2), table(1))


@pytest.mark.parametrize(
    ("kind", "attention_span"), [(FULL, 0), (SLIDING, 50)], ids=["at the prefix", "past the prefix"]
)
def test_a_cell_that_would_overwrite_the_local_prefix_is_an_error(kind, attention_span):
    with pytest.raises(TransferError, match="prefix ends at token 8, inside the cell of 16 tokens from 0"):
        select_cells(
            route(), Attention(kind, attention_span), LoadSpan(8, 60, 60), np.arange(1, 5), np.arange(1, 5)
        )


@pytest.mark.parametrize(("kind", "attention_span"), [(FULL, 0), (SLIDING, 24), (CHUNKED, 32)])
@pytest.mark.parametrize(("src_tokens", "dst_tokens"), [(16, 48), (32, 48), (48, 16), (16, 16), (24, 64)])
def test_unfilled_cells_are_the_rest_of_empty_blocks_that_cells_fill_in_part(
    src_tokens, dst_tokens, kind, attention_span
):
    found = replace(route(src_tokens, dst_tokens), src_blocks=40, dst_blocks=40)
    ids = np.arange(1, 40)
    seen = 0
    for local_tokens in range(0, 100, found.cell_tokens):
        for total in range(local_tokens, 200, 7):
            span = LoadSpan(local_tokens, total, total + 1)
            cells = select_cells(found, Attention(kind, attention_span), span, ids, ids)
            filled = set(cells.dst_number.tolist())
            wanted = [
                (block, number)
                for block in np.unique(cells.dst_block).tolist()
                if (block - 1) * dst_tokens >= local_tokens
                for number in range((block - 1) * found.dst_cells, block * found.dst_cells)
                if number not in filled
            ]
            left = unfilled_cells(found, Attention(kind, attention_span), span, ids)
            assert list(zip(*(each.tolist() for each in left), strict=True)) == wanted
            seen += len(wanted)
    assert (seen > 0) == (found.dst_cells > 1)


def test_snapshot_leaves_no_cell_unfilled():
    assert len(unfilled_cells(state_route(), Attention(STATE), LoadSpan(0, 40, 40), table(3))[0]) == 0


@examples(80)
@given(
    kind=st.sampled_from([FULL, SLIDING, CHUNKED]),
    attention_span=st.integers(1, 40),
    block=st.integers(1, 24),
    alignment_tokens=st.integers(1, 24),
    local_tokens=st.integers(0, 8),
    total=st.integers(1, 120),
    rest=st.integers(0, 3),
)
def test_partial_block_begins_with_tokens_neither_local_nor_loaded(
    kind, attention_span, block, alignment_tokens, local_tokens, total, rest
):
    span = LoadSpan(min(local_tokens * block, total), total, total + rest)
    low, high = needed_tokens(Attention(kind, 0 if kind is FULL else attention_span), span)
    loaded = (
        {*range(low // alignment_tokens * alignment_tokens, high), *range(span.local_tokens)}
        if low < high
        else set(range(high))
    )
    touched = {token // block for token in range(low, high)}
    parts = [
        at for at in touched if any(t not in loaded for t in range(at * block, min(at * block + block, high)))
    ]
    found = partial_block(
        Group(kind, block, 0 if kind is FULL else attention_span, ()), span, alignment_tokens
    )
    assert ([] if found is None else [found]) == parts


@examples(80)
@given(
    st.data(),
    st.sampled_from((FULL, MLA, SLIDING, CHUNKED, STATE)),
    st.integers(1, 40),
    st.sampled_from([(16, 16), (8, 32), (32, 8), (12, 8)]),
)
def test_parts_of_a_prefix_select_each_cell_of_the_whole_once(data, kind, attention_span, blocks):
    """Split where a block of the destination ends."""
    of = state_route() if kind is STATE else route(*blocks)
    attention_span = attention_span if kind in (SLIDING, CHUNKED) else 0
    total = data.draw(st.integers(1, 96))
    local_tokens = data.draw(st.integers(0, (total - 1) // 32)) * 32
    span = LoadSpan(local_tokens, total, data.draw(st.sampled_from([total, total + 1, total + 50])))
    middle = data.draw(st.integers(local_tokens // blocks[1], total // blocks[1])) * blocks[1]
    parts = [replace(span, part=(local_tokens, middle)), replace(span, part=(middle, total))]
    src, dst = (table(*range(1, 1 + (1 if kind is STATE else -(-96 // size)))) for size in blocks)
    of = replace(of, src_blocks=99, dst_blocks=99)
    assume(middle < total)
    moved = [triples(select_cells(of, Attention(kind, attention_span), part, src, dst)) for part in parts]
    assert sum(map(len, moved)) == len(set().union(*moved))
    assert set().union(*moved) == triples(select_cells(of, Attention(kind, attention_span), span, src, dst))
    group = Attention(kind, attention_span)
    head, tail, whole = (
        set(unfilled_cells(of, group, one, dst)[1].tolist()) if kind is not STATE else set()
        for one in (*parts, span)
    )
    assert head | tail == whole
    of_head, of_tail = ({number for _, _, number in one} for one in moved)
    assert not head & of_tail
    assert not tail & of_head, "what another part fills is cleared"


def triples(cells):
    return set(
        zip(cells.src_block.tolist(), cells.dst_block.tolist(), cells.dst_number.tolist(), strict=True)
    )


@pytest.mark.parametrize("part", [(0, 24), (24, 56)])
def test_a_part_that_begins_or_ends_inside_a_block_is_an_error(part):
    ids = np.arange(1, 8)
    with pytest.raises(TransferError, match="at token 24, inside a block; expected a multiple of 16"):
        select_cells(route(8, 16), Attention(FULL), LoadSpan(0, 56, 56, part), ids, ids)
    assert len(select_cells(route(8, 8), Attention(FULL), LoadSpan(0, 56, 56, part), ids, ids))


SPANS = st.builds(
    lambda local_tokens, rest, beyond, part: LoadSpan(
        local_tokens,
        local_tokens + rest,
        local_tokens + rest + beyond,
        (local_tokens, local_tokens + 16) if part else None,
    ),
    st.integers(0, 60),
    st.integers(17, 60),
    st.integers(0, 3),
    st.booleans(),
)


@examples(80)
@given(
    st.sampled_from((FULL, MLA, SLIDING, CHUNKED)), st.integers(1, 40), st.integers(1, 24), SPANS, st.data()
)
def test_unwritten_blocks_hold_needed_tokens_and_no_local_ones(kind, attention_span, block, span, data):
    count = -(-span.total // block)
    ids = [at + 10 if data.draw(st.booleans()) else 0 for at in range(count)]
    attention_span = attention_span if kind in (SLIDING, CHUNKED) else 0
    low, high = needed_tokens(Attention(kind, attention_span), span)
    tokens = [set(range(at * block, at * block + block)) for at in range(count)]
    expected = [
        ids[at]
        for at in range(count)
        if ids[at] and tokens[at] & set(range(low, high)) and not tokens[at] & set(range(span.local_tokens))
    ]
    assert (
        unwritten_blocks_needed(Group(kind, block, attention_span, ()), span, table(*ids)).tolist()
        == expected
    )


@pytest.mark.parametrize(("span", "begun"), [(LoadSpan(0, 64, 65), [7]), (LoadSpan(24, 64, 65), [7])])
def test_snapshot_block_is_unwritten_whatever_the_local_prefix(span, begun):
    assert unwritten_blocks_needed(Group(STATE, 16, 0, ()), span, table(7)).tolist() == begun
    assert (
        unwritten_blocks_needed(
            Group(STATE, 16, 0, ()), replace(span, part=(span.local_tokens, 48)), table(7)
        ).tolist()
        == []
    )


@examples(80)
@given(st.sampled_from((FULL, MLA, SLIDING, CHUNKED)), st.integers(1, 40), st.integers(1, 24), SPANS)
def test_a_load_writes_as_many_blocks_as_are_not_null_where_it_may_write(kind, attention_span, block, span):
    attention_span = attention_span if kind in (SLIDING, CHUNKED) else 0
    group = Group(kind, block, attention_span, ())
    seen_from = first_attended(group, span.total)
    expected = [
        at
        for at in range(-(-span.total // block))[
            writable_blocks(Group(kind, block, attention_span, ()), span)
        ]
        if at * block + block > seen_from
    ]
    assert max_writable_blocks(group, span) == len(expected)


def test_a_load_writes_two_blocks_of_recurrent_state_with_its_last_part():
    span = LoadSpan(16, 64, 65)
    assert (
        max_writable_blocks(Group(STATE, 16, 0, ()), span)
        == max_writable_blocks(Group(STATE, 16, 0, ()), replace(span, part=(32, 64)))
        == 2
    )
    assert max_writable_blocks(Group(STATE, 16, 0, ()), replace(span, part=(16, 32))) == 0
    assert STATE_BLOCKS == 2, "vLLM takes a block for the snapshot, and another to go on with"
