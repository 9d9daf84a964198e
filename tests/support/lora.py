"""LoRA adapters on disk, and whoever names them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from safetensors.numpy import save_file

from kvferry.common.errors import NotYetNamed
from kvferry.connector import content as module
from support.waiting import wait_for


def adapter(folder: Path, rank: int = 8, weight: float = 1.0, name: str = "a") -> SimpleNamespace:
    """A LoRA adapter on disk, as vLLM's request names it."""
    folder.mkdir(exist_ok=True)
    save_file({"a": np.full(4, weight, np.float32)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    return SimpleNamespace(
        lora_name=name, lora_int_id=ord(name[-1]), lora_path=str(folder), load_inplace=False
    )


def random_adapter(model: Path, folder: Path, seed: int) -> str:
    """A LoRA adapter of random weights that change the answers of a checkpoint; its folder."""
    config = json.loads((model / "config.json").read_text())
    draw, size, layers = np.random.default_rng(seed), config["hidden_size"], config["num_hidden_layers"]
    out = config["num_attention_heads"] * config["head_dim"]
    weights = {}
    for layer in range(layers):
        at = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{at}.lora_A.weight"] = draw.normal(size=(8, size)).astype(np.float32)
        weights[f"{at}.lora_B.weight"] = draw.normal(size=(out, 8)).astype(np.float32)
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return str(folder)


def once_named(ask: Callable[[], Any]) -> Any:
    """Return the answer of a function that raises NotYetNamed for a while."""

    def answer() -> tuple[Any, ...]:
        with suppress(NotYetNamed):
            return (ask(),)
        return ()

    return wait_for(answer)[0]


@contextmanager
def slow_files() -> Any:
    """While this lasts, whoever reads an adapter's weights waits until the event that it yields is set."""
    go_on, read = threading.Event(), module.weights_of

    def slow(folder: Path) -> str | None:
        assert go_on.wait(60.0)
        return read(folder)

    with mock.patch.object(module, "weights_of", slow):
        try:
            yield go_on
        finally:
            go_on.set()
