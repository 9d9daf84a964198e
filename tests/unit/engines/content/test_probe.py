"""What pages hold is proved by the backend's own write operation, and what is wrong is not believed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvferry.engines.vllm.content import Shard, adapters, page_of_attention, probe
from kvferry.engines.vllm.content.probe import element_types
from kvferry.engines.vllm.content.strides import strides_of
from support.backends.layers import BLOCKS, Case, make
from support.backends.mutants import mutants
from support.processor import HAS_AVX512, NO_AVX512

LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC", "LHBNC")
SCALED = (0.037, 0.11)
CPU = tuple(
    Case("CPU_ATTN", kv_dtype, layout, k=32, v=32, tokens=64, dtype=dtype, scales=scales)
    for kv_dtype, dtype, scales in (
        ("auto", torch.float32, (1.0, 1.0)),
        ("fp8", torch.float32, (1.0, 1.0)),
        ("fp8_e4m3", torch.float32, SCALED),
        ("fp8_e5m2", torch.float32, SCALED),
    )
    for layout in ("LBHNC", "BHLNC")
)
FLASH = tuple(
    Case("FLASH_ATTN", kv_dtype, layout, scales=scales)
    for kv_dtype, scales in (("auto", (1.0, 1.0)), ("fp8", (1.0, 1.0)), ("fp8_e4m3", SCALED))
    for layout in LAYOUTS
)


def named(case: Case) -> str:
    return f"{case.backend}-{case.kv_dtype}-{case.layout}"


def skip_what_the_processor_lacks(case: Case) -> None:
    if case.backend == "CPU_ATTN" and case.kv_dtype != "auto" and not HAS_AVX512:
        pytest.skip(NO_AVX512)


def page(case: Case):
    skip_what_the_processor_lacks(case)
    layer, spec, cache = make(case)
    return page_of_attention(layer, "layers.0", spec, cache, BLOCKS, Shard(1, 2, case.heads, 2 * case.heads))


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CPU, *FLASH], ids=named)
def test_dense_caches_are_proved_by_fields_in_every_layout(case, emulated):
    found = page(case)
    assert [field.name for field in found.fields] == ["k", "v"]
    assert [field.held for field in found.fields] == [(("head", case.heads, 2 * case.heads),)] * 2
    assert not found.opaque


def test_kernel_blocks_of_a_manager_block_are_one_token_axis(emulated):
    layer, spec, cache = make(Case("FLASH_ATTN", "fp8"))
    found = page_of_attention(layer, "x", replace(spec, block_size=64), cache, BLOCKS // 2, Shard(0, 1, 0, 2))
    assert found.fields[0].axis("token").loops == ((2, 4096 * 2), (32, 256))


def test_a_scale_per_head_is_what_the_operation_divides_by(emulated):
    case = Case("FLASH_ATTN", "fp8")
    layer, spec, cache = make(case)
    layer._k_scale = torch.tensor([0.5, 0.03])
    found = page_of_attention(layer, "x", spec, cache, BLOCKS, Shard(0, 1, 0, 2))
    assert [field.name for field in found.fields] == ["k", "v"]


def test_an_element_type_that_the_dtype_does_not_name_is_named_in_the_fields(emulated):
    from vllm.v1.attention.backends import flash_attn

    from support.backends import emulated as operations

    def always_e4m3(*args):
        operations.reshape_and_cache_flash(*args[:5], "fp8_e4m3", *args[6:])

    flash_attn.reshape_and_cache_flash = always_e4m3
    found = page(Case("FLASH_ATTN", "fp8_e5m2"))
    assert [field.name for field in found.fields] == ["k in float8_e4m3fn", "v in float8_e4m3fn"]


class Writer:
    """Writes K, its scale, V, its scale, as kernels that quantise per token and head do."""

    _k_scale_cache = None

    def __init__(self, layer):
        self.layer = layer

    def do_kv_cache_update(self, layer, key, value, cache, slots):
        self._k_scale_cache = cache
        block, token = slots // cache.shape[2], slots % cache.shape[2]
        parts = []
        for x in (key.float(), value.float()):
            scale = x.abs().amax(-1, keepdim=True) / 127
            parts += [(x / scale).round().to(torch.int8), scale.view(torch.int8)]
        cache.transpose(1, 2)[block, token] = torch.cat(parts, dim=-1)


def per_token_head():
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    layer, _, _ = make(Case("CPU_ATTN", "auto"))
    layer.impl, layer.kv_cache_dtype = Writer(layer), "int8_per_token_head"
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=48, head_size_v=32, dtype=torch.int8)
    return layer, spec, torch.zeros(BLOCKS, 16, 2, 48 + 32 + 8, dtype=torch.int8).transpose(1, 2)


def nvfp4():
    case = Case("CPU_ATTN", "nvfp4", "LBHNC", k=64, v=64, tokens=16, scales=(0.5, 2.0))
    from support.backends import emulated as operations

    class Impl:
        def do_kv_cache_update(self, layer, key, value, cache, slots):
            k, v = cache.transpose(1, 2).split(2, dim=-2)
            operations.reshape_and_cache_flash(
                key, value, k, v, slots, "nvfp4", layer._k_scale, layer._v_scale
            )

    layer, spec, _ = make(replace(case, kv_dtype="auto"))
    layer.impl, layer.kv_cache_dtype = Impl(), "nvfp4"
    return layer, spec, torch.zeros(BLOCKS, 4, 16, 36, dtype=torch.uint8)


def mla(kv_dtype, content, dtype):
    layer, spec, _ = make(Case("CPU_MLA", "auto", heads=1, k=576, v=0, tokens=16))
    from support.backends import emulated as operations

    class Impl:
        def do_kv_cache_update(self, kv_c, k_pe, cache, slots, kind, scale):
            operations.concat_and_cache_mla(kv_c, k_pe.squeeze(1), cache, slots, kind, scale)

    layer.impl, layer.kv_cache_dtype, layer._k_scale = Impl(), kv_dtype, torch.tensor(0.25)
    return layer, spec, torch.zeros(BLOCKS, 1, 16, content, dtype=dtype)


def indexer():
    from vllm.config import CacheConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache

    config = VllmConfig(cache_config=CacheConfig(block_size=64))
    with set_current_vllm_config(config):
        layer = DeepseekV32IndexerCache(132, torch.uint8, "i", config.cache_config)
    return layer, layer.get_kv_cache_spec(config), torch.zeros(BLOCKS, 1, 64, 132, dtype=torch.uint8)


PAGES = {
    "indexer": (adapters.indexer, indexer),
    "packed_kv, fp8": (adapters.packed_kv, lambda: make(Case("FLASH_ATTN", "fp8", scales=SCALED))),
    "packed_kv, bfloat16": (adapters.packed_kv, lambda: make(Case("FLASH_ATTN", "auto", "BHLNC"))),
    "cpu_kv": (adapters.cpu_kv, lambda: make(CPU[0])),
    "cpu_kv, fp8": (adapters.cpu_kv, lambda: make(CPU[-1])),
    "packed_kv_with_scales": (adapters.packed_kv_with_scales, per_token_head),
    "nvfp4": (adapters.nvfp4(k_swizzled=False, v_swizzled=True), nvfp4),
    "latent": (adapters.latent, lambda: mla("auto", 576, torch.bfloat16)),
    "latent, fp8": (adapters.latent, lambda: mla("fp8", 576, torch.uint8)),
    "latent_with_scales": (adapters.latent_with_scales, lambda: mla("fp8_ds_mla", 656, torch.uint8)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_the_probe_disproves_every_adapter_with_one_fault(name, emulated):
    if name == "cpu_kv, fp8":
        skip_what_the_processor_lacks(CPU[-1])
    adapter, made = PAGES[name]
    layer, spec, cache = made()
    s = strides_of(cache, spec, BLOCKS)
    right = adapter(s, Shard(0, 1, 0, s.heads))
    (element, *_) = element_types(getattr(layer, "kv_cache_dtype", "auto"), cache.dtype)
    assert probe.find_mismatch(layer, cache, s, right, element) == ""
    wrong = list(mutants(right))
    assert len(wrong) > 4
    believed = [what for what, page in wrong if not probe.find_mismatch(layer, cache, s, page, element)]
    assert not believed


def test_the_probe_disproves_nvfp4_scales_in_another_order():
    layer, spec, cache = nvfp4()
    s = strides_of(cache, spec, BLOCKS)
    for swizzled in ((True, True), (False, False), (True, False)):
        assert probe.find_mismatch(
            layer, cache, s, adapters.nvfp4(*swizzled)(s, Shard(0, 1, 0, 2)), torch.uint8
        )


def test_nvfp4_pages_of_several_kernel_blocks_are_proved_unless_the_blocks_overlap():
    layer, spec, cache = nvfp4()
    s = strides_of(cache, replace(spec, block_size=32), BLOCKS // 2)
    adapter = adapters.nvfp4(k_swizzled=False, v_swizzled=True)
    fields = adapter(s, Shard(0, 1, 0, 2))
    assert s.kernel_blocks == 2
    assert fields
    assert probe.find_mismatch(layer, cache, s, fields, torch.uint8) == ""
    assert adapter(replace(s, kernel=s.kernel // 2), Shard(0, 1, 0, 2)) == ()


def test_bytes_that_are_written_and_that_no_field_has_are_a_disproof():
    layer, spec, cache = per_token_head()
    s = strides_of(cache, spec, BLOCKS)
    k, v = adapters.packed_kv_with_scales(s, Shard(0, 1, 0, 2))
    said = probe.find_mismatch(layer, cache, s, (k,), torch.int8)
    assert said == f"{16 * 2 * (32 + 4)} of the bytes that are written belong to no field"
    assert probe.find_mismatch(layer, cache, s, (k, v), torch.int8) == ""


def test_a_probe_leaves_nothing_in_the_layers_implementation():
    layer, spec, cache = per_token_head()
    page_of_attention(layer, "x", spec, cache, BLOCKS, Shard(0, 1, 0, 2))
    assert layer.impl._k_scale_cache is None
    assert not cache.any()


def test_an_operation_that_raises_proves_nothing(emulated, caplog):
    layer, spec, cache = make(Case("FLASH_ATTN", "auto"))
    layer.impl = None
    assert page_of_attention(layer, "layers.0", spec, cache, BLOCKS, Shard(0, 1, 0, 2)).opaque
    assert "cache-write operation could not be run" in caplog.text
