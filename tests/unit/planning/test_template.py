import pytest

from kvferry.common.errors import Incompatible
from kvferry.geometry import Axis, Field, GroupKind, PageFormat, RankGeometry, opaque_page
from kvferry.planning.cell_copy import differences
from kvferry.planning.template import build_templates
from kvferry.tools.models.layout import EngineShape, lay_out
from kvferry.tools.models.store import LayerCache, ModelCache, StoredField as Kept
from support.engines import EngineSpec, Family, GroupSpec, Interior, Stored, ranks
from support.pages import ADDRESS, cross_layer, kv_page, rank_of, state_page


def shards(heads: int, tp: int) -> list[RankGeometry]:
    """The ranks of an engine of one layer; fewer heads than ranks are replicated."""
    held = max(heads // tp, 1)
    return [rank_of(kv_page(heads=held, start=r * heads // tp, total=heads), tp=(r, tp)) for r in range(tp)]


def complaints(srcs, dst) -> tuple[str, ...]:
    with pytest.raises(Incompatible) as caught:
        build_templates(srcs, dst)
    return caught.value.differences


def bytes_read(templates) -> list[int]:
    return [sum(route.runs.total_bytes for route in template.routes) for template in templates]


# -- shapes of the descriptors


def test_cross_layer_to_cross_layer_is_one_row_per_block():
    rank = cross_layer(rank_of(kv_page(), kv_page(), kv_page()))
    (template,) = build_templates([rank], rank)
    (route,) = template.routes
    assert route.runs.length.tolist() == [3 * 512]
    assert route.layers == ("layers.0", "layers.1", "layers.2")


def test_per_layer_to_cross_layer_is_one_row_per_layer():
    rank = rank_of(kv_page(), kv_page(), kv_page())
    (template,) = build_templates([rank], cross_layer(rank))
    assert template.routes[0].runs.length.tolist() == [512] * 3


def test_layers_whose_pages_differ_are_one_route_where_their_blocks_go_together():
    rank = rank_of(kv_page(heads=2), kv_page(heads=4), kv_page(heads=2))
    (template,) = build_templates([rank], cross_layer(rank))
    assert [route.layers for route in template.routes] == [("layers.0", "layers.2"), ("layers.1",)]
    (template,) = build_templates([cross_layer(rank)], cross_layer(rank))
    (route,) = template.routes
    assert route.runs.length.tolist() == [512 + 1024 + 512]


def test_head_outside_layer_needs_one_row_per_block_and_half_of_the_heads():
    family = Family(
        GroupKind.FULL,
        0,
        (Stored("k", 2, 4, (("content", 8),)), Stored("v", 2, 4, (("content", 8),))),
    )
    group = GroupSpec(GroupKind.FULL, 0, (0, 1, 2), 16)
    one, two = (ranks(EngineSpec(tp, (3,), (group,), "BHLNC", Interior(), 4), [family] * 3) for tp in (1, 2))
    half = 3 * 2 * 16 * 2 * 8 * 2
    for rank in two:
        (template,) = build_templates(one, rank)
        (route,) = template.routes
        assert route.runs.length.tolist() == [half]
    templates = build_templates(two, one[0])
    assert [t.routes[0].runs.length.tolist() for t in templates] == [[half], [half]]


# -- who supplies what


def test_two_halves_are_read_from_two_ranks():
    assert bytes_read(build_templates(shards(4, 2), shards(4, 1)[0])) == [512, 512]


def test_a_rank_that_has_nothing_for_us_is_not_read():
    assert bytes_read(build_templates(shards(4, 4), shards(4, 2)[1])) == [0, 0, 256, 256]


def test_replicated_heads_are_read_once_and_copies_are_spread_over_readers():
    srcs, readers = shards(2, 4), shards(2, 4)
    read = [bytes_read(build_templates(srcs, rank)) for rank in readers]
    assert read == [[256, 0, 0, 0], [0, 256, 0, 0], [0, 0, 256, 0], [0, 0, 0, 256]]


@pytest.mark.parametrize(("here", "there"), [(1, 2), (2, 1), (2, 4), (4, 2), (4, 1)])
def test_a_layer_with_fewer_heads_than_ranks_is_replicated_beside_one_with_more(here, there):
    few, many = (
        LayerCache(GroupKind.FULL, 0, (Kept("kv", 2, heads, (("content", 8),)),)) for heads in (1, 8)
    )
    model = ModelCache("heads per layer", (many, few, many, few))
    srcs, dsts = (lay_out(model, EngineShape(tp, (4,), 16, "LBNHC", 4)) for tp in (here, there))
    for dst in dsts:
        wanted = sum(layer.page.content_bytes for group in dst.groups for layer in group.layers)
        assert sum(bytes_read(build_templates(srcs, dst))) == wanted


def test_a_replicated_latent_is_read_from_one_rank_by_each_reader():
    latent = PageFormat(
        "mla", 16, 256, (Field("latent", 2, 0, (Axis("token", ((16, 16),)), Axis("content", ((8, 2),)))),)
    )
    srcs = [rank_of(latent, kind=GroupKind.MLA, tp=(r, 2)) for r in range(2)]
    readers = [rank_of(latent, kind=GroupKind.MLA, tp=(r, 3)) for r in range(3)]
    assert [bytes_read(build_templates(srcs, rank)) for rank in readers] == [[256, 0], [0, 256], [256, 0]]


def test_an_order_of_peers_is_the_order_of_templates():
    srcs = shards(2, 2)
    assert [t.src_rank for t in build_templates(srcs[::-1], shards(2, 1)[0])] == [(0, 1), (0, 0)]


# -- what cannot be moved, in words


def test_every_difference_is_named_and_layers_that_share_one_are_counted():
    theirs = rank_of(kv_page(item=4, width=4), *[kv_page(heads=3)] * 2)
    ours = rank_of(kv_page(width=16), *[kv_page(heads=2)] * 3)
    assert complaints([theirs], ours) == (
        "layer 'layers.0': field 'kv': elements of 4 bytes there, 2 here",
        "layer 'layers.0': field 'kv': axis 'content' is 4 there, 16 here",
        "layer 'layers.1' and 1 more: field 'kv': axis 'head' is 3 there, 2 here",
        "layer 'layers.3': not in the peer's cache",
    )


def test_a_difference_that_all_ranks_of_the_peer_have_is_named_once():
    assert complaints(shards(4, 4), shards(8, 1)[0]) == (
        "layer 'layers.0': field 'kv': axis 'head' is 4 there, 8 here",
    )


def test_a_state_and_a_token_cache_do_not_stand_for_each_other():
    state, tokens = rank_of(state_page(), kind=GroupKind.STATE), rank_of(kv_page())
    assert complaints([state], tokens) == ("layer 'layers.0': state there, full_attention here",)
    assert complaints([tokens], state) == ("layer 'layers.0': full_attention there, state here",)
    assert differences(state_page(), kv_page()) == [
        "state holds tokens on one side and a snapshot on the other (kv)"
    ]


def test_a_window_may_be_read_from_an_engine_that_keeps_everything():
    (template,) = build_templates(
        [rank_of(kv_page())], rank_of(kv_page(), kind=GroupKind.SLIDING, attention_span=8)
    )
    assert template.routes


def test_opaque_pages_keep_their_block_size():
    assert complaints(
        [rank_of(opaque_page("riddle", 16, 64, 0, 1))], rank_of(opaque_page("riddle", 32, 64, 0, 1))
    ) == ("layer 'layers.0': field 'opaque riddle': one value per 16 tokens there, per 32 here",)


def test_opaque_pages_keep_their_size_and_their_content():
    assert complaints(
        [rank_of(opaque_page("riddle", 16, 64, 0, 1))], rank_of(opaque_page("riddle", 16, 96, 0, 1))
    ) == ("layer 'layers.0': field 'opaque riddle': elements of 64 bytes there, 96 here",)
    assert complaints(
        [rank_of(opaque_page("amx", 16, 64, 0, 1))], rank_of(opaque_page("vec", 16, 64, 0, 1))
    ) == ("layer 'layers.0': the peer's pages hold opaque amx (amx), ours hold opaque vec (vec)",)


def test_opaque_shards_keep_their_number_of_ranks():
    srcs = [rank_of(opaque_page("riddle", 16, 64, r, 2), tp=(r, 2)) for r in range(2)]
    assert bytes_read(build_templates(srcs, srcs[1])) == [0, 64]
    assert complaints(srcs, rank_of(opaque_page("riddle", 16, 64, 0, 1))) == (
        "layer 'layers.0': field 'opaque riddle': axis 'shard' is 2 there, 1 here",
    )


def test_a_value_per_block_beside_tokens_keeps_the_block_size():
    def page(tokens: int) -> PageFormat:
        kv = kv_page(tokens).fields[0]
        return PageFormat("kv", tokens, kv.extent()[1] + 4, (kv, Field("scale", 4, kv.extent()[1], ())))

    assert differences(page(16), page(16)) == []
    assert differences(page(16), page(32)) == ["field 'scale': one value per 16 tokens there, per 32 here"]


def test_other_axes_are_named():
    other = PageFormat(
        "kv", 16, 64, (Field("kv", 2, 0, (Axis("token", ((16, 2),)), Axis("byte", ((2, 32),)))),)
    )
    assert differences(other, kv_page()) == ["field 'kv': axes byte there, content, head here"]


def test_a_part_that_no_rank_holds_is_named():
    assert complaints(shards(4, 2)[:1], shards(4, 1)[0]) == (
        "layer 'layers.0': field 'kv': no rank of the peer holds head [2, 4)",
    )


def test_parts_that_overlap_are_refused():
    srcs = [rank_of(kv_page(heads=2, start=start, total=3), tp=(start, 2)) for start in range(2)]
    assert complaints(srcs, rank_of(kv_page(heads=3))) == (
        "layer 'layers.0': field 'kv': the peer's ranks hold overlapping parts",
    )


def test_a_field_is_sharded_along_the_same_axis_on_both_sides():
    def page(heads: int, width: int) -> PageFormat:
        axes = (
            Axis("head", ((heads, 256),), 0, 2),
            Axis("token", ((16, 16),)),
            Axis("content", ((width, 2),), 0, 8),
        )
        return PageFormat("kv", 16, heads * 256, (Field("kv", 2, 0, axes),))

    assert complaints([rank_of(page(2, 4))], rank_of(page(1, 8))) == (
        "layer 'layers.0': field 'kv': sharded along content and head, not one axis",
    )


def test_addresses_in_rows_are_those_of_block_zero():
    (template,) = build_templates([rank_of(kv_page())], rank_of(kv_page(), address=2 * ADDRESS))
    rows = template.routes[0].runs
    assert (rows.src.tolist(), rows.dst.tolist(), rows.length.tolist()) == ([ADDRESS], [2 * ADDRESS], [512])


# -- ranks that divide the tokens of a block


def sharing(tp: int, *turns: int, block: int = 16, address: int = 1 << 40) -> list[RankGeometry]:
    """The ranks of an engine with one layer of latents."""
    family = Family(GroupKind.MLA, fields=(Stored("latent", 2, 0, (("content", 8),)),))
    group = GroupSpec(GroupKind.MLA, 0, (0,), block, turns=turns or (1, 1))
    return ranks(EngineSpec(tp, (1,), (group,), "LBHNC", Interior(), 9, address), [family])


@pytest.mark.parametrize("interleave", [1, 4, 16])
def test_pages_of_equal_tokens_move_whole_and_from_their_ranks_alone(interleave):
    for number, rank in enumerate(sharing(2, 2, interleave)):
        templates = build_templates(sharing(2, 2, interleave), rank)
        assert bytes_read(templates) == ([256, 0], [0, 256])[number]
        (route,) = templates[number].routes
        assert (route.cell_tokens, route.src_cells, route.dst_cells, route.interleaves) == (32, 1, 1, ())
        assert route.runs.length.tolist() == [256]


def test_turns_as_long_as_a_page_move_whole_pages():
    templates = build_templates(sharing(2, 2, 16), sharing(1)[0])
    assert [[route.runs.length.tolist() for route in one.routes] for one in templates] == [[[256]]] * 2
    assert [one.routes[0].src_interleave.rank for one in templates] == [0, 1]


def test_shorter_turns_are_a_part_of_every_cell():
    (first, _) = build_templates(sharing(2, 2, 4), sharing(1)[0])
    assert first.routes[0].interleaves == ()
    assert first.routes[0].runs.length.tolist() == [64, 64]


def test_ranks_read_from_different_copies_of_their_tokens():
    srcs, dsts = sharing(8, 2, 1), sharing(8, 2, 1, address=1 << 44)
    read = [[bool(size) for size in bytes_read(build_templates(srcs, dst))] for dst in dsts]
    assert [one.index(True) for one in read] == list(range(8))
    assert [sum(one) for one in read] == [1] * 8


def test_tokens_that_no_rank_holds_are_named():
    assert complaints(sharing(2, 2, 4)[:1], sharing(1)[0]) == (
        "layer 'layers.0': no rank of the peer holds the tokens of turn 1 of 2",
    )
    assert build_templates(sharing(2, 2, 4)[:1], sharing(2, 2, 4)[0]), "nobody needs it"


def test_ranks_that_divide_tokens_in_different_ways_are_refused():
    assert complaints([sharing(2, 2, 4)[0], sharing(2, 2, 8)[1]], sharing(1)[0]) == (
        "layer 'layers.0': the peer's ranks divide the tokens of a block in different ways",
    )
