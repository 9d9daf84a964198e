"""Compare the answer of a prefill/decode pair with a single engine's answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from kvferry.tools.serving.demo.client import StreamedAnswer

# Each of the two tokens' log probabilities may be wrong by the gap, in opposite directions.
_SIDES = 2


class AnswerVerdict(StrEnum):
    """The result of comparing a prefill and decode engine's answer with a single engine's answer.

    YES: all tokens are equal. OWN_GAP: the single engine's numerical error can explain the difference. NO:
    the answers differ in another way.
    """

    YES = "yes"
    OWN_GAP = "own gap"
    NO = "NO"


def compare(
    pair: StreamedAnswer, single: StreamedAnswer, prefill: Callable[[Sequence[int]], Mapping[int, float]]
) -> AnswerVerdict:
    """Compare the answer of a prefill and a decode engine with the answer of a single engine.

    If one answer is the beginning of the other, the verdict is NO. Otherwise it depends on the first position
    at which the tokens differ. The single engine has computed the log probabilities there by decoding. It
    computes them again by prefilling its own answer up to this position. The *gap* is the largest difference
    between a token's two log probabilities. The verdict is OWN_GAP if decoding gave the two different tokens
    log probabilities that differ by at most twice the gap, else NO. It is also NO if the pair's token is not
    among the likeliest tokens of the single engine.

    Args:
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
    if ours not in decoded:
        return AnswerVerdict.NO
    prefilled = prefill([*single.prompt, *single.tokens[:at]])
    common = decoded.keys() & prefilled.keys()
    gap = max((abs(decoded[token] - prefilled[token]) for token in common), default=0.0)
    return AnswerVerdict.OWN_GAP if decoded[theirs] - decoded[ours] <= _SIDES * gap else AnswerVerdict.NO
