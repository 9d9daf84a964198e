"""Forecast of the tokens that prompts load of a prefix that they share, for models with recurrent state.

A prompt continues from a snapshot (recurrent state at one position). The first prompt leaves snapshots at
some positions (`planning.snapshots`). The second one continues from the last of them in the shared prefix,
and leaves one where it departs from the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kvferry.plan.choices import StoredPrompt
from kvferry.plan.snapshots import SnapshotSteps

SHARED_TOKENS = (2048, 8192, 32_768)
"""Lengths in tokens of the shared prefixes in the forecast."""

Placed = Callable[[int, int, int], Iterable[int]]
"""`StoredForm.placed`."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The tokens that prompts load of a prefix that they share, from tiers with room for all prompts.

    Attributes:
        tokens: length of the shared prefix in tokens.
        second: number of these tokens that the second prompt with this prefix loads.
        third: the same for the third prompt and all later ones.
        without: the same for every prompt, if the setting `first_snapshot_tokens` is 0.
    """

    tokens: int
    second: int
    third: int
    without: int


def shared_prefixes(
    prompt: StoredPrompt, steps: SnapshotSteps, every: int, placed: Placed
) -> Iterator[SharedPrefix]:
    """Yield the forecast for each of `SHARED_TOKENS` that is shorter than the prompt.

    Args:
        prompt: prompt whose KV the tiers store.
        steps: settings of the engine that decide at which positions it takes snapshots by itself.
        every: number of tokens between the positions at which snapshots are stored.
        placed: function that returns the positions at which kvferry has the engine take snapshots.
    """
    alone = prompt.without_placed.loadable_prefixes(steps, every)
    ends = prompt.loadable_prefixes(steps, every)
    for tokens in SHARED_TOKENS:
        if tokens < prompt.tokens:
            second, without = (max((end for end in of if end <= tokens), default=0) for of in (ends, alone))
            left = [at for at in placed(prompt.tokens, second, tokens) if at <= tokens]
            yield SharedPrefix(tokens, second, max(left, default=second), without)
