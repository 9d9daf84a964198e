"""Engines that speculate, with tiers: what is kept of a draft model, and for whom."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.vllm_engine.checkpoints import checkpoint_of
from support.vllm_engine.drafts import speculation
from support.vllm_engine.inside import distance
from support.vllm_engine.pair import prompt
from support.vllm_engine.tiered import Tiered

pytestmark = [pytest.mark.engine, pytest.mark.long]
TEXT = prompt(60, 30) * 6
ANSWER = 24


class Engines:
    """Engines that speculate in different ways, one after the other, on one directory."""

    def __init__(self, checkpoints: Path, folder: Path) -> None:
        self._checkpoints, self._folder, self._count = checkpoints, folder, 0
        self.engine: Tiered | None = None

    def start(self, family: str, method: str) -> Tiered:
        self.close()
        self._count += 1
        model = checkpoint_of(family, self._checkpoints)
        config = speculation(method, str(model))
        self.engine = Tiered(
            family,
            self._checkpoints,
            self._folder / "chunks",
            self._folder / f"{self._count}.log",
            {"speculative_config": config, "async_scheduling": method == "itself"} if config else {},
            model=model,
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


def ask(engine: Tiered) -> tuple[int, list[int], tuple[int, list[list[int]]]]:
    """Tokens that came from the tiers, the answer, and its drafts: how many were accepted, and which."""
    engine.engine.call("drafts")
    engine.engine.call("proposals")
    answer = engine.say(TEXT, ANSWER)
    _, accepted = engine.engine.call("drafts")
    return max(answer["hit"]), answer["tokens"], (accepted, engine.engine.call("proposals"))


@pytest.mark.parametrize(
    ("family", "methods"),
    [("llama", ("itself", "")), ("gemma3", ("eagle", "other eagle")), ("mimo", ("mtp", ""))],
)
def test_kv_of_a_draft_is_stored_and_found_only_by_engines_with_that_draft(
    engines: Engines, family: str, methods: tuple[str, ...]
) -> None:
    answers, found = [], {}
    for method in methods:
        engine = engines.start(family, method)
        hit, answer, found[method] = ask(engine)
        assert hit == 0, f"{method or 'no draft'}: chunks of an engine with another draft"
        engine.forget()
        hit, again, drafts = ask(engine)
        assert hit >= len(TEXT) - 1
        assert drafts == found[method], f"{method}: as if all had been computed here"
        answers += [answer, again]
    engine = engines.start(family, methods[0])
    hit, answer, drafts = ask(engine)
    assert hit >= len(TEXT) - 1
    assert drafts == found[methods[0]], "after a restart"
    assert all(one == answer for one in answers)
    for method in methods:
        accepted, proposals = found[method]
        assert accepted > ANSWER // 2 if method == "itself" else bool(proposals) == bool(method), method


@pytest.mark.parametrize("method", ["ngram", "itself"])
def test_only_accepted_tokens_of_an_answer_are_stored(engines: Engines, method: str) -> None:
    engine = engines.start("llama", method)
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
