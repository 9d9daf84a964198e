"""What is kept is found under the same model, weights, element type, adapter and tenant, and no other."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file as save_tensors

from kvferry.tools.serving.tiny import tiny_checkpoint
from support.lora import random_adapter
from support.vllm_engine.inside import distance
from support.vllm_engine.pair import prompt
from support.vllm_engine.tiered import Tiered

pytestmark = [pytest.mark.engine, pytest.mark.long]
TEXT = prompt(300, 41)
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


class Fleet:
    """Engines one after the other, on one directory and of one model by its path."""

    def __init__(self, checkpoints: Path, folder: Path) -> None:
        self.folder, self.model = folder, folder / "model"
        self._checkpoints = checkpoints
        shutil.copytree(tiny_checkpoint("qwen3", checkpoints), self.model)
        self.engine: Tiered | None = None
        self.plain: dict[str, Any] = {}
        self._count = 0

    def start(self, **options: Any) -> Tiered:
        self.close()
        self._count += 1
        log = self.folder / f"{self._count}.log"
        directory = self.folder / "chunks"
        self.engine = Tiered("qwen3", self._checkpoints, directory, log, options, model=self.model)
        return self.engine

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def adapter(self, name: str, seed: int) -> str:
        """A LoRA adapter of random weights that change the answer."""
        return random_adapter(self.model, self.folder / name, seed)


@pytest.fixture(scope="module")
def fleet(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The text has been kept: for nobody in particular, without an adapter, in float32."""
    fleet = Fleet(checkpoints, tmp_path_factory.mktemp("names"))
    fleet.plain = fleet.start(**LORA).say(TEXT)
    yield fleet
    fleet.close()


def test_chunks_are_found_only_by_their_own_tenant_and_adapter(fleet: Fleet) -> None:
    engine = fleet.engine or fleet.start(**LORA)
    hows = (
        {"salt": "one tenant"},
        {"salt": "another"},
        {"adapter": fleet.adapter("first", 1)},
        {"adapter": fleet.adapter("second", 2)},
    )
    answers = [engine.say(TEXT, **how) for how in hows]
    assert [answer["hit"] for answer in answers] == [[0]] * len(hows)
    assert distance(answers[2], fleet.plain) > 1e-4, "the adapter changes nothing: the test shows nothing"
    assert distance(answers[2], answers[3]) > 1e-4
    engine.forget(host=True)
    again = [engine.say(TEXT, **how) for how in ({}, *hows)]
    assert [answer["hit"] for answer in again] == [[len(TEXT)]] * len(again)
    for answer, before in zip(again, (fleet.plain, *answers), strict=True):
        assert distance(answer, before) < 1e-4


def test_changed_adapter_finds_no_chunks(fleet: Fleet) -> None:
    folder = fleet.adapter("third", 3)
    engine = fleet.start(**LORA)
    before = engine.say(TEXT, adapter=folder)
    engine.forget()
    assert engine.say(TEXT, adapter=folder)["hit"] == [len(TEXT)]
    fleet.adapter("third", 4)
    engine.forget()
    assert engine.say(TEXT, adapter=folder)["hit"] == [0], "what the engine computes with is not certain"
    assert misses(engine)["unnamed "] == 1
    engine = fleet.start(**LORA)
    answer = engine.say(TEXT, adapter=folder)
    assert answer["hit"] == [0]
    assert distance(answer, before) > 1e-4
    engine.forget()
    assert engine.say(TEXT)["hit"] == [len(TEXT)], "without it all is as before"


def test_other_weights_at_the_same_path_find_no_chunks(fleet: Fleet) -> None:
    (file,) = fleet.model.glob("*.safetensors")
    sound = file.read_bytes()
    weights = load_file(file)
    name = next(name for name in weights if name.endswith("layers.0.self_attn.v_proj.weight"))
    weights[name][0, 0] += 1
    save_tensors(weights, file, metadata={"format": "pt"})
    try:
        engine = fleet.start()
        assert engine.say(TEXT)["hit"] == [0]
        assert misses(engine) == {"other_namespace ": 1}
        engine.forget(host=True)
        assert engine.say(TEXT)["hit"] == [len(TEXT)]
    finally:
        fleet.close()
        file.write_bytes(sound)


def test_another_dtype_finds_no_chunks(fleet: Fleet) -> None:
    engine = fleet.start(dtype="bfloat16")
    assert engine.say(TEXT)["hit"] == [0]
    assert misses(engine) == {"other_namespace ": 1}


def misses(engine: Tiered) -> dict[str, float]:
    """Why the tiers brought nothing, and how often: the metric's labels after the source."""
    counted, start = engine.engine.call("counted"), "misses tiers "
    return {name.removeprefix(start): n for name, n in counted.items() if name.startswith(start)}
