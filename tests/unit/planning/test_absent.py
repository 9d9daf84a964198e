"""What a reader does without: layers of a draft model that its peer does not keep."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvferry.common.errors import Incompatible
from kvferry.geometry import Group, GroupKind, Layer, RankGeometry, Region
from kvferry.geometry.canonical import canonical_form_of
from kvferry.planning.select import LoadSpan, unwritten_blocks_needed
from kvferry.planning.template import absent_layer_names, absent_layers, build_templates, window_mismatches
from kvferry.transport.prepared_routes import page_clearings
from support.pages import ADDRESS, cross_layer, kv_page, rank_of


def with_draft(rank: RankGeometry, draft: str = "3fa9") -> RankGeometry:
    """The last layer is a draft's."""
    (group,) = rank.groups
    *own, last = group.layers
    return replace(rank, groups=(replace(group, layers=(*own, replace(last, draft=draft))),))


def without_last(rank: RankGeometry) -> RankGeometry:
    (group,) = rank.groups
    return replace(rank, groups=(replace(group, layers=group.layers[:-1]),))


def names(rank: RankGeometry) -> list[str]:
    return [layer.name for group in rank.groups for layer in group.layers]


ALL = rank_of(kv_page(), kv_page(), kv_page())
MOVED = ("layers.0", "layers.1")


def moved(src: RankGeometry, dst: RankGeometry) -> tuple[list[str], list[str]]:
    """(layers that move, layers that are absent)."""
    templates = build_templates([src], dst)
    found = [name for template in templates for route in template.routes for name in route.layers]
    return found, names(absent_layers(templates, dst))


def test_a_draft_that_both_have_moves():
    assert moved(with_draft(ALL), with_draft(ALL)) == (["layers.0", "layers.1", "layers.2"], [])


def test_model_layers_move_if_only_the_reader_has_the_draft():
    assert moved(without_last(ALL), with_draft(ALL)) == ([*MOVED], ["layers.2"])


def test_layers_that_several_ranks_do_without_are_named_once_in_order():
    many = rank_of(*[kv_page()] * 9)
    group = replace(many.groups[0], layers=tuple(replace(one, draft="3fa9") for one in many.groups[0].layers))
    ours = replace(many, groups=(group,))
    assert absent_layer_names([rank_of(kv_page())], [ours, ours]) == [
        f"layers.{number}" for number in range(9)
    ]
    assert absent_layer_names([ours], [ours, ours]) == []


def test_a_draft_that_only_the_peer_has_stays_there():
    assert moved(with_draft(ALL), without_last(ALL)) == ([*MOVED], [])


def test_another_drafts_layer_of_the_same_name_is_not_taken():
    assert moved(with_draft(ALL, "other"), with_draft(ALL)) == ([*MOVED], ["layers.2"])
    assert moved(ALL, with_draft(ALL)) == ([*MOVED], ["layers.2"])


def test_a_drafts_layer_in_another_format_is_not_taken():
    theirs = with_draft(rank_of(kv_page(), kv_page(), kv_page(heads=8)))
    assert moved(theirs, with_draft(ALL)) == ([*MOVED], ["layers.2"])


def test_a_layer_of_the_model_itself_must_be_there():
    with pytest.raises(Incompatible, match=r"layers\.2.*not in the peer's cache"):
        build_templates([without_last(ALL)], ALL)
    with pytest.raises(Incompatible, match=r"layers\.2.*not in the peer's cache"):
        build_templates([with_draft(ALL)], ALL)


def test_a_window_of_a_draft_may_differ():
    one = with_draft(ALL)
    (group,) = one.groups
    window = replace(one, groups=(replace(group, kind=GroupKind.SLIDING, attention_span=32),))
    assert window_mismatches([window], one)
    assert not window_mismatches(
        [with_draft(window, "other")], replace(one, groups=(replace(group, layers=group.layers[2:]),))
    )


def test_chunks_of_a_draft_are_another_models():
    plain, one, other = (
        canonical_form_of([rank], 16) for rank in (without_last(ALL), with_draft(ALL), with_draft(ALL, "b"))
    )
    assert len({form.content for form in (plain, one, other)}) == 3


@pytest.mark.parametrize("across", [False, True])
def test_clearing_touches_the_absent_layers_of_these_blocks_and_nothing_else(across):
    rank = with_draft(cross_layer(ALL) if across else ALL)
    size = max(region.address + region.length for region in rank.regions) - ADDRESS
    memory = torch.ones(size, dtype=torch.uint8)
    by = memory.data_ptr() - ADDRESS
    groups = tuple(
        replace(group, layers=tuple(replace(one, address=one.address + by) for one in group.layers))
        for group in rank.groups
    )
    regions = tuple(Region(one.address + by, one.length) for one in rank.regions)
    here = replace(rank, groups=groups, regions=regions)
    ((number, loops),) = page_clearings(absent_layers(build_templates([without_last(here)], here), here))
    assert number == 0
    loops.clear(np.array([1, 3]), np.zeros(2, np.int64))
    expected = np.ones(size, np.uint8)
    layer: Layer = here.groups[0].layers[-1]
    for block in (1, 3):
        at = layer.address - memory.data_ptr() + block * layer.block_stride
        expected[at : at + layer.page.page_bytes] = 0
    assert (memory.numpy() == expected).all()


@pytest.mark.parametrize(
    ("kind", "attention_span", "span", "expected"),
    [
        (GroupKind.FULL, 0, LoadSpan(0, 40, 41), [10, 11, 12]),
        (GroupKind.FULL, 0, LoadSpan(16, 40, 41), [11, 12]),
        (GroupKind.FULL, 0, LoadSpan(24, 40, 41), [12]),
        (GroupKind.FULL, 0, LoadSpan(0, 64, 65, (0, 32)), [10, 11]),
        (GroupKind.SLIDING, 20, LoadSpan(0, 64, 65), [12, 13]),
        (GroupKind.SLIDING, 20, LoadSpan(0, 64, 65, (0, 40)), []),
    ],
)
def test_unwritten_blocks_are_those_beyond_the_local_prefix(kind, attention_span, span, expected):
    assert (
        unwritten_blocks_needed(Group(kind, 16, attention_span, ()), span, np.arange(10, 15)).tolist()
        == expected
    )


@pytest.mark.parametrize("local_tokens", [0, 16, 40])
def test_the_block_of_a_snapshot_holds_nothing_yet_whatever_prefix_is_here(local_tokens):
    group = Group(GroupKind.STATE, 16, 0, ())
    assert unwritten_blocks_needed(group, LoadSpan(local_tokens, 64, 65), np.array([7])).tolist() == [7]


def test_a_null_block_is_never_cleared():
    group, table = Group(GroupKind.FULL, 16, 0, ()), np.array([0, 0, 12])
    assert unwritten_blocks_needed(group, LoadSpan(0, 40, 41), table).tolist() == [12]
