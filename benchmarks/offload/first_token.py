"""The time to a prompt's first token: computed, from host memory, from files.

One engine gets the same prompt three times per round. First no tier has it. Then the engine has cleared its
prefix cache and host memory still has it. Then host memory is cleared too, and the file tier has it. Every
round has a new prompt. The last prompt token is always computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.checkpoint import VOCABULARY
from benchmarks.served import SteppedEngine
from kvferry.errors import TransferError
from kvferry.measuring.spread import Spread

_WARMING_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """Seconds until the first token, per round.

    Attributes:
        tokens: length of the prompt.
        bytes: size of its KV cache.
        computed: seconds when the engine computes the prompt.
        warm: seconds when a tier has it, by tier.
    """

    tokens: int
    bytes: int
    computed: tuple[float, ...]
    warm: dict[str, tuple[float, ...]]

    def times(self, tier: str) -> Spread:
        """Return how many times as fast as computing a tier is, round by round."""
        return Spread.of([c / w for c, w in zip(self.computed, self.warm[tier], strict=True)])


def measure(
    served: SteppedEngine, tokens: int, size: int, rounds: int, progress: Callable[[str], None]
) -> FirstToken:
    """Time one prompt per round, after a short one that does not count.

    Args:
        served: idle engine with host memory and files.
        tokens: length of a prompt.
        size: bytes of its KV cache.
        rounds: number of prompts.
        progress: called with a line of text before each round.

    Raises:
        TransferError: a prompt did not come from the expected tier.
    """
    draw = np.random.default_rng(time.monotonic_ns())
    progress("warming an engine up")
    served.first_token(draw.integers(0, VOCABULARY, _WARMING_TOKENS).tolist())
    served.settle()
    computed: list[float] = []
    warm: dict[str, list[float]] = {"host": [], "file": []}
    for number in range(rounds):
        progress(f"first token of {tokens:,} tokens, round {number + 1} of {rounds}")
        prompt = draw.integers(0, VOCABULARY, tokens).tolist()
        served.forget(host=False)
        computed.append(_ask(served, prompt, None))
        for tier, seconds in warm.items():
            served.forget(host=tier == "file")
            seconds.append(_ask(served, prompt, tier))
    return FirstToken(
        tokens=tokens, bytes=size, computed=tuple(computed), warm={tier: tuple(s) for tier, s in warm.items()}
    )


def _ask(served: SteppedEngine, prompt: list[int], tier: str | None) -> float:
    before = served.hits()
    seconds = served.first_token(prompt)
    served.settle()
    came = set(served.hits() - before)
    if came != ({tier} if tier else set()):
        raise TransferError(f"chunks came from {sorted(came)}, expected {tier}: please report this")
    return seconds
