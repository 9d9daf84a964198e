"""Whether an answer is the one that a single engine gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from kvferry.serving.demo.client import Answer

# Both candidates may be off by the gap, in opposite directions.
_SIDES = 2


class Verdict(StrEnum):
    """YES: token for token. OWN_GAP: as far as that engine agrees with itself. NO: neither."""

    YES = "yes"
    OWN_GAP = "own gap"
    NO = "NO"


def compare(pair: Answer, single: Answer, prefill: Callable[[Sequence[int]], Mapping[int, float]]) -> Verdict:
    """Judge the answer of a prefill/decode pair by a single engine's.

    Where they first differ, the single engine is asked for that token once more, by prefilling what it had
    decoded. It may disagree with itself there: two tokens that lie closer than that gap are a toss-up.

    Args:
        pair: the pair's answer.
        single: the single engine's, with the log probabilities of the likeliest tokens.
        prefill: the single engine's log probabilities for the token after these ids.
    """
    if pair.tokens == single.tokens:
        return Verdict.YES
    pairs = zip(pair.tokens, single.tokens, strict=False)
    at = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    if at is None:
        return Verdict.NO
    ours, theirs = pair.tokens[at], single.tokens[at]
    decoded = single.logprobs[at]
    prefilled = prefill([*single.prompt, *single.tokens[:at]])
    if ours not in decoded:
        return Verdict.NO
    gap = max(abs(decoded[token] - prefilled[token]) for token in decoded.keys() & prefilled.keys())
    return Verdict.OWN_GAP if decoded[theirs] - decoded[ours] <= _SIDES * gap else Verdict.NO
