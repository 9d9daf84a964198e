"""Engines that differ in what decides KV content refuse each other in words; others take what there is.

All are engines of one process, one after the other beside the first: a start takes a second or two there.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvferry.transport.messages import compare_facts
from support.vllm_engine.checkpoints import checkpoint_of, family_of
from support.vllm_engine.inside import distance
from support.vllm_engine.pair import connector, prompt
from support.vllm_engine.process import Engine

pytestmark = [pytest.mark.engine, pytest.mark.long]

Options = dict[str, Any]
LORA = {"enable_lora": True, "max_lora_rank": 8}
TEXT = prompt(300, 77)


class Engines:
    """The first engine's process, and facts of engines that were started beside it."""

    def __init__(self, checkpoints: Path, folder: Path) -> None:
        self.folder, self._checkpoints = folder, checkpoints
        self._known: dict[str, Any] = {}
        self.host = Engine(folder / "engines.log", **self.options("phi3", max_model_len=512, **LORA))
        self.host.ready()

    def model(self, name: str) -> Path:
        return checkpoint_of(name, self._checkpoints)

    def options(self, name: str, **options: Any) -> Options:
        own = {"model": str(self.model(name)), "kv_cache_memory_bytes": 32 << 20}
        return {**own, **family_of(name).engine_options(), "kv_transfer_config": connector(), **options}

    def facts(self, name: str, **options: Any) -> Any:
        key = f"{name} {sorted(options.items(), key=str)}"
        if key not in self._known:
            self._known[key] = self.start(name, **options)
        return self._known[key]

    def start(self, name: str, **options: Any) -> Any:
        """Start the second engine, in place of the last one; its facts."""
        return self.host.call("restart_other", self.options(name, **options))


