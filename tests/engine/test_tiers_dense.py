"""A dense model in an engine with little memory. A child of MultiConnector has its tiers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.tools.replay.trace.open import open_trace
from kvferry.tools.serving.tiny import FAMILIES, tiny_checkpoint
from support.replayed import found_by_engine, found_in_replay, model_of_engine, replay_of
from support.vllm_engine.inside import distance
from support.vllm_engine.pair import connector, prompt
from support.vllm_engine.process import Engine
from support.waiting import wait_for

pytestmark = pytest.mark.engine

TEXT = prompt(512, 40)
"""Ends where chunks do."""
HOST, FILES = "4MiB", "256MiB"
"""Capacities of the tiers. Host memory has room for 16 chunks."""
CHUNK_TOKENS = 128
BLOCKS = 20
"""Blocks of the engine, which are as long as chunks."""


class Child:
    """An engine with a connector that is a child of vLLM's MultiConnector, and that records requests."""

    def __init__(self, checkpoints: Path, folder: Path) -> None:
        (folder / "chunks").mkdir()
        self.recording = folder / "trace.jsonl"
        self.checkpoint = tiny_checkpoint("qwen3", checkpoints)
        tiers = [
            {"type": "host", "capacity": HOST},
            {"type": "file", "path": str(folder / "chunks"), "capacity": FILES},
        ]
        child = connector(tiers=tiers, chunk_tokens=CHUNK_TOKENS, record=str(self.recording))
        parent = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": [child]},
        }
        options = {"num_gpu_blocks_override": BLOCKS, "max_num_batched_tokens": 256}
        self.engine = Engine(
            folder / "log",
            model=str(self.checkpoint),
            kv_transfer_config=parent,
            **{**options, **FAMILIES["qwen3"].engine_options()},
        )
        try:
            self.engine.ready()
        except BaseException:
            self.engine.close()
            raise

    def say(self, text: list[int]) -> dict[str, Any]:
        """Return the engine's answer, when everything that follows from it is stored."""
        (answer,) = self.engine.call("generate", [text])
        self.engine.call("settle_tiers")
        return answer

    def forget(self) -> None:
        """Forget the engine's own prefixes."""
        assert self.engine.call("reset_prefix_cache")


@pytest.fixture(scope="module")
def child(running: Any, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    running.close()
    child = Child(checkpoints, tmp_path_factory.mktemp("dense"))
    yield child
    child.engine.close()


def test_replay_of_a_recording_finds_the_hits_of_the_engine(child: Child) -> None:
    first, other, third = prompt(640, 41), prompt(400, 42), prompt(512, 41) + prompt(150, 43)
    turns = [first, other, other, third, first, first + prompt(200, 44), other[:300]]
    turns += [prompt(500 + n, 50 + n) for n in range(4)]  # the engine and host memory evict what is before
    turns += [first, other, third, prompt(501, 51), first[:-50]]
    turns += [prompt(600 + n, 60 + n) for n in range(4)]
    turns += [first[:256], first]
    # Host memory evicts the end of the first prompt, and keeps its beginning.
    turns += [prompt(600, 70), prompt(601, 71), prompt(300, 72), first[:256]]
    forgotten = {3, 5, 13, 21, 25}  # the engine forgets its own prefixes before these
    for number, text in enumerate(turns):
        if number in forgotten:
            child.forget()
        child.say(text)
    wait_for(lambda: len(child.recording.read_text().splitlines()) == 1 + len(turns))
    trace = open_trace(child.recording)
    model = model_of_engine(child.checkpoint, trace, 0, "float32")
    replay = replay_of(model, trace, (f"host={HOST}", f"file={FILES}"), prefix_caching=True)
    requests = list(trace)
    real = found_by_engine(requests)
    assert found_in_replay(replay, requests, forgotten) == real
    assert any(local for local, _ in real)
    assert {" and ".join(loaded) for _, loaded in real} == {"", "host", "file", "host and file"}


def test_child_of_a_multi_connector_uses_its_tiers(child: Child) -> None:
    engine = child.engine
    cold = child.say(TEXT)
    for forget in ("forget_host_memory", "settle_tiers"):
        child.forget()
        engine.call(forget)
        engine.call("admitted")
        (warm,) = engine.call("generate", [TEXT])
        assert [tokens for _, _, tokens in engine.call("admitted")] == [len(TEXT)]
        assert distance(warm, cold) < 1e-4
        engine.call("settle_tiers")
    assert engine.call("held") == {}
    assert engine.call("reset_all")
    (after,) = engine.call("generate", [TEXT])
    assert [tokens for _, _, tokens in engine.call("admitted")] == [0]
    assert after["tokens"] == cold["tokens"]
