"""Compare the answer of a prefill/decode pair with a single engine's answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from kvferry.serving.demo.client import StreamedAnswer

# Each of the two tokens' log probabilities may be wrong by the gap, in opposite directions.
_SIDES = 2


class AnswerVerdict(StrEnum):
    """The result of comparing a prefill and decode engine's answer with a single engine's answer.

    YES: all tokens are equal. OWN_GAP: the tokens differ, but the difference may come from the single
    engine's own numerical error, which is measured between prefilling and decoding the same tokens. NO: the
    difference is larger.
    """

    YES = "yes"
    OWN_GAP = "own gap"
    NO = "NO"


def compare(
    pair: StreamedAnswer, single: StreamedAnswer, prefill: Callable[[Sequence[int]], Mapping[int, float]]
) -> AnswerVerdict:
    """Compare the answer of a prefill and a decode engine with the answer of a single engine.

    If the answers differ, the single engine prefills its own answer up to the first different token. It thus
    computes the log probabilities at that position a second time. The gap is the largest difference between
    its log probabilities from decoding and those from prefilling. The verdict is OWN_GAP if the single
    engine's log probabilities of the two different tokens are at most twice the gap apart, otherwise NO. The
    verdict is also NO if the other answer's token is not among the single engine's likeliest tokens, or if
    the answers differ only in length.

    Args:
        pair: answer of the prefill and decode engines together.
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
