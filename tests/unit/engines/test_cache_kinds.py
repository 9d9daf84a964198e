"""Caches of layers that no engine runs on a CPU: vLLM's own layer and view of memory, described."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import CacheConfig, ModelConfig, PoolerConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.models.deepseek_v4.attention import DeepseekV4IndexerCache
from vllm.models.deepseek_v4.compressor import CompressorStateCache
from vllm.models.deepseek_v41.compressor import CompressorStateCache as RingOfV41
from vllm.models.inkling.nvidia.sconv_swa_attn import InklingConvState
from vllm.models.qwen4_exp.common.qsa_cache import QSACompressedKeyCache, QSAKeyStateCache
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvferry.common.errors import ConfigError, Incompatible
from kvferry.engines.vllm.compat.process import WorkerRanks
from kvferry.engines.vllm.geometry import describe_cache
from kvferry.geometry import Attention, GroupKind, RankGeometry
from kvferry.geometry.canonical import canonical_form_of
from kvferry.planning.select import LoadSpan, select_cells
from kvferry.planning.template import build_templates
from support.backends import emulated
from support.played_worker import PlayedWorker

BLOCKS = 5
Make = Callable[[VllmConfig], Any]


def config_of(tp: int = 1) -> Any:
    config = VllmConfig(cache_config=CacheConfig(block_size=64))
    config.parallel_config = SimpleNamespace(
        tensor_parallel_size=tp, pipeline_parallel_size=1, decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
    )  # fmt: skip
    config.model_config = SimpleNamespace(get_total_num_kv_heads=lambda: 1)
    return config


def described(make: Make, *, tp: int = 1, rank: int = 0, block: int = 64) -> RankGeometry:
    """A cache with one layer of that kind, as vLLM lays it out; keeps the memory alive."""
    config = config_of(tp)
    config.cache_config.block_size = block
    with set_current_vllm_config(config):
        layer = make(config)
    spec = layer.get_kv_cache_spec(config)
    page = spec.page_size_bytes
    memory = torch.zeros(page * BLOCKS, dtype=torch.int8)
    placed = KVCacheTensor(
        size=page * BLOCKS, layers=["layer.0"], layer_stride=page * BLOCKS, block_stride=page
    )
    (view,) = create_kv_cache_views(memory, spec, BLOCKS, KVCacheLayout.LBNHC, placed)
    config.compilation_config.static_forward_context["layer.0"] = layer
    held = KVCacheConfig(BLOCKS, [placed], [KVCacheGroupSpec(["layer.0"], spec)])
    _KEPT.append(PlayedWorker(config, layer))
    geometry = describe_cache(config, held, {"layer.0": view}, WorkerRanks(rank))
    _KEPT.append(memory)
    return geometry


_KEPT: list[Any] = []


def indexer(config: Any) -> Any:
    return DeepseekV32IndexerCache(132, torch.uint8, "i", config.cache_config)


def compressed_indexer(config: Any) -> Any:
    return DeepseekV4IndexerCache(132, torch.uint8, "i", config.cache_config, compress_ratio=4)


def compressed_keys(config: Any) -> Any:
    return _of(QSACompressedKeyCache, head_size=64, dtype=torch.bfloat16, compress_ratio=4)(config)


def compressed_latents(config: Any) -> Any:
    """Of a backend whose latents are known, where a state is one token's."""
    layer = compressed_indexer(config)
    layer.get_attn_backend = lambda: CPUMLABackend
    return layer


def window(config: Any) -> Any:
    return DeepseekV4SWACache(512, 128, torch.bfloat16, "w", config.cache_config)


def compressor(config: Any) -> Any:
    return CompressorStateCache(64, torch.float32, 4, "c")


def ring(config: Any) -> Any:
    return RingOfV41(64, torch.float32, "r")


def ring_of_keys(config: Any) -> Any:
    return _of(QSAKeyStateCache, head_size=64, dtype=torch.bfloat16, compress_ratio=4)(config)


def streams(config: Any) -> Any:
    return _of(
        InklingConvState, block_size=4, num_kv_heads=1, head_size=64, _dtype=torch.bfloat16, sliding_window=4
    )(config)


def _of(layer: type, **attributes: Any) -> Make:
    """A layer without what only its kernels need: its constructor asks for a GPU."""

    def make(config: Any) -> Any:
        made = layer.__new__(layer)
        torch.nn.Module.__init__(made)
        for name, value in {"cache_config": config.cache_config, **attributes}.items():
            setattr(made, name, value)
        return made

    return make


CASES: dict[Make, tuple[GroupKind, int, int, int]] = {
    indexer: (GroupKind.MLA, 64, 0, 64 * 132),
    compressed_indexer: (GroupKind.MLA, 64, 0, 16 * 132),
    compressed_keys: (GroupKind.MLA, 64, 0, 16 * 64 * 2),
    compressed_latents: (GroupKind.MLA, 64, 0, 16 * 132),
    window: (GroupKind.SLIDING, 64, 128, 64 * 512 * 2),
    compressor: (GroupKind.SLIDING, 4, 8, 4 * 64 * 4),
    ring: (GroupKind.STATE, 8, 0, 8 * 64 * 4),
    ring_of_keys: (GroupKind.STATE, 4, 0, 4 * 64 * 2),
    streams: (GroupKind.SLIDING, 4, 4, 4 * 64 * 2),
}
"""What each is: kind, tokens of a block, attention span, and the bytes of a page that hold something."""
of_each = pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)


