"""Compare the answer of a prefill/decode pair with a single engine's answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from kvferry.serving.demo.client import StreamedAnswer

# Each of the two tokens' log probabilities may be wrong by the gap, in opposite directions.
_SIDES = 2


class AnswerVerdict(StrEnum):
    """Result of the comparison of two answers.

    YES: all tokens are equal. OWN_GAP: the tokens differ, but the difference is within the single engine's
    own numerical deviation (see `compare`). NO: the difference is larger.
    """

    YES = "yes"
    OWN_GAP = "own gap"
    NO = "NO"


def compare(
    pair: StreamedAnswer, single: StreamedAnswer, prefill: Callable[[Sequence[int]], Mapping[int, float]]
) -> AnswerVerdict:
    """Compare the answer of a prefill/decode pair with a single engine's.

    At the first different token, the single engine computes log probabilities a second time: it prefills the
    tokens that it decoded before. The gap is the largest difference between its decoded and its prefilled log
    probabilities. The verdict is OWN_GAP if the two tokens' log probabilities differ by at most twice the
    gap.

    Args:
        pair: answer of the pair.
        single: answer of the single engine, with the log probabilities of the likeliest tokens.
        prefill: function that prefills token ids on the single engine and returns the log probabilities of
            the next token, by token id.
    """
    if pair.tokens == single.tokens:
        return AnswerVerdict.YES
    pairs = zip(pair.tokens, single.tokens, strict=False)
    at = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    if at is None:
        return AnswerVerdict.NO
    ours, theirs = pair.tokens[at], single.tokens[at]
    decoded = single.logprobs[at]
    prefilled = prefill([*single.prompt, *single.tokens[:at]])
    if ours not in decoded:
        return AnswerVerdict.NO
    gap = max(abs(decoded[token] - prefilled[token]) for token in decoded.keys() & prefilled.keys())
    return AnswerVerdict.OWN_GAP if decoded[theirs] - decoded[ours] <= _SIDES * gap else AnswerVerdict.NO