@pytest.fixture(scope="module")
def engines(running: Any, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    running.close()
    engines = Engines(checkpoints, tmp_path_factory.mktemp("agree"))
    yield engines
    engines.host.close()


DIFFER: list[tuple[str, Options, Options, list[str]]] = [
    (
        "phi3", {"max_model_len": 512}, {"max_model_len": 513},
        ["built model, Phi3LongRoPEScaledRotaryEmbedding.use_long_rope: false there, true here"],
    ),
    (
        "llama4", {"max_model_len": 1024}, {"max_model_len": 40_000},
        ["model configuration: attn_temperature_tuning is false there, true here"],
    ),
    (
        "llama4", {"max_model_len": 1024},
        {"max_model_len": 1024, "override_generation_config": {"attn_temperature_tuning": True}},
        ["model configuration: attn_temperature_tuning is false there, true here"],
    ),
    (
        "qwen3", {}, {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}},
        [
            "model configuration: rope_parameters.rope_theta is 10000 there, 500 here",
            "built model, RotaryEmbedding.base: 10000 there, 500 here",
            "built model, RotaryEmbedding.cos_sin_cache of 32: *",
        ],
    ),
    (
        "qwen3", {}, {"hf_overrides": {"rms_norm_eps": 0.5}},
        ["model configuration: rms_norm_eps is 1e-06 there, 0.5 here"],
    ),
    (
        "qwen3", {}, {"dtype": "bfloat16"},
        [
            "model dtype: float32 there, bfloat16 here",
            "KV cache dtype: float32 there, bfloat16 here",
            "built model, RotaryEmbedding.cos_sin_cache of 32: *",
        ],
    ),
    (
        "qwen3", {}, {"load_format": "dummy"},
        ["weights: *"],
    ),
    (
        "qwen3", {"load_format": "dummy"}, {"load_format": "dummy", "seed": 3},
        ["weights: dummy, seed 0, 1 ranks there, dummy, seed 3, 1 ranks here"],
    ),
    (
        "qwen3", {}, {"additional_config": {"of a platform": 1}},
        ["engine settings: additional_config.of a platform is not set there, 1 here"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "one", "other", "said"), DIFFER)
def test_refusal_names_the_settings_that_change_content(
    engines: Engines, name: str, one: Options, other: Options, said: list[str]
) -> None:
    found = compare_facts(engines.facts(name, **one), engines.facts(name, **other))
    assert len(found) == len(said), found
    for sentence, expected in zip(found, said, strict=True):
        start, star, _ = expected.partition("*")
        assert sentence.startswith(start) if star else sentence == expected


AGREE: list[tuple[str, Options, Options]] = [
    ("qwen3", {}, {"max_model_len": 300}),
    ("qwen3", {}, {"block_size": 32, "max_num_seqs": 2, "enable_prefix_caching": False}),
    ("qwen3", {"dtype": "bfloat16"}, {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}),
    ("phi3", {"max_model_len": 512}, {"max_model_len": 300}),
    ("llama4", {"max_model_len": 1024}, {"max_model_len": 2048}),
]


@pytest.mark.parametrize(("name", "one", "other"), AGREE)
def test_engines_agree_if_their_differences_do_not_change_content(
    engines: Engines, name: str, one: Options, other: Options
) -> None:
    assert compare_facts(engines.facts(name, **one), engines.facts(name, **other)) == []


def test_checkpoint_in_another_folder_is_the_same(engines: Engines) -> None:
    copy = engines.folder / "copy of the model"
    shutil.copytree(engines.model("qwen3"), copy)
    assert compare_facts(engines.facts("qwen3"), engines.facts("qwen3", model=str(copy))) == []


def test_engines_with_other_rope_factors_move_nothing(engines: Engines) -> None:
    host = engines.host
    (offer,) = host.call("prefill", [TEXT])
    engines.start("phi3", max_model_len=1024)
    (answer,) = host.call("other", "generate", [TEXT], [offer["params"]])
    assert not host.call("other", "loaded")
    host.call("other", "reset_prefix_cache")
    assert answer["tokens"] == host.call("other", "generate", [TEXT])[0]["tokens"]
    assert answer["tokens"] != host.call("generate", [TEXT])[0]["tokens"], "the factors change the answer"
    assert "use_long_rope: false there, true here" in host.log.read_text()


def test_chunks_computed_with_other_rope_factors_are_not_found(engines: Engines) -> None:
    tiers = [
        {"type": "host", "capacity": "64MiB"},
        {"type": "file", "path": str(engines.folder), "capacity": "1GiB"},
    ]
    hits = {}
    for length in (512, 1024, 513, 511):
        engines.start("phi3", max_model_len=length, kv_transfer_config=connector(tiers=tiers))
        engines.host.call("other", "bids")
        engines.host.call("other", "generate", [TEXT])
        engines.host.call("other", "settle_tiers")
        hits[length] = sum(engines.host.call("other", "bids"))
    assert hits[512] == hits[1024] == 0
    assert hits[513] == hits[511] > 0, "those of the same factors are"


@pytest.fixture(scope="module")
def adapter(engines: Engines) -> Callable[[str, int], str]:
    """Writes an adapter that changes the answer; its folder."""

    def write(name: str, seed: int) -> str:
        draw, folder = np.random.default_rng(seed), engines.folder / name
        folder.mkdir()
        weights = {}
        for layer in range(4):
            at = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
            weights[f"{at}.lora_A.weight"] = draw.normal(size=(8, 128)).astype(np.float32)
            weights[f"{at}.lora_B.weight"] = draw.normal(size=(128, 8)).astype(np.float32)
        save_file(weights, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(
            '{"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["o_proj"]}'
        )
        return str(folder)

    return write


def test_adapters_match_by_content_and_not_by_name(
    engines: Engines, adapter: Callable[[str, int], str]
) -> None:
    host = engines.host
    assert compare_facts(host.call("facts"), engines.start("phi3", max_model_len=512, **LORA)) == []
    here = adapter("here", 1)
    there = shutil.copytree(here, engines.folder / "there")
    for theirs, moves in ((f"yours={there}", True), (f"mine={adapter('other', 2)}", False)):
        (offer,) = host.call("prefill", [TEXT], adapter=theirs)
        host.call("other", "reset_prefix_cache")
        (answer,) = host.call("other", "generate", [TEXT], [offer["params"]], 8, None, f"mine={here}")
        assert bool(host.call("other", "loaded")) == moves
        host.call("other", "reset_prefix_cache")
        (alone,) = host.call("other", "generate", [TEXT], None, 8, None, f"mine={here}")
        assert distance(answer, alone) < 1e-4
        assert answer["tokens"] == alone["tokens"]
    assert "were computed with LoRA" in host.log.read_text()