@of_each
def test_each_moves_whole_as_the_kind_that_its_spec_says(make: Make) -> None:
    (group,) = described(make).groups
    kind, block, attention_span, page_bytes = CASES[make]
    assert (group.kind, group.block_tokens, group.attention_span) == (kind, block, attention_span)
    (layer,) = group.layers
    assert layer.page.opaque
    assert layer.page.page_bytes == page_bytes
    assert layer.page.block_tokens == (0 if kind is GroupKind.STATE else block)


@of_each
def test_pages_of_equal_engines_move_and_others_are_refused(make: Make) -> None:
    here, there = described(make), described(make)
    (template,) = build_templates([there], here)
    (route,) = template.routes
    kind, block, attention_span, _ = CASES[make]
    if kind is not GroupKind.STATE:
        table = np.arange(1, BLOCKS, dtype=np.int64)
        tokens = 3 * block + 1
        cells = select_cells(
            route, Attention(kind, attention_span), LoadSpan(0, tokens, tokens + 1), table, table
        )
        first = max(tokens - attention_span + 1, 0) // block if attention_span else 0
        assert cells.src_block.tolist() == table[first:4].tolist()
    # Rings are valid at one position only; tiers refuse engines that have any.
    if kind is not GroupKind.STATE:
        (chunks,) = canonical_form_of([here], 64).groups
        (section,) = chunks.sections
        assert (section.element_tokens, section.elements) == (block, 64 // block)
        assert section.bytes == 64 // block * CASES[make][3]


@pytest.mark.parametrize("make", [indexer, compressed_indexer, compressed_keys])
def test_blocks_of_other_sizes_are_refused(make: Make) -> None:
    with pytest.raises(Incompatible, match="peer's pages hold opaque"):
        build_templates([described(make)], described(make, block=128))


@of_each
def test_only_replicated_pages_move_to_an_engine_of_other_ranks(make: Make) -> None:
    here = [described(make, tp=2, rank=rank) for rank in range(2)]
    if make in (indexer, compressed_indexer, compressed_keys, compressed_latents, window, compressor):
        for rank in here:
            (template,) = build_templates([described(make)], rank)
            assert len(template.routes) == 1
    else:
        with pytest.raises(Incompatible):
            build_templates([described(make)], here[1])


def test_keys_of_a_sparse_indexer_are_fields_where_their_operation_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emulated.install(monkeypatch)
    here, there = described(indexer), described(indexer, block=128)
    ((layer,),) = (group.layers for group in here.groups)
    assert [field.name for field in layer.page.fields] == ["indexer", "indexer.scale"]
    assert build_templates([there], here)[0].routes[0].cell_tokens == 64
    (group,) = canonical_form_of([here], 128).groups
    parts = [(part.field, part.item_bytes, part.inner) for of in group.sections for part in of.parts]
    assert parts == [("indexer.scale", 4, (("content", 1),)), ("indexer", 1, (("content", 128),))]
    assert canonical_form_of([there], 128) == canonical_form_of([here], 128)
    assert described(compressed_indexer).groups[0].layers[0].page.opaque


def test_shuffled_keys_move_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on AMD GPUs, whose operation is another."""
    emulated.install(monkeypatch)
    monkeypatch.setattr(DeepseekV32IndexerCache, "uses_shuffled_layout", True)
    assert described(indexer).groups[0].layers[0].page.opaque


def test_an_encoder_without_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"keeps no KV cache.*without a KV connector"):
        describe_cache(config_of(), KVCacheConfig(1, [], []), {}, WorkerRanks())


def test_a_layer_that_is_refused_is_named() -> None:
    spec = CrossAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    held = KVCacheConfig(1, [], [KVCacheGroupSpec(["decoder.0"], spec)])
    with pytest.raises(ConfigError, match=r"^layer decoder\.0: kvferry cannot move CrossAttentionSpec"):
        describe_cache(config_of(), held, {}, WorkerRanks())


@pytest.mark.parametrize(
    ("pooling", "said"),
    [
        ("MEAN", r"pools over every token of a prompt \(MEAN\).*without a KV connector"),
        ("CLS", r"pools over every token of a prompt \(CLS\)"),
        ("LAST", "cannot move CrossAttentionSpec"),
    ],
)
def test_a_model_that_pools_over_every_token_is_refused_and_no_other(pooling: str, said: str) -> None:
    config, spec = (
        config_of(),
        CrossAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32),
    )
    model = SimpleNamespace(attn_type="decoder", pooler_config=PoolerConfig(seq_pooling_type=pooling))
    model.is_prefix_caching_supported = ModelConfig.is_prefix_caching_supported.fget(model)
    config.model_config = model
    with pytest.raises(ConfigError, match=said):
        describe_cache(
            config, KVCacheConfig(1, [], [KVCacheGroupSpec(["decoder.0"], spec)]), {}, WorkerRanks()
        )
