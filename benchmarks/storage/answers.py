"""Compare first tokens of engines that computed or loaded the same prompt."""

from __future__ import annotations

from benchmarks.served import FirstAnswer

TOLERANCE = 0.25
"""Largest difference of log probabilities. bfloat16 and the kernels for few tokens cause up to 0.1."""


def agree(computed: FirstAnswer, other: FirstAnswer) -> bool:
    """Return whether another engine's first token is that of the engine that computed the prompt.

    A token that is as likely as the computed one, within the tolerance, counts as the same. Both engines must
    give it about the same log probability.

    Args:
        computed: answer of the engine that computed the prompt, with log probabilities.
        other: answer of the other engine, with log probabilities.
    """
    if (expected := computed.logprobs.get(other.token)) is None:
        return False
    return (
        abs(expected - other.logprobs[other.token]) <= TOLERANCE
        and computed.logprobs[computed.token] - expected <= TOLERANCE
    )
