"""A package of its own adds a kind of storage tier: it is installed, configured, examined and used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.tools.serving.tiny import tiny_checkpoint

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "examples" / "sqlite_tier"
# Stores a prompt in one engine, and loads it in another; prints where the tokens came from.
ENGINES = """
import json, sys
from pathlib import Path

import torch
from examples.transformers_engine.engine import Engine
from examples.transformers_engine.tiers import ANSWER_TOKENS, CHUNK_TOKENS, prompt

torch.set_num_threads(1)
checkpoint, tiers = Path(sys.argv[1]), json.loads(sys.argv[2])
answers = []
for _ in range(2):
    engine = Engine(checkpoint, {"tiers": tiers, "chunk_tokens": CHUNK_TOKENS})
    answer = engine.generate(prompt(checkpoint), ANSWER_TOKENS)
    engine.finish_stores()
    engine.close()
    answers.append([answer.token_ids, dict(answer.loaded), answer.computed])
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with the package, installed without the network."""
    target = tmp_path_factory.mktemp("target")
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    run([sys.executable, "-m", "pip", "install", "-q", *options, "--target", target, PACKAGE])
    return target


def run(command, *folders, code: int = 0) -> str:
    """Run a command with further folders of packages, and return its standard output, or its error."""
    path = os.pathsep.join(map(str, (*folders, ROOT / "src", ROOT)))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stderr if code else ended.stdout


def kvferry(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvferry", *arguments]


def test_the_package_passes_its_own_tests_of_the_contract(installed):
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", PACKAGE]
    said = run([sys.executable, "-m", "pytest", *options, PACKAGE / "tests"], installed)
    assert "11 passed" in said


def test_a_configuration_names_the_kind_only_where_the_package_is_installed(installed, tmp_path):
    tiers = json.dumps([{"type": "sqlite", "path": f"{tmp_path}/chunks.db"}])
    given = json.loads(run(kvferry("config", "--tiers", tiers), installed))
    assert given["kv_connector_extra_config"]["tiers"] == json.loads(tiers)
    assert '"type" is one of host, fleet, file, object' in run(kvferry("config", "--tiers", tiers), code=2)
    misspelt = json.dumps([{"type": "sqlite", "pth": "x"}])
    assert "tier" in run(kvferry("config", "--tiers", misspelt), installed, code=2)


def test_the_doctor_tries_it_out(installed, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"tiers": [{"type": "sqlite", "path": f"{tmp_path}/chunks.db"}]}))
    said = run(kvferry("doctor", "--no-machine", "--config", str(config)), installed)
    assert "chunks.db can be written" in " ".join(said.split())
    assert list(tmp_path.iterdir()) == [config]


@pytest.mark.long
def test_an_engine_loads_what_an_earlier_one_stored_there(installed, tmp_path, tmp_path_factory):
    checkpoint = tiny_checkpoint("gemma3", tmp_path_factory.getbasetemp() / "tiny")
    tiers = [{"type": "host", "capacity": "16MiB"}, {"type": "sqlite", "path": f"{tmp_path}/chunks.db"}]
    said = run([sys.executable, "-c", ENGINES, checkpoint, json.dumps(tiers)], installed)
    (computed, nothing, every), (loaded, sources, one) = json.loads(said.splitlines()[-1])
    assert (nothing, sources, one) == ({}, {"sqlite": every}, 1)
    assert loaded == computed
