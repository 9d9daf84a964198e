"""`kvferry doctor` meets real engines that must not read from each other, and says why."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.test_refusals import options, other_weights
from kvferry.engines.vllm.version import TESTED
from kvferry.tools.serving.tiny import tiny_checkpoint
from support.vllm_engine.pair import prompt
from support.vllm_engine.process import Engine

pytestmark = [pytest.mark.engine, pytest.mark.long]

KVFERRY = [sys.executable, "-c", "from kvferry.tools.cli.main import main; main()"]


@pytest.fixture(scope="module")
def addresses(running: object, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory):
    """Control channels of two engines of other weights and dtypes, under one name."""
    running.close()
    folder = tmp_path_factory.mktemp("doctor")
    model = tiny_checkpoint("qwen3", checkpoints)
    both = Engine(folder / "both.log", **options(model))
    try:
        both.ready()
        other = {**options(other_weights(model, folder)), "dtype": "bfloat16"}
        both.call("start_another", other)
        text = prompt(40, 1)
        offers = both.call("prefill", [text])[0]["params"], both.call("other", "prefill", [text])[0]["params"]
        yield [f"kvferry://{offer['remote_host']}:{offer['remote_port']}" for offer in offers]
    finally:
        both.close()


def examined(*arguments: str) -> tuple[int, list[dict]]:
    done = subprocess.run(
        [*KVFERRY, "doctor", "--json", *arguments],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)["sections"]


def test_every_difference_of_two_engines_is_named(addresses):
    one, other = addresses
    code, sections = examined("--no-machine", one, other)
    assert code == 1
    (pair,) = [section for section in sections if one in section["title"] and other in section["title"]]
    different = [one["found"] for one in pair["findings"] if one["subject"] == "difference"]
    assert any(text.startswith("weights: ") for text in different)
    assert "model dtype: float32 there, bfloat16 here" in different
    assert any("elements of 4 bytes there, 2 here" in text for text in different)


def test_an_engine_says_who_it_is(addresses):
    code, (section,) = examined("--no-machine", addresses[1])
    assert code == 0
    said = {one["subject"]: one["found"] for one in section["findings"]}
    assert f"vLLM {TESTED}" in said["who"]
    assert said["ranks"].startswith("TP1 PP1, ")
    assert "bfloat16" in said["content"]


def test_this_machine_runs_what_these_tests_run():
    _, (section,) = examined()
    said = {one["subject"]: one for one in section["findings"]}
    for subject in ("vLLM", "connector", "hybrid KV cache manager", "NIXL", "NIXL reads of host memory"):
        assert said[subject]["state"] == "ok", said[subject]
    assert "GB/s in pieces of 2 MiB" in said["NIXL reads of host memory"]["found"]
    assert said["costs"]["state"] in ("ok", "note")
