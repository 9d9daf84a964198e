"""Compare an answer with a single engine's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from kvferry.serving.demo.client import StreamedAnswer

# Both candidates may be off by the gap, in opposite directions.
_SIDES = 2


class AnswerVerdict(StrEnum):
    """YES: equal tokens. OWN_GAP: a difference within the single engine's own variation. NO: neither."""

    YES = "yes"
    OWN_GAP = "own gap"
    NO = "NO"


def compare(
    pair: StreamedAnswer, single: StreamedAnswer, prefill: Callable[[Sequence[int]], Mapping[int, float]]
) -> AnswerVerdict:
    """Compare the answer of a prefill/decode pair with a single engine's.

    At the first difference, the single engine computes that token once more, by prefilling the tokens that it
    had decoded. If its log probabilities differ between the two ways by more than those of the two tokens
    differ, either token is right.

    Args:
        pair: the pair's answer.
        single: the single engine's answer, with the log probabilities of the likeliest tokens.
        prefill: returns the single engine's log probabilities of the token after these ids.
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
