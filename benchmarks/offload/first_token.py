"""Measure the time to first token of a prompt: computed, from host memory, from files, and prefetched.

One engine gets the same prompt four times per round. The first time, no tier has the prompt. Then the
engine's prefix cache is cleared, and host memory has the prompt. Then host memory is cleared too, and only
the file tier has the prompt. The last time, an operator's call brings it from there to host memory before.
Every round has a new prompt. The last prompt token is always computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.checkpoint import VOCABULARY
from benchmarks.served import SteppedEngine
from kvferry.common.errors import TransferError
from kvferry.tools.measuring.rounds import Spread

_WARMING_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """The times to first token of all rounds.

    Attributes:
        tokens: length of a prompt, in tokens.
        bytes: size of a prompt's KV cache, in bytes.
        computed: times if the engine computes the prompt in seconds, one per round.
        warm: times if a tier has the prompt in seconds, one per round, by tier, and by ``prefetched``.
        prefetching: times that bringing the prompt to host memory took in seconds, one per round.
    """

    tokens: int
    bytes: int
    computed: tuple[float, ...]
    warm: dict[str, tuple[float, ...]]
    prefetching: tuple[float, ...]

    def times(self, tier: str) -> Spread:
        """Return the speed-up of a tier: the time to compute as a multiple of the time to load, per round."""
        return Spread.of([c / w for c, w in zip(self.computed, self.warm[tier], strict=True)])


def measure(
    served: SteppedEngine, tokens: int, size: int, rounds: int, progress: Callable[[str], None]
) -> FirstToken:
    """Measure one prompt per round. A short prompt before the rounds is not counted.

    Args:
        served: idle engine with a host tier and a file tier.
        tokens: length of a prompt, in tokens.
        size: size of a prompt's KV cache, in bytes.
        rounds: number of prompts.
        progress: function that is called with a line of text before each round.

    Raises:
        TransferError: a prompt did not come from the expected tier.
    """
    draw = np.random.default_rng(time.monotonic_ns())
    progress("warming an engine up")
    served.first_token(draw.integers(0, VOCABULARY, _WARMING_TOKENS).tolist())
    served.settle()
    computed: list[float] = []
    prefetching: list[float] = []
    warm: dict[str, list[float]] = {"host": [], "file": [], "prefetched": []}
    for number in range(rounds):
        progress(f"first token of {tokens:,} tokens, round {number + 1} of {rounds}")
        prompt = draw.integers(0, VOCABULARY, tokens).tolist()
        served.forget(host=False)
        computed.append(_ask(served, prompt, None))
        for tier, seconds in warm.items():
            served.forget(host=tier != "host")
            if tier == "prefetched":
                prefetching.append(served.prefetch(prompt))
            seconds.append(_ask(served, prompt, "file" if tier == "file" else "host"))
    return FirstToken(
        tokens=tokens,
        bytes=size,
        computed=tuple(computed),
        warm={tier: tuple(s) for tier, s in warm.items()},
        prefetching=tuple(prefetching),
    )


def _ask(served: SteppedEngine, prompt: list[int], tier: str | None) -> float:
    before = served.hits()
    seconds = served.first_token(prompt)
    served.settle()
    came = set(served.hits() - before)
    if came != ({tier} if tier else set()):
        raise TransferError(f"chunks came from {sorted(came)}, expected {tier}: please report this")
    return seconds
