"""Time hand-overs from a prefill to a decode engine, up to the first token, with several connectors in turn.

For each connector there is a pair of engines. Only the pair that is measured runs: the others are paused,
because NixlConnector's progress threads take processor time even when idle. In each round, every connector
hands over the same prompts once. The first round is not counted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from benchmarks.checkpoint import VOCABULARY
from benchmarks.handover.engine import Setup, Stamps
from benchmarks.handover.model import HandoverModel, write_model
from kvferry.common.errors import TransferError

_MEET_TOKENS, _MEET_TRIES = 300, 10
_SPARE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that are handed over at once.

    Attributes:
        tokens: length of each prompt, in tokens.
        requests: number of requests.
    """

    tokens: int
    requests: int


@dataclass(frozen=True, slots=True)
class Handover:
    """One hand-over of all requests of a load, in seconds.

    Attributes:
        stamps: stages of each request.
    """

    stamps: tuple[Stamps, ...]

    @property
    def seconds(self) -> float:
        """Return the mean time from a request's arrival at the decode engine to its first token."""
        return sum(one.answered - one.added for one in self.stamps) / len(self.stamps)

    def stages(self) -> dict[str, float]:
        """Return the mean seconds of each stage, by name. Together they are `seconds`."""
        each = [_stages(one) for one in self.stamps]
        return {name: sum(one[name] for one in each) / len(each) for name in each[0]}


def _stages(one: Stamps) -> dict[str, float]:
    return {
        "queue": one.asked - one.added,
        "look-up": one.started - one.asked,
        "transfer": one.transfer_seconds,
        "check": one.check_seconds,
        "other": one.received - one.started - one.transfer_seconds - one.check_seconds,
        "step": one.answered - one.received,
    }


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a hand-over.

    Attributes:
        handover: times of the requests.
        tokens: first token of each request.
        loaded: True if the decode engine loaded every prompt's KV, False if it computed a prompt itself.
    """

    handover: Handover
    tokens: Sequence[int]
    loaded: bool


class Pair(Protocol):
    """A prefill and a decode engine with the same connector."""

    def running(self) -> AbstractContextManager[None]:
        """Let both engines run until the ``with`` block ends. Pause them then."""

    def hand_over(self, prompts: Sequence[Sequence[int]]) -> Result:
        """Compute prompts in one engine and continue them in the other. Both are idle afterwards.

        Args:
            prompts: token ids of each prompt.

        Raises:
            TransferError: an engine does not answer.
        """


Start = Callable[[Setup], AbstractContextManager[Pair]]
"""Start two engines with a configuration. They run, and end with the ``with`` block."""


def measure(
    model: HandoverModel,
    loads: Sequence[Load],
    connectors: Sequence[str],
    start: Start,
    *,
    rounds: int,
    folder: Path,
    progress: Callable[[str], None],
) -> dict[Load, dict[str, tuple[Handover, ...]]]:
    """Hand over prompts with each connector in turn; return the hand-overs by load and connector.

    Args:
        model: model family.
        loads: loads to measure.
        connectors: names of the connectors, as in `Setup`.
        start: function that starts the engines of a connector.
        rounds: number of counted rounds.
        folder: folder for the checkpoint.
        progress: function that is called with a line of text before each load.

    Raises:
        ConfigError: an engine refuses its configuration.
        TransferError: an engine does not start or does not answer, a connector did not load a prompt, or two
            connectors gave unequal first tokens.
        LaunchError: an engine that is a server does not start.
    """
    longest = max(one.tokens for one in loads) + _SPARE_TOKENS
    progress(f"{model.name}: writing the checkpoint")
    path = write_model(model, folder / model.name, longest)
    common = Setup(
        model=path, connector="", longest=longest, requests=max(one.requests for one in loads),
        cache_bytes=_cache_bytes(loads), engine=dict(model.engine),
    )  # fmt: skip
    with ExitStack() as stack:
        pairs: dict[str, Pair] = {}
        for name in connectors:
            progress(f"{model.name}: starting two engines with {name}")
            pairs[name] = stack.enter_context(start(replace(common, connector=name)))
            with pairs[name].running():
                meet(name, pairs[name])
        found: dict[Load, dict[str, tuple[Handover, ...]]] = {}
        for load in loads:
            progress(f"{model.name}: {load.requests} requests of {load.tokens} tokens")
            found[load] = measure_load(pairs, load, rounds)
        return found


def _cache_bytes(loads: Sequence[Load]) -> int:
    """Return a size of the KV cache, in bytes, that holds every load with room to spare."""
    most = max(one.tokens * one.requests for one in loads)
    return max(256 << 20, most * (24 << 10)) + (256 << 20)


def meet(name: str, pair: Pair) -> None:
    """Hand over short prompts until one is loaded: the engines' first contact takes seconds.

    Args:
        name: name of the connector.
        pair: engines, which run.

    Raises:
        TransferError: the decode engine loaded no prompt.
    """
    for attempt in range(_MEET_TRIES):
        if pair.hand_over([draw_prompt(_MEET_TOKENS, attempt)]).loaded:
            return
    raise TransferError(f"the engines with {name} loaded none of {_MEET_TRIES} prompts")


def measure_load(pairs: Mapping[str, Pair], load: Load, rounds: int) -> dict[str, tuple[Handover, ...]]:
    """Hand over a load with each pair in turn; return the counted hand-overs by connector.

    Args:
        pairs: paused engines by the name of their connector.
        load: requests to hand over.
        rounds: number of counted rounds.

    Raises:
        TransferError: a connector did not load a prompt, or two connectors gave unequal first tokens.
    """
    found: dict[str, list[Handover]] = {name: [] for name in pairs}
    order = list(pairs)
    for number in range(rounds + 1):
        prompts = [draw_prompt(load.tokens, 1000 * number + one) for one in range(load.requests)]
        said = {}
        for name in order:
            with pairs[name].running():
                result = pairs[name].hand_over(prompts)
            if not result.loaded:
                raise TransferError(f"{name} did not load a prompt of {load.tokens} tokens")
            said[name] = result.tokens
            if number:
                found[name].append(result.handover)
        order.append(order.pop(0))  # no connector always follows the same one
        # bfloat16 and batching may flip a token, so most of them must be equal, not all.
        for name, tokens in said.items():
            equal = sum(a == b for a, b in zip(tokens, next(iter(said.values())), strict=True))
            if 2 * equal < len(tokens) and load.requests > 1:
                raise TransferError(f"{name} gave other first tokens than {next(iter(said))}")
    return {name: tuple(times) for name, times in found.items()}


def draw_prompt(tokens: int, seed: int) -> list[int]:
    """Return a prompt of random token ids, always the same for a seed."""
    drawn = random.Random(seed)  # noqa: S311 - no secret
    return [drawn.randrange(1, VOCABULARY) for _ in range(tokens)]
