"""The memory layout that is asked for, and what is read back from tensors."""

from types import SimpleNamespace
from typing import get_args

import pytest

pytest.importorskip("vllm")

import torch

from kvferry.common.errors import ConfigError
from kvferry.connector.config import ConnectorConfig, Layout
from kvferry.engines.vllm import layout
from kvferry.engines.vllm.compat import model as layouts
from kvferry.engines.vllm.compat.model import declared_layouts, layers_are_alike, takes_whole_blocks
from kvferry.geometry.rank import LAYOUTS

EVERY = list(LAYOUTS)


def test_the_setting_names_every_layout_there_is():
    assert get_args(Layout) == LAYOUTS


AXES = {"L": 3, "B": 5, "H": 2, "N": 16, "C": 8}


@pytest.fixture
def engine(monkeypatch):
    """What an engine would say of itself, to be changed by a test."""
    facts = SimpleNamespace(declared=EVERY, supported=EVERY, alike=True, whole=True, operators=None)
    facts.backends = ["FLASH_ATTN"]
    monkeypatch.setattr(layout, "attention_backends", lambda _: facts.backends)
    monkeypatch.setattr(layout, "declared_layouts", lambda _: facts.declared)
    monkeypatch.setattr(layout, "supported_layouts", lambda _: facts.supported)
    monkeypatch.setattr(layout, "layers_are_alike", lambda _: facts.alike)
    monkeypatch.setattr(layout, "takes_whole_blocks", lambda _: facts.whole)
    monkeypatch.setattr(layout, "operators_layout", lambda: facts.operators)
    facts.vllm_config = SimpleNamespace(model_config=object())
    return facts


def requested_layout(engine, setting):
    return layout.requested_layout(engine.vllm_config, ConnectorConfig(layout=setting))


def cache(name, extents=AXES, groups=1):
    """(kv_cache_config, tensors) of an engine with that layout, groups beside each other."""
    strides, reach = {}, 1
    for axis in reversed(name):
        strides[axis], reach = reach, reach * extents[axis]
    caches, allocated = {}, []
    for group in range(groups):
        whole = torch.zeros(reach).as_strided([extents[a] for a in "LBHNC"], [strides[a] for a in "LBHNC"])
        names = [f"{group}.{n}" for n in range(extents["L"])]
        caches |= dict(zip(names, whole, strict=True))
        allocated.append(SimpleNamespace(layers=names))
    return SimpleNamespace(kv_cache_tensors=allocated, kv_cache_layout=name), caches


def test_layers_that_are_alike_lie_best_with_heads_outside_layers(engine):
    assert requested_layout(engine, "auto") == "BHLNC"
    engine.alike = False
    assert requested_layout(engine, "auto") == "BLHNC"


def test_pages_whose_content_is_not_known_are_not_scattered(engine):
    engine.backends = ["FLASH_ATTN", "HPC_ATTN"]
    assert requested_layout(engine, "auto") == "BLHNC"


def test_an_undeclared_layout_is_not_requested(engine):
    engine.declared = ["LBHNC", "BLHNC"]
    assert requested_layout(engine, "auto") is None
    engine.alike = False
    assert requested_layout(engine, "auto") == "BLHNC"


def test_no_layout_is_requested_if_kernels_split_blocks(engine):
    engine.whole = False
    assert requested_layout(engine, "auto") is None


def test_layout_engine_requests_no_layout(engine):
    assert requested_layout(engine, "engine") is None


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_forced_layout_is_requested_even_if_undeclared(engine, name):
    engine.declared = []
    assert requested_layout(engine, name) == name


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layout_is_read_from_the_tensors(name):
    config, caches = cache(name)
    assert layout.read_back(config, caches) == name
    config.kv_cache_layout = next(other for other in LAYOUTS if other != name)
    assert layout.read_back(config, caches) == name, "the engine's own word was believed"


def test_axes_of_one_element_leave_it_to_the_engines_word():
    config, caches = cache("BLHNC", {**AXES, "L": 1}, groups=3)
    assert layout.read_back(config, caches) == "BLHNC"
    config.kv_cache_layout = None
    assert layout.read_back(config, caches) == "LBHNC or BLHNC or BHLNC"


def test_strides_of_no_known_order_are_unknown():
    config, caches = cache("NBLHC")
    assert layout.read_back(config, caches) == "unknown"


