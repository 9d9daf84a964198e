"""Engines that must not read from each other, and settings that cannot be used: said in words."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvferry.common.errors import ConfigError
from kvferry.engines.vllm.transfer_config import TransferCheck
from kvferry.tools.serving.machine import check_machine
from kvferry.tools.serving.tiny import FAMILIES, tiny_checkpoint
from support.transfer_configs import CORPUS, mutations
from support.vllm_engine.pair import SOON, connector, prompt
from support.vllm_engine.process import Engine, EngineError

pytestmark = pytest.mark.engine


def options(model: Path) -> dict:
    family = FAMILIES["qwen3"].engine_options()
    return {
        "model": str(model),
        **family,
        "kv_cache_memory_bytes": 32 << 20,
        "kv_transfer_config": connector(),
    }


def other_weights(model: Path, folder: Path) -> Path:
    """The same checkpoint, name and shapes, with one tensor's sign changed."""
    from safetensors.torch import load_file, save_file

    copy = folder / model.name
    shutil.copytree(model, copy)
    (file,) = copy.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if "q_proj" in name)
    tensors[name] = -tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    return copy


def test_blocks_of_other_weights_are_refused_and_the_prompt_computed_locally(
    running: object, checkpoints: Path, tmp_path: Path
) -> None:
    running.close()
    model = tiny_checkpoint("qwen3", checkpoints)
    both = Engine(tmp_path / "both.log", **options(model))
    try:
        both.ready()
        both.call("start_another", options(other_weights(model, tmp_path)))
        text = prompt(300, 1)
        offer = both.call("prefill", [text])[0]["params"]
        answer = both.call("other", "generate", [text], [offer])[0]
        assert not both.call("other", "loaded")
        both.call("other", "reset_prefix_cache")
        assert answer["tokens"] == both.call("other", "generate", [text])[0]["tokens"]
        said = both.log.read_text()
        assert "is not served by" in said
        assert "weights: " in said
        both.call("step", SOON)
        assert both.call("requests_left") == 0
    finally:
        both.close()


@pytest.mark.long
def test_unusable_setting_is_named_at_start(running: object, checkpoints: Path, tmp_path: Path) -> None:
    running.close()
    settings = options(tiny_checkpoint("qwen3", checkpoints))
    settings["kv_transfer_config"] = connector(leese_seconds=3)
    engine = Engine(tmp_path / "engine.log", **settings)
    try:
        with pytest.raises(EngineError, match="no key 'leese_seconds'"):
            engine.ready()
    finally:
        engine.close()


def accepted() -> Iterator[tuple[str, dict]]:
    """Yield configurations that the check accepts, with kvferry's connector, for this machine."""
    for name, whole in CORPUS.items():
        if "OffloadingConnector" in str(whole):  # vLLM has it for CUDA and XPU only
            continue
        for change, given in (("as it is", whole), *mutations(whole)):
            found = TransferCheck(given)
            with suppress(ConfigError):
                found.raise_refusal()
                for config in found.configs:
                    check_machine(config)
                if found.configs:
                    yield f"{name}, {change}", given


@pytest.mark.parametrize("count", [2, pytest.param(14, marks=pytest.mark.long)])
def test_an_engine_starts_with_a_configuration_that_is_accepted(
    running: object, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    running.close()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = options(tiny_checkpoint("qwen3", checkpoints))
    for name, given in random.Random(count).sample([*accepted()], count):
        engine = Engine(tmp_path / "engine.log", **settings | {"kv_transfer_config": given})
        try:
            engine.ready()
        except EngineError as error:
            pytest.fail(f"{name}: {error}")
        finally:
            engine.close()
