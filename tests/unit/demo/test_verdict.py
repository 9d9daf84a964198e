from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from kvferry.tools.serving.demo.client import StreamedAnswer
from kvferry.tools.serving.demo.report import AnswerVerdict, compare

NEAR = {5: -1.00, 6: -1.01}
"""Token 5 is the likeliest, 6 nearly so."""


def answer(*tokens: int, logprobs: Sequence[Mapping[int, float]] = ()) -> StreamedAnswer:
    return StreamedAnswer("demo", (1, 2), tokens, tuple(logprobs), 0.0)


def unasked(_: Sequence[int]) -> Mapping[int, float]:
    raise AssertionError("equal answers need no second question")


def test_equal_tokens_are_identical() -> None:
    assert compare(answer(5, 6), answer(5, 6), unasked) is AnswerVerdict.YES


@pytest.mark.parametrize(
    ("again", "verdict"),
    [
        ({5: -1.01, 6: -1.00}, AnswerVerdict.OWN_GAP),
        ({5: -1.006, 6: -1.00}, AnswerVerdict.OWN_GAP),
        ({5: -1.004, 6: -1.01}, AnswerVerdict.NO),
        (NEAR, AnswerVerdict.NO),
        ({8: -1.0}, AnswerVerdict.NO),
    ],
)
def test_near_tokens_are_excused_only_by_a_gap_that_was_measured(
    again: Mapping[int, float], verdict: AnswerVerdict
) -> None:
    asked = []

    def prefill(tokens: Sequence[int]) -> Mapping[int, float]:
        asked.append(list(tokens))
        return again

    single = answer(7, 5, 9, logprobs=[{7: -1.0}, NEAR, {9: -1.0}])
    assert compare(answer(7, 6, 8), single, prefill) is verdict
    assert asked == [[1, 2, 7]]


def test_a_token_that_the_engine_never_considered_is_wrong() -> None:
    single = answer(5, logprobs=[NEAR])
    assert compare(answer(99), single, unasked) is AnswerVerdict.NO


def test_an_answer_that_ends_early_is_wrong() -> None:
    assert compare(answer(5), answer(5, 6, logprobs=[NEAR, NEAR]), unasked) is AnswerVerdict.NO
