"""Allocated caches: what is written through views is found in the raw bytes where the geometry says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvferry.common.errors import GeometryError, SilentCopy
from kvferry.geometry import GroupKind, Layer, RankGeometry
from kvferry.geometry.rank import LAYOUTS
from kvferry.planning.select import LoadSpan, select_cells
from kvferry.planning.template import build_templates
from kvferry.tools.measuring.owned import OwnedCache, allocate
from kvferry.tools.models.layout import EngineShape
from kvferry.tools.models.store import LayerCache, ModelCache, StoredField
from support.models import COMPACT, SPLITS, attention, model, state
from support.oracle import expand_cells

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))


def found(cache: OwnedCache, layer: Layer, block: int, name: str, axes: tuple[str, ...], dtype) -> np.ndarray:
    """A field's elements in one block, from the raw bytes at the addresses that its geometry gives."""
    raw = cache.buffer.cpu().numpy()
    field = next(field for field in layer.page.fields if field.name == name)
    at = np.array(layer.address - cache.buffer.data_ptr() + block * layer.block_stride + field.offset)
    for axis in axes:
        at = at[..., None] + field.axis(axis).offsets()
    return raw[at[..., None] + np.arange(field.item_bytes)].view(dtype)[..., 0]


def counted(view: torch.Tensor, first: int) -> int:
    """Write a value of its own into every element, in order of the axes; the next value."""
    values = torch.arange(first, first + view.numel(), dtype=view.dtype, device=view.device)
    view.copy_(values.view(view.shape))
    return first + view.numel()


