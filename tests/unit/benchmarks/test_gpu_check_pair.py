"""The check of a GPU with a pair of vLLM engines: what it finds right and wrong. `tests/engine` runs it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest

from benchmarks.gpu_check import pair
from benchmarks.gpu_check.job import SMALL
from benchmarks.gpu_check.pair import LEAST_RIGHT, NAME, PROMPTS, check_pair, compare
from benchmarks.gpu_check.result import CheckState, judged
from benchmarks.handover.measure import Handover, Result
from kvferry.common.errors import TransferError


@dataclass
class Pair:
    """Engines that answer with these tokens.

    Attributes:
        handed, alone: first tokens after a hand-over, and of one engine.
        loaded: whether the decode engine loads.
        asked: prompts of the engines, by what was asked.
    """

    handed: list[int]
    alone: list[int]
    loaded: bool = True
    asked: dict[str, Any] = field(default_factory=dict)

    def running(self) -> Any:
        return nullcontext()

    @property
    def prefill(self) -> Pair:
        return self

    def call(self, method: str, *arguments: Any) -> Any:
        self.asked[method] = arguments
        return self.alone if method == "alone" else None

    def hand_over(self, prompts: Any) -> Result:
        self.asked["hand_over"] = (prompts,)
        return Result(Handover(()), self.handed, self.loaded)


def state_of(handed: list[int], alone: list[int]) -> CheckState:
    return judged(NAME, "", compare(Pair(handed, alone), SMALL)).state


OWN = list(range(PROMPTS))


def test_tokens_of_one_engine_pass_also_if_bfloat16_flips_some():
    flipped = [*OWN[:LEAST_RIGHT], *(token + PROMPTS for token in OWN[LEAST_RIGHT:])]
    assert state_of(OWN, OWN) is state_of(flipped, OWN) is CheckState.PASSED


def test_other_tokens_fail():
    assert state_of([*OWN[1:], OWN[0]], OWN) is CheckState.FAILED


def test_tokens_that_do_not_depend_on_what_was_handed_over_fail():
    assert state_of([5] * PROMPTS, [5] * PROMPTS) is CheckState.FAILED


def test_prompts_that_were_not_loaded_are_an_error():
    with pytest.raises(TransferError, match="did not load"):
        compare(Pair(OWN, OWN, loaded=False), SMALL)


def test_both_ways_get_the_same_prompts_which_end_alike_and_begin_otherwise():
    engines = Pair(OWN, OWN)
    compare(engines, SMALL)
    (prompts,) = engines.asked["alone"]
    assert engines.asked["hand_over"] == (prompts,)
    assert len({tuple(prompt[:-1]) for prompt in prompts}) == PROMPTS
    assert len({prompt[-1] for prompt in prompts}) == 1


def test_without_vllm_the_check_is_not_run(monkeypatch):
    monkeypatch.setattr(pair, "find_spec", lambda _: None)
    found = check_pair(SMALL)
    assert (found.state, found.says) == (CheckState.NOT_RUN, "vLLM is not installed.")
