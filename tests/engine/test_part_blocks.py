"""A window's first block, of which a producer with smaller blocks has only the end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kvferry.tools.serving.tiny import FAMILIES, tiny_checkpoint
from support.vllm_engine.inside import distance
from support.vllm_engine.pair import Pair, Setup, connector, prompt
from support.vllm_engine.process import Engine

EVERY = "prefix_cache_retention_interval"

# A window of 64 tokens. The last of 300 sees those from 236 on: a producer with blocks of 32 has them from
# 224 on, which is the end of the consumer's block [128, 256).
PARTS = Setup("gemma3", "parts", prefill_options={"block_size": 32}, decode_options={"block_size": 128})
NAMES = Setup(
    "gemma3",
    "parts-of-other-names",
    prefill_options={"block_size": 32, "disable_hybrid_kv_cache_manager": True},
    decode_options={"block_size": 128},
)
"""The prefill engine takes windows for full attention: its groups are called otherwise."""

pytestmark = [pytest.mark.engine, pytest.mark.long]


@pytest.mark.parametrize(
    "pair",
    [pytest.param(PARTS, id="alike"), pytest.param(NAMES, id="other-names")],
    indirect=True,
)
def test_partly_loaded_block_is_no_prefix_cache_hit(pair: Pair) -> None:
    text = prompt(300, 1)
    other = text[:256] + prompt(20, 2)
    (sound,) = pair.decode.call("generate", [other])
    pair.forget()
    assert pair.through([text])[0]["moved"]
    (answer,) = pair.decode.call("generate", [other])
    assert distance(answer, sound) <= 1e-5


def test_block_filled_after_a_partial_load_is_not_stored_as_whole(
    running: object, checkpoints: Path, tmp_path: Path
) -> None:
    # Of 250 tokens of windows of 200, those from 32 on are loaded; their block of 256 is full six later. A
    # chunk of it would promise readers with smaller blocks more than is there.
    running.close()
    model = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("gemma3", checkpoints), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "sliding_window": 200}))
    tiers = [
        {"type": "host", "capacity": "64MiB"},
        {"type": "file", "path": str(tmp_path), "capacity": "256MiB"},
    ]
    both = {"model": str(model), EVERY: 256, "block_size": 256}
    middle = {**both, "kv_transfer_config": connector(chunk_tokens=256, tiers=tiers, transfer=True)}
    small = {**both, "block_size": 32}
    pair = Pair(Setup("gemma3", "late", prefill_options=small, decode_options=middle), tmp_path, checkpoints)
    try:
        text = prompt(251, 1)
        (said,) = pair.through([text])
        assert said["moved"]
        longer = (text + said["tokens"])[:256] + prompt(20, 2)
        pair.decode.call("generate", [longer])
        pair.decode.call("settle_tiers")
        last = text[:64] + prompt(20, 4)
        (sound,) = pair.prefill.call("generate", [last])
    finally:
        pair.close()
    reading = {
        **both,
        "block_size": 64,
        EVERY: 64,
        "kv_transfer_config": connector(chunk_tokens=256, tiers=tiers),
    }
    reader = Engine(tmp_path / "reader.log", **{**FAMILIES["gemma3"].engine_options(), **reading})
    try:
        reader.ready(300.0)
        reader.call("generate", [longer[:256] + prompt(10, 3)])
        reader.call("settle_tiers")
        (answer,) = reader.call("generate", [last])
        assert distance(answer, sound) <= 1e-5
    finally:
        reader.close()
