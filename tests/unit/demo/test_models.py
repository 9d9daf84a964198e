"""The models that `kvferry demo` serves."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import MagicMock

import pytest

from kvferry.common.errors import ConfigError
from kvferry.tools.cli import demo as command
from kvferry.tools.serving import demo
from kvferry.tools.serving.smollm2 import smollm2_checkpoint


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tiny = MagicMock(side_effect=lambda name, _: demo.DemoModel(name, name))
    monkeypatch.setattr(demo, "family_model", tiny)


def models(families: str = command._FAMILIES) -> tuple[list[demo.DemoModel], str]:
    screen = MagicMock()
    found = list(command._models(command.DemoOptions(None, ["--own"], families), screen, MagicMock()))
    return found, " ".join(call.args[0] for call in screen.note.call_args_list)


def test_a_model_with_real_weights_comes_first_and_is_asked_questions() -> None:
    smollm2_checkpoint().mkdir(parents=True)
    (first, *others), said = models()
    assert first.path == str(smollm2_checkpoint())
    assert first.questions
    assert first.arguments[-1] == "--own"
    assert [(one.title, one.questions) for one in others] == [("gemma3", ()), ("nemotronh", ())]
    assert "real weights" not in said


def test_without_real_weights_one_sentence_says_so_and_the_tiny_models_are_served() -> None:
    found, said = models()
    assert [one.title for one in found] == ["gemma3", "nemotronh"]
    assert said.startswith("Without real weights: SmolLM2-135M-Instruct is not in ")
    assert "`make smollm2` in a checkout of kvferry fetches it." in said


def test_a_model_that_was_asked_for_and_is_missing_is_an_error() -> None:
    with pytest.raises(ConfigError, match="`make smollm2` in a checkout"):
        models("smollm2")
