"""The element type of a quantised checkpoint's KV cache is the one that vLLM takes."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config.model import ModelArchConfigConvertorBase
from vllm.utils.torch_utils import resolve_kv_cache_dtype_string

from kvferry.common.errors import ConfigError
from kvferry.tools.models import read_model
from kvferry.tools.plan.find import find_config

MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size": 64,
    "torch_dtype": "bfloat16",
}
FP8 = {"dynamic": False, "num_bits": 8, "type": "float"}
SCHEMES = ["FP8", "fp8", "NVFP4", "INT8", None, FP8, {**FP8, "dynamic": True}, {**FP8, "num_bits": 4}]
SCHEMES += [{**FP8, "type": "int"}]
BY_MODELOPT = {"producer": {"name": "modelopt", "version": "0.29.0"}}
BASES: dict[str, dict[str, Any]] = {
    "ModelOpt": {"quant_method": "modelopt"},
    "ModelOpt fp4": {"quant_method": "MODELOPT_FP4"},
    "ModelOpt, by producer": {**BY_MODELOPT, "quantization": {"quant_algo": "FP8"}},
    "oldest ModelOpt": {"quantization": {"quant_algo": "NVFP4", "modelopt_quant_config": {}}},
    "another producer": {"producer": {"name": "other"}, "quantization": {"quant_algo": "FP8"}},
    "nobody": {"quantization": {"quant_algo": "FP8"}},
    "another method": {"quant_method": "awq"},
}


def taken_by_vllm(quantization: dict[str, Any]) -> str:
    config = SimpleNamespace(quantization_config=json.loads(json.dumps(quantization)))
    ModelArchConfigConvertorBase._normalize_quantization_config(None, config)
    return resolve_kv_cache_dtype_string("auto", SimpleNamespace(hf_config=config))


def taken_by_plan(quantization: dict[str, Any]) -> str:
    try:
        reading = read_model({**MODEL, "quantization_config": quantization}, "auto")
    except ConfigError as error:
        return "nvfp4" if "asks for nvfp4" in str(error) else str(error)
    halved = reading.cache.layers[0].whole_bytes < read_model(MODEL, "auto").cache.layers[0].whole_bytes
    return "fp8_e4m3" if halved else "auto"


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_plan_takes_the_type_that_vllm_takes(base: dict[str, Any]) -> None:
    seen = set()
    for key, scheme, inside in product(("kv_cache_scheme", "kv_cache_quant_algo"), SCHEMES, (True, False)):
        inner = base.get("quantization", {})
        more = {"quantization": {**inner, key: scheme}} if inside and inner else {key: scheme}
        quantization = {**base, **more}
        seen.add(taken_by_vllm(quantization))
        assert taken_by_plan(quantization) == taken_by_vllm(quantization), quantization
    assert len(seen) == (3 if "modelopt" in str(base).lower() else 1)


@pytest.mark.parametrize(("scheme", "taken"), [(FP8, "fp8_e4m3"), (None, "auto")])
def test_a_scheme_of_llm_compressor_means_fp8(scheme: dict[str, Any] | None, taken: str) -> None:
    assert taken_by_plan({"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}) == taken


def test_a_file_beside_the_configuration_counts_if_that_has_none(tmp_path: Path) -> None:
    quantization = {**BY_MODELOPT, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(quantization))
    for given in (tmp_path, tmp_path / "config.json"):
        _, config = find_config(str(given))
        assert taken_by_plan(config["quantization_config"]) == "fp8_e4m3"
    own = {**MODEL, "quantization_config": {"quant_method": "awq"}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    assert find_config(str(tmp_path))[1] == own
