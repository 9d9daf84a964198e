"""Each of vLLM's engine arguments is classified, and those that decide content end up in a fact."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, fields, replace
from itertools import chain
from types import SimpleNamespace

import pytest
from vllm.config import LoRAConfig, MultiModalConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from kvferry.engines.vllm import identity
from kvferry.engines.vllm.built import Built
from kvferry.engines.vllm.compat.specs import state_dtypes
from kvferry.transport.messages import compare_facts
from support.engine_arguments import DECIDES, DOES_NOT, REFUSED

HERE = "DECIDES, REFUSED or DOES_NOT of support.engine_arguments"
TABLES = (DECIDES, REFUSED, DOES_NOT)
OF_SOME = {
    *("custom_histogram_buckets", "enable_hc_sp", "enable_shm_tensor_arena", "sleep_mode_offload_cudagraph"),
    *("monokernel", "sleep_mode_backend", "watchdog_config"),
}
"""Arguments that not every supported release has: the first four since 0.32, the others since 0.33."""


def test_each_argument_of_the_installed_vllm_is_classified_once():
    classified = Counter(chain.from_iterable(chain.from_iterable(table.values()) for table in TABLES))
    installed = {one.name for one in fields(AsyncEngineArgs)}
    assert sorted(installed - classified.keys()) == [], f"find out what they do, and add each to {HERE}"
    assert sorted(classified.keys() - installed - OF_SOME) == [], (
        f"vLLM has them no more: take them out of {HERE}, or add them to OF_SOME if another release has them"
    )
    assert [name for name, count in classified.items() if count > 1] == []


def engine(**changes):
    """As much of an engine's configuration as facts are taken from; changes by dotted name."""
    quantization = changes.pop("quantization_config", None)
    multimodal = replace(MultiModalConfig(), **changes.pop("multimodal", {}))
    model = SimpleNamespace(
        model="model", model_weights="", revision=None, dtype="torch.float32", quantization=None,
        quantization_config=quantization, multimodal_config=multimodal, is_multimodal_model=False,
        hf_config=SimpleNamespace(), seed=0,
    )  # fmt: skip
    model.__dict__.update(changes.pop("model", {}))
    found = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype=changes.pop("cache_dtype", "auto")),
        load_config=SimpleNamespace(load_format="auto", ignore_patterns=["original/**/*"]),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        speculative_config=changes.pop("speculative", None),
        lora_config=None,
        diffusion_config=None,
        additional_config={},
    )
    load = changes.pop("load", {})
    found.load_config.__dict__.update(load)
    found.__dict__.update(changes)
    return found


CACHE = SimpleNamespace(kv_cache_groups=[])
FP8 = {"mm_encoder_attn_dtype": "fp8"}
SETTINGS = [
    ("quantization_config", {"quantization_config": {"ignore": ["lm_head"]}}),
    ("ignore_patterns", {"load": {"ignore_patterns": ["consolidated*"]}}),
    ("additional_config", {"additional_config": {"of a platform": True}}),
    ("mm_encoder_attn_dtype", {"multimodal": {"mm_encoder_attn_dtype": "fp8"}}),
    ("mm_encoder_fp8_scale_path", {"multimodal": {**FP8, "mm_encoder_fp8_scale_path": __file__}}),
    ("mm_device_do_normalize", {"multimodal": {"mm_device_do_normalize": False}}),
    ("video_pruning_rate", {"multimodal": {"video_pruning_rate": 0.5}}),
    ("video_pruning_method", {"multimodal": {"video_pruning_method": "vidcom2"}}),
    ("diffusion_config", {"diffusion_config": {"canvas_length": 8}}),
]


def differences(one, other, built=None):
    return compare_facts(
        identity.must_agree(one, CACHE, Built()), identity.must_agree(other, CACHE, built or Built())
    )


def test_all_settings_that_only_the_configuration_has_are_tried():
    assert {name for name, _ in SETTINGS} == set(DECIDES["engine settings"])


@pytest.mark.parametrize(("name", "changes"), SETTINGS)
def test_a_setting_that_decides_content_is_named_with_both_values(name, changes):
    base = {"multimodal": FP8} if name == "mm_encoder_fp8_scale_path" else {}
    (said,) = differences(engine(**base), engine(**changes))
    assert said.startswith(f"engine settings: {name}")
    assert said.endswith(" here")


@pytest.mark.parametrize(
    ("fact", "one", "other"),
    [
        ("weights", {}, {"model": {"revision": "v2"}}),
        ("weights", {}, {"model": {"model_weights": "s3://other"}}),
        ("weights", {}, {"load": {"load_format": "tensorizer"}}),
        ("model dtype", {"cache_dtype": "fp8"}, {"cache_dtype": "fp8", "model": {"dtype": "torch.float16"}}),
        ("quantization", {}, {"model": {"quantization": "fp8"}}),
        ("KV cache dtype", {}, {"cache_dtype": "fp8"}),
    ],
)
def test_an_argument_that_decides_content_differs_in_its_fact(fact, one, other):
    (said,) = differences(engine(**one), engine(**other))
    assert said.startswith(f"{fact}: ")


def test_equal_caches_agree_whether_their_type_was_named_or_followed_from_the_model():
    assert differences(engine(), engine(cache_dtype="float32")) == []
    assert differences(engine(cache_dtype="fp8"), engine(cache_dtype="fp8_e4m3")) == []


def test_state_is_compared_in_the_types_that_it_has():
    from torch import bfloat16, float32
    from vllm.v1.kv_cache_interface import MambaSpec

    def cache(*dtypes):
        spec = MambaSpec(block_size=16, shapes=((4,), (4,)), dtypes=dtypes)
        return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])

    assert state_dtypes(CACHE) == ""
    assert state_dtypes(cache(bfloat16, float32)) == "bfloat16, float32"


def test_lora_settings_are_part_of_adapter_names():
    plain = LoRAConfig(max_lora_rank=8)
    names = {
        identity.lora_settings(SimpleNamespace(lora_config=config))
        for config in (
            None,
            plain,
            replace(plain, lora_dtype="float16"),
            replace(plain, target_modules=["q_proj"]),
            replace(plain, enable_tower_connector_lora=True),
        )
    }
    assert len(names) == 5
    assert asdict(plain)["max_lora_rank"] == 8


def test_a_processor_is_compared_by_its_effective_configuration(monkeypatch):
    parts = {"image_processor": {"size": {"height": 56}, "do_normalize": True, "image_mean": [0.5, 0.5]}}
    monkeypatch.setattr(identity, "processor_settings", lambda model: parts)
    given = {"multimodal": {"mm_processor_kwargs": {"do_normalize": False}}}
    assert differences(engine(), engine(**given)) == [
        "multimodal processor: mm_processor_kwargs.do_normalize is not set there, false here"
    ]


def test_a_processor_that_cannot_be_looked_at_is_no_reason_to_refuse(monkeypatch, caplog):
    def broken(model):
        raise ImportError("torchvision")

    monkeypatch.setattr(identity, "processor_settings", broken)
    assert "multimodal processor" not in identity.must_agree(engine(), CACHE, Built())
    assert "torchvision" in caplog.text
