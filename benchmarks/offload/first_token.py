"""When a prompt's first token comes: computed, from host memory, from files.

One engine is asked the same prompt three times per round. First nobody has it; then the engine has forgotten
it and the tiers' host memory has not; then host memory has forgotten it, too, and the file tier has not. A
round's prompt is new. The last prompt token is always computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.checkpoint import VOCABULARY
from benchmarks.served import Served
from kvferry.errors import TransferError
from kvferry.measuring.spread import Spread

_WARMING_TOKENS = 512


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Seconds until the first token, per round.

    Attributes:
        tokens: of the prompt.
        bytes: of its KV cache.
        computed: by the engine.
        warm: tier to the same with the prompt's chunks there.
    """

    tokens: int
    bytes: int
    computed: tuple[float, ...]
    warm: dict[str, tuple[float, ...]]

    def times(self, tier: str) -> Spread:
        """How many times as fast as computing it, round by round."""
        return Spread.of([c / w for c, w in zip(self.computed, self.warm[tier], strict=True)])


def measure(
    served: Served, tokens: int, size: int, rounds: int, progress: Callable[[str], None]
) -> FirstToken:
    """Ask for prompts, each a round, after a short one that does not count.

    Args:
        served: an idle engine with host memory and files.
        tokens: of a prompt.
        size: bytes of its KV cache.
        rounds: prompts.
        progress: told what is going on.

    Raises:
        TransferError: a prompt was not where it should be.
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
    return FirstToken(tokens, size, tuple(computed), {tier: tuple(s) for tier, s in warm.items()})


def _ask(served: Served, prompt: list[int], tier: str | None) -> float:
    before = served.hits()
    seconds = served.first_token(prompt)
    served.settle()
    came = set(served.hits() - before)
    if came != ({tier} if tier else set()):
        raise TransferError(f"chunks came from {sorted(came)}, expected {tier}: please report this")
    return seconds