def layers_of(rank: RankGeometry) -> dict[str, Layer]:
    return {layer.name: layer for group in rank.groups for layer in group.layers}


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize(("tp", "heads"), [(1, 4), (2, 2), (8, 1)])
@pytest.mark.parametrize(("layout", "kernels"), SPLITS)
def test_views_write_where_the_geometry_says(layout, kernels, tp, heads, device):
    """K of 4 and V of 2 elements, shared out or copied over ranks, two layers on the second pipeline rank."""
    engine = EngineShape(tp, (1, 2), 6, layout, 5, 6 // kernels)
    cache = allocate(model(*[attention(k=4, v=2)] * 3), engine, 2 * tp - 1, device)
    views = cache.views(torch.int16)
    assert list(views) == ["layers.1", "layers.2"]
    at = 1
    for view in views.values():
        assert view.shape == (5 * kernels, heads, 6 // kernels, 6)
        at = counted(view, at)
    at = 1
    for name, layer in layers_of(cache.geometry).items():
        size = 5 * heads * 6 * 6
        written = np.arange(at, at + size).reshape(5, kernels, heads, 6 // kernels, 6)
        written = written.transpose(0, 2, 1, 3, 4).reshape(5, heads, 6, 6)
        at += size
        for block in range(5):
            k = found(cache, layer, block, "k", ("head", "token", "content"), np.int16)
            v = found(cache, layer, block, "v", ("head", "token", "content"), np.int16)
            assert (np.concatenate([k, v], -1) == written[block]).all(), name


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("layout", COMPACT)
def test_recurrent_fields_lie_where_the_geometry_says(layout, device):
    parts = model(state(), attention(), state())
    cache = allocate(parts, EngineShape(2, (3,), 16, layout, 5), 1, device)
    states = cache.states({"ssm": torch.float32, "conv.x": torch.float16})
    assert list(states) == ["layers.0", "layers.2"]
    at = 1
    for fields in states.values():
        assert (fields["conv.x"].shape, fields["ssm"].shape) == ((5, 1, 3), (5, 2, 2, 3))
        for view in fields.values():
            at = counted(view, at)
    at = 1
    for name in states:
        layer = layers_of(cache.geometry)[name]
        for field, axes, dtype, shape in (
            ("conv.x", ("head", "width"), np.float16, (5, 1, 3)),
            ("ssm", ("head", "row", "column"), np.float32, (5, 2, 2, 3)),
        ):
            written = np.arange(at, at + np.prod(shape)).reshape(shape)
            at += written.size
            for block in range(5):
                assert (found(cache, layer, block, field, axes, dtype) == written[block]).all()


@pytest.mark.parametrize("layout", COMPACT)
def test_groups_overlay_the_same_bytes_block_by_block(layout):
    """What one group writes in block 2 is in block 2 of the others' layers in that slot, and nowhere else."""
    window = attention(kind=GroupKind.SLIDING, attention_span=8)
    cache = allocate(model(attention(), window, state()), EngineShape(1, (3,), 4, layout, 4), 0, "cpu")
    pages = cache.views(torch.int16)
    pages["layers.0"][2] = -1
    assert (pages["layers.1"][2] == -1).all()
    assert (cache.states()["layers.2"]["ssm"][2] == -1).all()
    others = torch.tensor([0, 1, 3])
    assert not pages["layers.1"][others].any()
    assert not cache.states()["layers.2"]["ssm"][others].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_page_map_finds_what_a_view_wrote(layout):
    cache = allocate(model(*[attention()] * 3), EngineShape(2, (3,), 4, layout, 5), 0, "cpu")
    for value, view in enumerate(cache.views(torch.int16).values()):
        view[3, 1, 2, 0] = 100 + value
    (where,) = cache.maps
    for slot in range(3):
        at = where.page(slot, 3) + where.strides[2] + 2 * where.strides[3] - cache.buffer.data_ptr()
        assert cache.buffer[at : at + 2].view(torch.int16).item() == 100 + slot


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_are_guarded_unless_asked_otherwise(layout):
    cache = allocate(model(attention(), attention()), EngineShape(1, (2,), 4, layout, 5), 0, "cpu")
    view, plain = cache.views(torch.int16)["layers.1"], cache.views(torch.int16, guarded=False)["layers.1"]
    assert type(plain) is torch.Tensor
    in_order = layout == "LBHNC"
    assert plain.is_contiguous() == in_order
    if in_order:
        view.reshape(-1)[7] = 5
        assert plain.reshape(-1)[7] == 5
    else:
        with pytest.raises(SilentCopy):
            view.reshape(-1)


def test_recurrent_views_are_guarded_unless_asked_otherwise():
    cache = allocate(model(state(), state()), EngineShape(1, (2,), 4, "BLHNC", 5), 0, "cpu")
    with pytest.raises(SilentCopy):
        cache.states()["layers.1"]["ssm"].flatten()
    assert type(cache.states(guarded=False)["layers.1"]["ssm"]) is torch.Tensor


def test_a_recurrent_field_that_all_ranks_have_whole_is_one_head():
    store = LayerCache(GroupKind.STATE, 0, (StoredField("conv.b", 2, 0, (("width", 3),)), *state().fields))
    for rank in range(2):
        cache = allocate(model(store), EngineShape(2, (1,), 4, "BLHNC", 5), rank, "cpu")
        view = cache.states()["layers.0"]["conv.b"]
        assert (view.dtype, view.shape) == (torch.int16, (5, 1, 3))
        view[3] = torch.tensor([7, 8, 9])
        (layer,) = cache.geometry.groups[0].layers
        assert found(cache, layer, 3, "conv.b", ("width",), np.int16).tolist() == [7, 8, 9]


def test_fp8_with_scales_is_viewed_as_bytes():
    scale = StoredField("scale", 4, 4)
    store = LayerCache(GroupKind.FULL, 0, (*attention(item=1).fields, scale))
    cache = allocate(ModelCache("fp8", (store,)), EngineShape(1, (1,), 4, "BLHNC", 3), 0, "cpu")
    (view,) = cache.views().values()
    assert (view.dtype, view.shape) == (torch.uint8, (3, 4, 4, 12))
    view[2, 1, 3, 8:].view(torch.float32).fill_(0.5)
    (layer,) = cache.geometry.groups[0].layers
    assert found(cache, layer, 2, "scale", ("head", "token"), np.float32)[1, 3] == 0.5
    with pytest.raises(GeometryError, match=r"elements of \[1, 4\] bytes, torch.float16 has 2"):
        cache.views(torch.float16)


def test_dtypes_of_another_size_are_refused():
    cache = allocate(model(attention(), state()), EngineShape(1, (2,), 4, "BLHNC", 3), 0, "cpu")
    with pytest.raises(GeometryError, match=r"'layers.0' keeps elements of \[2\] bytes, torch.float32 has 4"):
        cache.views(torch.float32)
    with pytest.raises(GeometryError, match=r"field 'ssm': elements of 4 bytes, but torch.float16 has 2"):
        cache.states({"ssm": torch.float16})


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_the_cache_is_one_allocation_that_its_region_covers(device):
    cache = allocate(model(attention(), state()), EngineShape(1, (2,), 4, "BLHNC", 3), 0, device)
    (region,) = cache.geometry.regions
    assert (region.address, region.length) == (cache.buffer.data_ptr(), cache.buffer.nbytes)
    assert (region.memory, region.device) == ("DRAM" if device == "cpu" else "VRAM", 0)
    everything = [*cache.views().values(), *(v for f in cache.states().values() for v in f.values())]
    assert {view.untyped_storage().data_ptr() for view in everything} == {region.address}
    assert not cache.buffer.any()


def test_planned_move_between_allocated_engines_matches_their_views():
    """Four ranks head-major in blocks of 4, to two ranks cross-layer in blocks of 6."""
    parts = model(attention(8), state(8, 4), attention(8), state(8, 4))
    src_engine, dst_engine = EngineShape(4, (4,), 4, "LBHNC", 9), EngineShape(2, (1, 3), 6, "BLNHC", 9)
    srcs = [allocate(parts, src_engine, rank, "cpu") for rank in range(src_engine.ranks)]
    dsts = [allocate(parts, dst_engine, rank, "cpu") for rank in range(dst_engine.ranks)]
    kv = {n: torch.randint(1, 1 << 14, (8, 24, 6), dtype=torch.int16) for n in ("layers.0", "layers.2")}
    ssm = {n: torch.randint(1, 1 << 30, (8, 2, 3), dtype=torch.int32) for n in ("layers.1", "layers.3")}
    src_tables = (np.array([3, 1, 8, 2, 6, 4]), np.array([7]))
    dst_tables = (np.array([5, 1, 8, 2]), np.array([4]))
    for rank, cache in enumerate(srcs):
        heads = slice(2 * rank, 2 * rank + 2)
        for name, view in cache.views(torch.int16).items():
            for position, block in enumerate(src_tables[0]):
                view[block] = kv[name][heads, 4 * position : 4 * position + 4]
        for name, fields in cache.states().items():
            fields["ssm"][src_tables[1][0]] = ssm[name][heads]
    for cache in dsts:
        move(srcs, cache, src_tables, dst_tables)
    for rank, cache in enumerate(dsts):
        heads = slice(4 * (rank % 2), 4 * (rank % 2) + 4)
        for name, view in cache.views(torch.int16).items():
            together = torch.cat([view[block] for block in dst_tables[0]], 1)
            assert torch.equal(together, kv[name][heads])
        for name, fields in cache.states().items():
            assert torch.equal(fields["ssm"][dst_tables[1][0]], ssm[name][heads])


def move(srcs, dst: OwnedCache, src_tables, dst_tables) -> None:
    """Copy what the planner says, address by address."""
    to = dst.buffer.numpy()
    templates = build_templates([src.geometry for src in srcs], dst.geometry)
    for src, template in zip(srcs, templates, strict=True):
        for route in template.routes:
            group = dst.geometry.groups[route.dst_group]
            cells = select_cells(
                route, group, LoadSpan(0, 24, 25),
                src_tables[route.src_group], dst_tables[route.dst_group],
            )  # fmt: skip
            pieces = expand_cells(route, cells)
            for a, b, n in zip(pieces.src, pieces.dst, pieces.length, strict=True):
                at, into = a - src.buffer.data_ptr(), b - dst.buffer.data_ptr()
                to[into : into + n] = src.buffer.numpy()[at : at + n]
