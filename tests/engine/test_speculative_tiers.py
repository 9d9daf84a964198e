"""Engines that speculate, with tiers: what is kept of a draft model, and for whom."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.serving.tiny import tiny_checkpoint
from support.vllm_engine.drafts import speculation
from support.vllm_engine.inside import distance
from support.vllm_engine.pair import prompt
from support.vllm_engine.tiered import Tiered

pytestmark = [pytest.mark.engine, pytest.mark.family]
TEXT = prompt(60, 30) * 6
ANSWER = 24


class Engines:
    """Engines of one model that speculate in different ways, one after the other, on one directory."""

    def __init__(self, checkpoints: Path, folder: Path) -> None:
        self._checkpoints, self._folder, self._count = checkpoints, folder, 0
        self.engine: Tiered | None = None

    def start(self, method: str) -> Tiered:
        self.close()
        self._count += 1
        config = speculation(method, str(tiny_checkpoint("llama", self._checkpoints)))
        overlapped = {"async_scheduling": True} if method not in ("", "ngram") else {}
        self.engine = Tiered(
            "llama",
            self._checkpoints,
            self._folder / "chunks",
            self._folder / f"{self._count}.log",
            {"speculative_config": config, **overlapped} if config else {},
        )
        return self.engine

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()


@pytest.fixture
def engines(checkpoints: Path, tmp_path: Path) -> Iterator[Engines]:
    found = Engines(checkpoints, tmp_path)
    yield found
    found.close()


def test_drafts_are_accepted_after_what_tiers_bring_and_only_that_draft_finds_it(
    engines: Engines,
) -> None:
    engine = engines.start("itself")
    engine.engine.call("drafts")
    first = engine.say(TEXT, ANSWER)
    _, alone = engine.engine.call("drafts")
    assert alone > ANSWER // 2
    engine.forget()
    again = engine.say(TEXT, ANSWER)
    assert max(again["hit"]) >= len(TEXT) - 1
    assert again["tokens"] == first["tokens"]
    assert engine.engine.call("drafts")[1] == alone, "as many as if all had been computed here"

    for method in ("", "eagle"):
        other = engines.start(method)
        answer = other.say(TEXT, ANSWER)
        assert max(answer["hit"]) == 0, "chunks that hold another draft's layers"
        assert answer["tokens"] == first["tokens"]

    engine = engines.start("itself")
    answer = engine.say(TEXT, ANSWER)
    assert max(answer["hit"]) >= len(TEXT) - 1
    assert answer["tokens"] == first["tokens"]
    assert engine.engine.call("drafts")[1] == alone


@pytest.mark.parametrize("method", ["ngram", "itself"])
def test_only_what_was_accepted_is_stored_of_an_answer(engines: Engines, method: str) -> None:
    engine = engines.start(method)
    first = engine.say(TEXT, 200)
    engine.forget()
    longer = TEXT + first["tokens"][:-1]
    again = engine.say(longer, ANSWER)
    assert max(again["hit"]) > len(TEXT), "nothing of the answer was stored"
    assert engine.engine.call("reset_all")
    sound = engine.say(longer, ANSWER)
    assert max(sound["hit"]) == 0
    assert again["tokens"] == sound["tokens"]
    assert distance(again, sound) < 1e-4