def test_a_forced_layout_that_did_not_come_about_says_what_the_backend_supports(engine):
    engine.supported = ["LBHNC", "BLHNC"]
    forced = ConnectorConfig(layout="BHLNC")
    with pytest.raises(ConfigError) as caught:
        layout.check_forced(engine.vllm_config, forced, "LBHNC")
    assert str(caught.value) == (
        "layout is 'BHLNC', but the engine's cache has LBHNC: its attention backends support LBHNC, BLHNC; "
        "set layout to one of these, or to 'auto'"
    )
    layout.check_forced(engine.vllm_config, forced, "BHLNC")


def test_a_forced_layout_that_only_layers_cannot_have_is_not_named_as_supported(engine):
    engine.supported = ["LBHNC", "BLHNC", "BHLNC", "LHBNC"]
    with pytest.raises(ConfigError) as caught:
        layout.check_forced(engine.vllm_config, ConnectorConfig(layout="BHLNC"), "LBHNC")
    assert str(caught.value) == (
        "layout is 'BHLNC', but the engine's cache has LBHNC: layers that are not all alike support LBHNC, "
        "BLHNC; set layout to one of these, or to 'auto'"
    )


def test_the_operators_own_layout_wins_over_auto_and_contradicts_a_forced_one(engine):
    engine.operators = "LBHNC"
    for setting in ("auto", "engine", "LBHNC"):
        layout.check_forced(engine.vllm_config, ConnectorConfig(layout=setting), "LBHNC")
    with pytest.raises(
        ConfigError, match="VLLM_KV_CACHE_LAYOUT=LBHNC gave the cache layout LBHNC; unset one"
    ):
        layout.check_forced(engine.vllm_config, ConnectorConfig(layout="BLHNC"), "LBHNC")


def configured(block=128, **text):
    """As much of vLLM's configuration as is looked at."""
    model = SimpleNamespace(is_hybrid=False, has_noops=False, hf_text_config=SimpleNamespace(**text))
    return SimpleNamespace(
        model_config=model, speculative_config=None, cache_config=SimpleNamespace(block_size=block)
    )


@pytest.mark.parametrize(
    ("text", "alike"),
    [
        ({}, True),
        ({"layer_types": None}, True),
        ({"layer_types": ["full_attention"] * 3}, True),
        ({"layer_types": ["full_attention", "sliding_attention"]}, False),
        ({"index_topk": 2048}, False),
    ],
    ids=str,
)
def test_layers_are_alike_unless_the_model_says_otherwise(text, alike):
    assert layers_are_alike(configured(**text)) is alike


def test_a_draft_model_or_recurrent_layers_are_not_like_the_rest():
    drafted, recurrent = configured(), configured()
    drafted.speculative_config = object()
    recurrent.model_config.is_hybrid = True
    assert not layers_are_alike(drafted)
    assert not layers_are_alike(recurrent)


@pytest.mark.parametrize(
    ("mla", "says", "declared"),
    [(False, None, 6), (True, None, 0), (True, ["LBNHC", "BLNHC"], 2)],
    ids=["attention", "latents", "latents that say which"],
)
def test_a_backend_of_latents_that_declares_any_layout_is_distrusted(monkeypatch, mla, says, declared):
    from vllm.v1.kv_cache_layout import KVCacheLayout

    declares = says and tuple(KVCacheLayout[name] for name in says)
    backend = SimpleNamespace(is_mla=lambda: mla, supported_kv_cache_layouts=lambda: declares)
    monkeypatch.setattr(layouts, "get_current_attn_backends", lambda _: [backend])
    assert len(declared_layouts(configured())) == declared


@pytest.mark.parametrize(("block", "whole"), [(128, True), (48, False), (32, True), (1056, True)])
def test_kernels_take_blocks_whole_if_all_of_them_take_that_size(monkeypatch, block, whole):
    from vllm.v1.attention.backend import MultipleOf

    def backend(*sizes):
        return SimpleNamespace(get_supported_kernel_block_sizes=lambda: list(sizes))

    backends = [backend(MultipleOf(1)), backend(16, MultipleOf(32))]
    monkeypatch.setattr(layouts, "get_current_attn_backends", lambda _: backends)
    assert takes_whole_blocks(configured(block)) is whole
    backends.append(backend(16, 32, 64))
    assert takes_whole_blocks(configured(block)) is (block == 32)
