"""The parts of a load together are the whole load, each byte once; none is read before it is final."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvferry.geometry import Attention, GroupKind
from kvferry.planning.select import (
    LoadSpan,
    attends_to_all,
    needed_tokens,
    next_part,
    select_cells,
    unfilled_cells,
)
from kvferry.planning.template import Route, build_templates
from support.examples import examples
from support.pages import kv_page, rank_of, state_page

KINDS = [
    (GroupKind.FULL, 0),
    (GroupKind.MLA, 0),
    (GroupKind.SLIDING, 24),
    (GroupKind.CHUNKED, 32),
    (GroupKind.STATE, 0),
]
BLOCKS = [(16, 16), (16, 32), (32, 16), (48, 32), (8, 16)]


def route(kind: GroupKind, source: int, destination: int) -> Route:
    if kind is GroupKind.STATE:
        ranks = [rank_of(state_page(), kind=kind), rank_of(state_page(), kind=kind)]
    else:
        ranks = [rank_of(kv_page(source), blocks=32), rank_of(kv_page(destination), blocks=32)]
    (template,) = build_templates([ranks[0]], ranks[1])
    return template.routes[0]


ROUTES = {(kind, blocks): route(kind, *blocks) for kind, _ in KINDS for blocks in BLOCKS}


def parts_of(span: LoadSpan, readies: list[int], alignment: int, offered: int) -> list[tuple[int, LoadSpan]]:
    """(tokens that the source had, part) of each read, as the source gets on."""
    done, found = span.begins, []
    for ready in [*readies, offered]:
        whole = ready >= offered
        part = next_part(span, done, ready, alignment_tokens=alignment, whole=whole)
        if part is not None:
            found.append((ready, part))
            done = part.ends
    return found


def cells(route: Route, kind: GroupKind, window: int, span: LoadSpan) -> list[tuple[int, int, int]]:
    blocks = 1 if kind is GroupKind.STATE else 24
    table = np.arange(1, blocks + 1)
    found = select_cells(route, Attention(kind, window), span, table, table)
    return list(
        zip(found.src_block.tolist(), found.dst_block.tolist(), found.dst_number.tolist(), strict=True)
    )


@examples(60)
@given(
    blocks=st.sampled_from(BLOCKS),
    total=st.integers(1, 190),
    local=st.integers(0, 5),
    readies=st.lists(st.integers(1, 230), max_size=8).map(sorted),
    head=st.booleans(),
    beyond=st.integers(0, 40),
)
def test_parts_of_a_load_move_each_cell_of_the_whole_once(blocks, total, local, readies, head, beyond):
    destination, offered = blocks[1], total + beyond
    span = LoadSpan(min(local * 48, total - 1) // 48 * 48, total, total + 1)
    if head and total > span.local_tokens + destination:
        meet = (total - 1) // destination * destination
        if meet > span.local_tokens:
            span = replace(span, part=(span.local_tokens, meet))
    found = parts_of(span, [ready for ready in readies if ready < offered], destination, offered)
    assert found[0][1].begins == span.begins
    assert found[-1][1].ends == span.ends
    for (_, one), (_, after) in pairwise(found):
        assert one.ends == after.begins
    for kind, window in KINDS:
        of = ROUTES[kind, blocks]
        whole = Counter(cells(of, kind, window, span))
        each = [Counter(cells(of, kind, window, part)) for _, part in found]
        assert sum(each, Counter()) == whole
        assert max(whole.values(), default=1) == 1
        for (ready, part), moved in zip(found, each, strict=True):
            if ready >= offered or not moved:
                continue
            assert attends_to_all(kind), "what still changes is read after the last token"
            assert (max(number for _, _, number in moved) + 1) * of.cell_tokens <= ready
            low, high = needed_tokens(Attention(kind, window), part)
            assert low % destination == high % destination == 0 or low == span.begins
        group = Attention(kind, window)
        table = np.arange(1, 25)
        cleared = [unfilled_cells(of, group, part, table)[1].tolist() for _, part in found]
        of_whole = unfilled_cells(of, group, span, table)[1].tolist()
        assert sorted(cell for some in cleared for cell in some) == of_whole, (
            "a block that an earlier part has filled stays as it is"
        )


@pytest.mark.parametrize(
    ("ready", "whole", "part"),
    [
        (15, False, None), (16, False, (0, 16)), (99, False, (0, 96)), (100, False, (0, 96)),
        (100, True, None), (1, True, None),
    ],
)  # fmt: skip
def test_a_part_ends_at_a_block_and_the_last_where_the_prompt_does(ready, whole, part):
    span = LoadSpan(0, 100, 101)
    found = next_part(span, 0, ready, alignment_tokens=16, whole=whole)
    if whole:
        assert found is span, "a load of what is complete has no parts"
    else:
        assert (None if found is None else found.part) == part


def test_load_without_full_attention_layers_has_one_part():
    span = LoadSpan(0, 100, 101)
    assert next_part(span, 0, 99, alignment_tokens=0, whole=False) is None
    assert next_part(span, 0, 100, alignment_tokens=0, whole=True) is span


def test_source_behind_the_local_prefix_yields_no_part():
    span = LoadSpan(64, 100, 101)
    assert next_part(span, 64, 48, alignment_tokens=16, whole=False) is None
    assert next_part(span, 64, 80, alignment_tokens=16, whole=False).part == (64, 80)
    assert next_part(span, 80, 80, alignment_tokens=16, whole=False) is None
