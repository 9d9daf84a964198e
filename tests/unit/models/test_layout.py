"""Layouts against arrays that numpy permutes: every element's address by the letters of its layout."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from kvferry.common.errors import GeometryError
from kvferry.geometry import GroupKind, Layer
from kvferry.geometry.rank import LAYOUTS
from kvferry.tools.models.layout import (
    EngineShape,
    GroupShape,
    group_layers,
    lay_out,
    lay_out_rank,
    layer_name,
    split_stages,
)
from kvferry.tools.models.store import LayerCache, StoredField
from support.models import COMPACT, SPLITS, attention, model, state


def letters(layout: str, **counts: int) -> np.ndarray:
    """Byte offsets of shape (L, B, H, N, C) in an array whose axes lie in memory as the letters say."""
    size = prod(counts.values())
    in_memory = np.arange(size).reshape([counts[letter] for letter in layout])
    return in_memory.transpose([layout.index(letter) for letter in "LBHNC"])


def addresses_of(layer: Layer, block: int, name: str, order: tuple[str, ...]) -> np.ndarray:
    """Addresses of a field's elements in one block, axes in `order`."""
    field = next(field for field in layer.page.fields if field.name == name)
    found = np.array(layer.address + block * layer.block_stride + field.offset)
    for axis in order:
        found = found[..., None] + field.axis(axis).offsets()
    return found


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize(("layout", "kernels"), SPLITS)
def test_every_element_lies_where_the_letters_say(layout, tp, kernels):
    """K and V of different widths, in fp8 with a scale, on two pipeline ranks."""
    k, v = attention(k=7, v=3, item=1).fields
    store = LayerCache(GroupKind.FULL, 0, (k, StoredField("scale", 4, 4), v))
    engine = EngineShape(tp, (2, 3), 6, layout, 5, 6 // kernels)
    for rank, geometry in enumerate(lay_out(model(*[store] * 5), engine)):
        geometry.check()
        (group,) = geometry.groups
        heads = max(4 // tp, 1)
        at = letters(layout, L=engine.stages[rank // tp], B=5 * kernels, H=heads, N=6 // kernels, C=16)
        assert geometry.regions[0].length == at.size
        first_head = rank % tp * 4 // tp
        for j, layer in enumerate(group.layers):
            assert layer.name == layer_name(j + 2 * (rank // tp))
            for block in range(5):
                # (heads, kernel blocks, tokens, content) of one block, its tokens in one axis
                inside = at[j, block * kernels : (block + 1) * kernels].transpose(1, 0, 2, 3)
                box = geometry.regions[0].address + inside.reshape(heads, 6, 16)
                found = addresses_of(layer, block, "k", ("head", "token", "content"))
                assert (found == box[..., :7]).all()
                found = addresses_of(layer, block, "v", ("head", "token", "content"))
                assert (found == box[..., 12:15]).all()
                assert (addresses_of(layer, block, "scale", ("head", "token")) == box[..., 8]).all()
            assert [f.axis("head").start for f in layer.page.fields] == [first_head] * 3
            assert [f.axis("head").total for f in layer.page.fields] == [4] * 3


@pytest.mark.parametrize("layout", COMPACT)
def test_groups_of_a_hybrid_share_slots_of_the_largest_page(layout):
    """Full attention 0, 3; a latent 1; state 2, 4, 5: three slots."""
    latent = LayerCache(GroupKind.MLA, 0, (StoredField("latent", 2, 0, (("content", 5),)),))
    full, snapshot = attention(), state()
    parts = (full, latent, snapshot, full, snapshot, snapshot)
    (rank,) = lay_out(model(*parts), EngineShape(1, (6,), 4, layout, 7), (1 << 20,))
    rank.check()
    full_page, latent_page, state_page = 4 * 4 * 12, 4 * 10, 12 + 4 * 24
    assert [group.layers[0].page.content_bytes for group in rank.groups] == [
        full_page,
        latent_page,
        state_page,
    ]
    at = letters(layout, L=3, B=7, H=1, N=1, C=full_page)[:, :, 0, 0, 0]
    assert rank.regions[0].length == 3 * 7 * full_page
    for group, numbers in zip(rank.groups, ((0, 3), (1,), (2, 4, 5)), strict=True):
        assert [layer.name for layer in group.layers] == [layer_name(n) for n in numbers]
        for j, layer in enumerate(group.layers):
            found = layer.address - (1 << 20) + np.arange(7) * layer.block_stride
            assert (found == at[j]).all()


@pytest.mark.parametrize("layout", COMPACT)
def test_every_element_can_be_viewed_as_a_tensor(layout):
    """The largest page, 55 bytes of fp8, would put the other group's floats at odd addresses."""
    fp8 = attention(heads=1, k=3, v=2, item=1)
    (rank,) = lay_out(
        model(fp8, state(1, 1), fp8, state(1, 1)), EngineShape(1, (4,), 11, layout, 3), (1 << 20,)
    )
    assert rank.groups[0].layers[0].page.page_bytes % 4
    for layer in rank.groups[1].layers:
        for field in layer.page.fields:
            assert (layer.address + field.offset) % field.item_bytes == 0
            assert layer.block_stride % field.item_bytes == 0


def test_a_snapshot_keeps_its_fields_one_after_the_other_each_with_its_own_shard():
    """Two channels and eight heads on four ranks, a field of odd length before an aligned one."""
    fields = (
        StoredField("conv.x", 2, 2, (("width", 3),)),
        StoredField("norm", 1, 0),
        StoredField("ssm", 4, 8, (("row", 2), ("column", 3))),
    )
    ranks = lay_out(model(LayerCache(GroupKind.STATE, 0, fields)), EngineShape(4, (1,), 16, "BLHNC", 3))
    for rank in ranks:
        rank.check()
        page = rank.groups[0].layers[0].page
        assert (page.block_tokens, rank.groups[0].block_tokens) == (0, 16)
        conv, norm, ssm = page.fields
        assert (conv.offset, norm.offset, ssm.offset, page.page_bytes) == (0, 6, 8, 8 + 2 * 24)
        assert conv.held == (("head", rank.tp_rank // 2, rank.tp_rank // 2 + 1),)
        assert norm.held == ()
        assert ssm.held == (("head", 2 * rank.tp_rank, 2 * rank.tp_rank + 2),)
        layer = rank.groups[0].layers[0]
        dense = np.arange(12).reshape(2, 2, 3) * 4
        assert (addresses_of(layer, 0, "ssm", ("head", "row", "column")) - layer.address - 8 == dense).all()


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12])
def test_ranks_hold_every_head_equally_often_or_the_engine_is_refused(heads, tp):
    engine = EngineShape(tp, (1,), 4, "LBHNC", 3)
    if heads % tp and tp % heads:
        with pytest.raises(GeometryError, match=f"{heads} heads on {tp} tensor-parallel ranks"):
            lay_out(model(attention(heads)), engine)
        return
    held = np.zeros(heads, np.int64)
    starts = []
    for rank in lay_out(model(attention(heads)), engine):
        rank.check()
        axis = rank.groups[0].layers[0].page.fields[0].axis("head")
        held[axis.start : axis.stop] += 1
        starts.append(axis.start)
    assert (held == max(tp // heads, 1)).all()
    assert starts == sorted(starts)


def test_a_latent_is_whole_on_every_rank():
    latent = LayerCache(GroupKind.MLA, 0, (StoredField("latent", 2, 0, (("content", 9),)),))
    for rank in lay_out(model(latent), EngineShape(3, (1,), 4, "LBNHC", 3)):
        (field,) = rank.groups[0].layers[0].page.fields
        assert field.held == ()
        assert [axis.name for axis in field.axes] == ["token", "content"]


def test_a_pipeline_rank_without_layers_of_a_group_has_the_group_empty():
    parts = (attention(), attention(), state())
    first, second = lay_out(model(*parts), EngineShape(1, (2, 1), 4, "LHBNC", 3))
    assert [len(group.layers) for group in first.groups] == [2, 0]
    assert [len(group.layers) for group in second.groups] == [0, 1]
    assert [group.kind for group in second.groups] == [GroupKind.FULL, GroupKind.STATE]
    assert second.groups[1].layers[0].name == layer_name(2)


def test_layers_that_keep_the_same_are_a_group_in_order_of_appearance():
    window = attention(kind=GroupKind.SLIDING, attention_span=8)
    other = attention(kind=GroupKind.SLIDING, attention_span=9)
    assert group_layers(model(window, attention(), window, other, attention())) == ((0, 2), (1, 4), (3,))


def test_pages_without_state_lie_side_by_side_in_blocks_of_the_widest_group():
    window, full = attention(kind=GroupKind.SLIDING, attention_span=8), attention(heads=1)
    (rank,) = lay_out(model(window, full, full, full, window), EngineShape(1, (5,), 4, "BLHNC", 7), (0,))
    rank.check()
    wide, narrow = rank.groups
    assert [layer.address for layer in wide.layers] == [0, 192]
    assert [layer.address for layer in narrow.layers] == [0, 48, 96]
    assert {layer.block_stride for group in rank.groups for layer in group.layers} == {2 * 192}
    assert rank.regions[0].length == 7 * 2 * 192


def test_a_group_may_have_blocks_of_its_own():
    window, full = attention(kind=GroupKind.SLIDING, attention_span=8), attention(heads=1)
    groups = (GroupShape((0,), 4), GroupShape((1,), 16))
    (rank,) = lay_out(model(window, full), EngineShape(1, (2,), 4, "LBNHC", 7, groups=groups), (0,))
    assert [group.block_tokens for group in rank.groups] == [4, 16]
    assert [group.layers[0].page.block_tokens for group in rank.groups] == [4, 16]
    assert {group.layers[0].block_stride for group in rank.groups} == {192}


def test_large_groups_are_dealt_out_so_that_each_has_layers_on_every_pipeline_rank():
    window = attention(kind=GroupKind.SLIDING, attention_span=8)
    parts = [window, window, attention(), window, window, attention()]
    counts = {window: 2, attention(): 1}
    assert group_layers(model(*parts), counts) == ((0, 3), (1, 4), (2, 5))
    groups = tuple(GroupShape(layers, 4) for layers in group_layers(model(*parts), counts))
    engine = EngineShape(1, (3, 3), 4, "BLHNC", 3, groups=groups)
    for rank in lay_out(model(*parts), engine):
        assert [len(group.layers) for group in rank.groups] == [1, 1, 1]
        # A block has as many slots as a group has layers.
        page = rank.groups[0].layers[0]
        assert page.block_stride == page.page.page_bytes


@pytest.mark.parametrize(
    ("layers", "pp", "stages"),
    [(4, 2, (2, 2)), (5, 2, (3, 2)), (6, 4, (1, 2, 2, 1)), (7, 4, (2, 2, 2, 1)), (3, 1, (3,))],
)
def test_layers_left_over_go_to_the_ranks_before_the_last(layers, pp, stages):
    assert split_stages(layers, pp) == stages


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in COMPACT])
def test_heads_outside_of_pages_need_pages_of_one_shape(layout):
    engine = EngineShape(1, (2,), 4, layout, 3)
    lay_out(model(attention(k=2, v=4), attention(k=4, v=2)), engine)[0].check()
    with pytest.raises(GeometryError, match=rf"{layout} .*one shape.*\(4, 4, 12\).*\(4, 4, 14\)"):
        lay_out(model(attention(k=3), attention(k=4)), engine)


def test_kernel_blocks_need_pages_without_gaps_between_them():
    engine = EngineShape(1, (2,), 8, "LBHNC", 3, 4)
    lay_out(model(attention(), state()), engine)[0].check()
    with pytest.raises(GeometryError, match="pages of 384 bytes in slots of 448 leave a gap"):
        lay_out(model(attention(), attention(k=4)), engine)
    with pytest.raises(GeometryError, match="BLHNC has other layers' pages between blocks"):
        EngineShape(1, (2,), 8, "BLHNC", 3, 4)


def test_a_token_page_whose_fields_differ_in_heads_is_refused():
    store = LayerCache(GroupKind.FULL, 0, (StoredField("k", 2, 4), StoredField("indexer", 2, 0)))
    with pytest.raises(
        GeometryError, match="k 4, indexer 0; describe fields with other heads as a separate layer"
    ):
        lay_out(model(store), EngineShape(1, (1,), 4, "LBHNC", 3))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layout": "NHD"}, "layout is 'NHD'; it must be one of LBNHC"),
        ({"tp": 0}, "0 tensor-parallel ranks"),
        ({"stages": (1, 0)}, r"layers \(1, 0\) per pipeline rank"),
        ({"num_blocks": 0}, "a pool of 0 blocks"),
        ({"kernel_tokens": 3}, "blocks of 4 tokens; expected a multiple of kernel blocks of 3"),
    ],
)
def test_engines_that_cannot_be_are_refused(change, says):
    with pytest.raises(GeometryError, match=says):
        EngineShape(
            **{"tp": 1, "stages": (1,), "block_tokens": 4, "layout": "LBNHC", "num_blocks": 2} | change
        )


def test_engines_of_other_models_are_refused():
    engine = EngineShape(2, (1, 1), 4, "LBNHC", 2)
    with pytest.raises(GeometryError, match=r"stages \(1, 1\) hold 2 layers; expected 3"):
        lay_out(model(*[attention()] * 3), engine)
    with pytest.raises(GeometryError, match="3 addresses for 4 ranks"):
        lay_out(model(*[attention()] * 2), engine, (0, 1, 2))
    with pytest.raises(GeometryError, match="rank 4 does not exist; expected 0 to 3"):
        lay_out_rank(model(*[attention()] * 2), engine, 4, 0)


@pytest.mark.parametrize(("layout", "kernels"), SPLITS)
def test_strides_and_fields_describe_the_same_bytes(layout, kernels):
    """A page map is computed with by kernels, fields by the planner: they must never part."""
    window = attention(kind=GroupKind.SLIDING, attention_span=8)
    stores = (attention(), window, window)
    placed = lay_out_rank(model(*stores), EngineShape(2, (3,), 4, layout, 5, 4 // kernels), 1, 1 << 20)
    for group, where in zip(placed.geometry.groups, placed.maps, strict=True):
        assert where.counts == (len(group.layers), 5 * kernels, 2, 4 // kernels, 12)
        for j, layer in enumerate(group.layers):
            for block in range(5):
                assert where.page(j, block) == layer.address + block * layer.block_stride
                kernel, head, token = where.strides[1:4]
                inside = [(t // where.counts[3] * kernel) + t % where.counts[3] * token for t in range(4)]
                said = [[where.page(j, block) + h * head + at for at in inside] for h in range(2)]
                found = addresses_of(layer, block, "k", ("head", "token", "content"))
                assert (found[..., 0] == said).all()
                assert (np.diff(found) == 2 * where.strides[4]).all()
