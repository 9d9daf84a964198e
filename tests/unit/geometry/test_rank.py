from dataclasses import replace

import pytest

from kvferry.common.errors import GeometryError
from kvferry.geometry import Axis, Field, Group, GroupKind, Layer, PageFormat, RankGeometry, Region
from support.pages import ADDRESS, kv_page, rank_of, state_page


def test_a_sound_rank_passes():
    rank_of(kv_page(), kv_page()).check()
    rank_of(state_page(), kind=GroupKind.STATE).check()


@pytest.mark.parametrize(
    "change", [{"address": ADDRESS + 1}, {"length": 8 * 1024 - 1}], ids=["below", "above"]
)
def test_pages_outside_the_registered_regions_are_refused(change):
    rank = rank_of(kv_page(heads=4))
    assert rank.regions == (Region(ADDRESS, 8 * 1024),)
    with pytest.raises(GeometryError, match="outside the registered regions"):
        replace(rank, regions=(replace(rank.regions[0], **change),)).check()


def test_pages_lie_in_one_region_not_across_two():
    rank = rank_of(kv_page(heads=4))
    halves = (Region(ADDRESS, 4096), Region(ADDRESS + 4096, 4096))
    with pytest.raises(GeometryError, match="outside the registered regions"):
        replace(rank, regions=halves).check()


@pytest.mark.parametrize("stride", [511, 256, 0, -512])
def test_blocks_that_overlap_are_refused(stride):
    rank = rank_of(kv_page())
    assert rank.groups[0].layers[0].block_stride == 512
    with pytest.raises(GeometryError, match="overlap in field 'kv'"):
        with_layer(rank, block_stride=stride).check()


def test_blocks_between_the_heads_of_a_page_do_not_overlap():
    """[L,H,B,N,C]: a page reaches over other blocks' bytes without touching them."""
    blocks, plane = 8, 256
    head = Axis("head", ((2, blocks * plane),))
    axes = (head, Axis("token", ((16, 16),)), Axis("content", ((8, 2),)))
    page = PageFormat("kv", 16, blocks * plane + plane, (Field("kv", 2, 0, axes),))
    group = Group(GroupKind.FULL, 16, 0, (Layer("layers.0", ADDRESS, plane, page),))
    rank = RankGeometry(0, 1, 0, 1, blocks, (group,), (Region(ADDRESS, 2 * blocks * plane),))
    rank.check()
    with pytest.raises(GeometryError, match="overlap"):
        with_layer(rank, block_stride=plane // 2).check()


def test_elements_of_a_page_that_share_bytes_are_refused():
    field = Field("ssm", 4, 0, (Axis("head", ((3, 2),)),))
    page = PageFormat("state", 0, 64, (field,))
    with pytest.raises(GeometryError, match="overlap in field 'ssm'"):
        rank_of(page, kind=GroupKind.STATE).check()


@pytest.mark.parametrize("place", [(2, 2, 0, 1), (-1, 2, 0, 1), (0, 1, 1, 1), (0, 0, 0, 1)])
def test_a_rank_that_does_not_exist_is_refused(place):
    tp_rank, tp_size, pp_rank, pp_size = place
    rank = replace(rank_of(kv_page()), tp_rank=tp_rank, tp_size=tp_size, pp_rank=pp_rank, pp_size=pp_size)
    with pytest.raises(GeometryError, match=r"rank \(pp, tp\) is .*; expected below"):
        rank.check()


def test_a_pool_without_blocks_is_refused():
    with pytest.raises(GeometryError, match="a pool of 0 blocks"):
        replace(rank_of(kv_page()), num_blocks=0).check()


def test_a_layer_is_described_once():
    rank = rank_of(kv_page())
    with pytest.raises(GeometryError, match=r"\['layers.0'\] are described more than once"):
        replace(rank, groups=rank.groups * 2).check()


def test_a_page_has_the_tokens_of_its_groups_blocks():
    rank = rank_of(kv_page(tokens=16))
    with pytest.raises(GeometryError, match="a page of 16 tokens; expected 32"):
        replace(rank, groups=(replace(rank.groups[0], block_tokens=32),)).check()


@pytest.mark.parametrize(("page", "kind"), [(kv_page(), GroupKind.STATE), (state_page(), GroupKind.FULL)])
def test_snapshots_belong_to_state_groups_and_nothing_else_does(page, kind):
    with pytest.raises(GeometryError, match="expected 0 for snapshots in a state group"):
        rank_of(page, kind=kind).check()


@pytest.mark.parametrize(
    ("kind", "attention_span"),
    [(GroupKind.SLIDING, 0), (GroupKind.CHUNKED, 0), (GroupKind.FULL, 8), (GroupKind.STATE, 8)],
)
def test_windows_and_chunks_have_an_attention_span_and_nothing_else_has(kind, attention_span):
    with pytest.raises(GeometryError, match="attention span"):
        Group(kind, 16, attention_span, ())


def with_layer(rank: RankGeometry, **changes) -> RankGeometry:
    (group,) = rank.groups
    return replace(rank, groups=(replace(group, layers=(replace(group.layers[0], **changes),)),))
