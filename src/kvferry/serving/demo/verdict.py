"""Compare an answer with a single engine's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from kvferry.serving.demo.client import StreamedAnswer

# Both candidates may be off by the gap, in opposite directions.
_SIDES = 2


class AnswerVerdict(StrEnum):
    """YES: equal tokens. OWN_GAP: as close as that engine is to itself. NO: neither."""

    YES = "yes"
    OWN_GAP = "own gap"
    NO = "NO"


def compare(
    pair: StreamedAnswer, single: StreamedAnswer, prefill: Callable[[Sequence[int]], Mapping[int, float]]
) -> AnswerVerdict:
    """Judge the answer of a prefill/decode pair by a single engine's.

    Where they first differ, the single engine is asked for that token once more, by prefilling what it had
    decoded. It may disagree with itself there: two tokens that lie closer than that gap are a toss-up.

    Args:
        pair: the pair's answer.
        single: the single engine's, with the log probabilities of the likeliest tokens.
        prefill: the single engine's log probabilities for the token after these ids.
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
