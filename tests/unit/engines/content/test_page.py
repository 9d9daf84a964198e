"""Pages whose interior no adapter describes: cells of a head and token, or whole pages of unknown bytes."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from kvferry.common.errors import Incompatible
from kvferry.engines.vllm.content import Shard, page_of_attention, scales_of
from kvferry.engines.vllm.content.adapters import ADAPTERS
from kvferry.geometry import Scale
from kvferry.planning.cell_copy import differences, plan_page_copy
from support.backends.layers import BLOCKS, Case, make

LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC", "LHBNC")


class Mixed:
    """Keeps a vector's elements mixed, and in a place that a subclass may get wrong."""

    def do_kv_cache_update(self, layer, key, value, cache, slots):
        tokens = cache.shape[2]
        mixed = torch.cat([key + value, key.roll(1, -1) - 2 * value], dim=-1).to(cache.dtype)
        self.place(mixed, cache.transpose(1, 2), slots // tokens, slots % tokens)

    def place(self, mixed, cache, block, token):
        cache[block, token] = mixed


class OnePerBlock(Mixed):
    """Adds a number that all tokens of a block share."""

    def place(self, mixed, cache, block, token):
        cache[block, token] = mixed + mixed[:, :, :1].mean(0, keepdim=True)


class ByPosition(Mixed):
    def place(self, mixed, cache, block, token):
        cache[block, token] = mixed + token[:, None, None].to(mixed.dtype)


class HeadsTogether(Mixed):
    def place(self, mixed, cache, block, token):
        cache[block, token] = mixed + mixed.flip(1)


def described(writer, layout, backend="HPC_ATTN", heads=2):
    layer, spec, cache = make(Case("FLASH_ATTN", "auto", layout, heads=heads, dtype=torch.float32))
    layer.impl, layer.kv_cache_dtype = writer(), "riddle"
    layer.get_attn_backend = lambda: type("Backend", (), {"get_name": staticmethod(lambda: backend)})
    return page_of_attention(layer, "layers.0", spec, cache, BLOCKS, Shard(0, 2, 0, 2 * heads)), cache


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_format_that_keeps_tokens_and_heads_apart_is_proved_as_cells(layout):
    page, cache = described(Mixed, layout)
    (cells,) = page.fields
    assert cells.name == "riddle of HPC_ATTN"
    assert [axis.name for axis in cells.axes] == ["head", "token", "content"]
    assert cells.elements == cache[0].numel() * cache.element_size()
    assert cells.held == (("head", 0, 2),)


@pytest.mark.parametrize("writer", [OnePerBlock, ByPosition, HeadsTogether])
def test_a_format_that_mixes_tokens_or_heads_is_not_proved(writer):
    page, _ = described(writer, "LBHNC")
    assert page.opaque


def test_bytes_outside_of_cells_are_a_disproof():
    class Tail(Mixed):
        def do_kv_cache_update(self, layer, key, value, cache, slots):
            whole = cache.as_strided((*cache.shape[:3], 2 * cache.shape[3]), cache.stride())
            super().do_kv_cache_update(layer, key, value, cache, slots)
            whole.transpose(1, 2)[slots // cache.shape[2], slots % cache.shape[2], :, -1] = 1

    layer, spec, _ = make(Case("FLASH_ATTN", "auto", "LBNHC", dtype=torch.float32))
    wide = torch.zeros(BLOCKS, 32, 2, 256).transpose(1, 2)[..., :128]
    layer.impl, layer.kv_cache_dtype = Tail(), "riddle"
    layer.get_attn_backend = lambda: type("Backend", (), {"get_name": staticmethod(lambda: "HPC_ATTN")})
    assert page_of_attention(layer, "x", spec, wide, BLOCKS, Shard(0, 2, 0, 4)).opaque


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_opaque_page_covers_its_tensor_in_any_layout_and_nothing_else(layout):
    page, cache = described(ByPosition, layout)
    (field,) = page.fields
    runs = field.axis("stretch").offsets() if field.axis("stretch") else [0]
    found = {int(start) + byte for start in runs for byte in range(field.item_bytes)}
    places = product(*(range(extent) for extent in cache.shape[1:]))
    strides = cache.stride()[1:]
    expected = {
        4 * sum(i * stride for i, stride in zip(place, strides, strict=True)) + byte
        for place in places
        for byte in range(4)
    }
    assert found == expected
    assert len(found) == len(runs) * field.item_bytes


def test_an_opaque_page_moves_whole_between_equal_layouts_and_not_between_others():
    here, there, other = (described(ByPosition, name)[0] for name in ("BHLNC", "BHLNC", "BLHNC"))
    assert differences(there, here) == []
    assert here.content_bytes == 2 * 32 * 128 * 4
    with pytest.raises(Incompatible, match=r"the peer's pages hold opaque .* at strides of \d+"):
        plan_page_copy(other, here)
    # NHD and HND pages are as long, and both are one stretch.
    with pytest.raises(Incompatible):
        plan_page_copy(described(ByPosition, "LBNHC")[0], described(ByPosition, "LBHNC")[0])


def test_scales_of_one_or_without_a_quantized_cache_are_left_out():
    layer, _, _ = make(Case("FLASH_ATTN", "fp8"))
    assert scales_of(layer) == ()
    layer._v_scale = torch.tensor([0.25])
    assert scales_of(layer) == (Scale("v", (0.25,)),)
    layer._k_scale = torch.tensor([1.0, 0.5])
    assert scales_of(layer) == (Scale("k", (1.0, 0.5)), Scale("v", (0.25,)))
    layer.kv_cache_dtype = "auto"
    assert scales_of(layer) == ()


def test_every_backend_with_an_adapter_is_one_of_vllms():
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    names = {member.name for member in AttentionBackendEnum} | {DeepseekV32IndexerBackend.get_name()}
    # What a backend calls itself is its name in the registry but for one. Those of indexers are not in it.
    assert set(ADAPTERS) - names == {"AITER_TRITON_MLA"}
