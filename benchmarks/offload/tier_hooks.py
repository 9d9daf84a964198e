"""What tiers cost an engine whose requests have nothing in them: time inside the connector's hooks, per step.

All hooks count, those of the scheduler and those of the worker, of every layer, by a clock around the
connector's public methods. An engine of this machine computes a batch of prompts, whose chunks it stores, and
then decodes them together; the share is that of a step of the model that decodes here, on this processor.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeAlias

import numpy as np

from benchmarks.checkpoint import VOCABULARY
from benchmarks.served import Served
from kvferry.errors import TransferError
from kvferry.measuring.spread import Spread, percentile

REQUESTS = 16
PROMPT_TOKENS = 520
TARGET_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Steps of one kind.

    Attributes:
        hooks: seconds inside hooks, of each step.
        steps: seconds of each step, hooks included.
    """

    hooks: tuple[float, ...]
    steps: tuple[float, ...]

    @property
    def share(self) -> Spread:
        """Of a step's time that is inside hooks."""
        return Spread.of([h / s for h, s in zip(self.hooks, self.steps, strict=True)])

    @property
    def p99(self) -> float:
        """Seconds inside hooks that 99 of 100 steps do not exceed."""
        return percentile(self.hooks, 99)


@dataclass(frozen=True, slots=True)
class HookCost:
    """What tiers cost per step.

    Attributes:
        requests, prompt_tokens: of the batch.
        storing: steps that compute prompts, and have their chunks stored.
        decoding: steps in which every request gets a token, and nothing is stored or found.
        arriving: seconds inside hooks as a request comes in, outside of steps.
        by_hook: hook to its mean seconds per decoding step, the longest first.
    """

    requests: int
    prompt_tokens: int
    storing: StepTimes
    decoding: StepTimes
    arriving: Spread
    by_hook: dict[str, float]

    @property
    def reached(self) -> bool:
        """A decoding step spends no more than the target's share in hooks, by the median."""
        return self.decoding.share.median < TARGET_SHARE


def measure(served: Served, steps: int, progress: Callable[[str], None]) -> HookCost:
    """Decode a batch.

    Args:
        served: an idle engine for `REQUESTS` requests.
        steps: that decode.
        progress: told what is going on.

    Raises:
        TransferError: something was found in the tiers.
    """
    progress(f"an engine decodes {REQUESTS} requests for {steps} steps")
    before, clock = served.hits(), HookClock(served.connectors)
    draw = np.random.default_rng(time.monotonic_ns())
    arriving = []
    for _ in range(REQUESTS):
        served.add(draw.integers(0, VOCABULARY, PROMPT_TOKENS).tolist(), steps + 1)
        arriving.append(sum(clock.take().values()))
    storing, decoding = _steps(served, clock)
    clock.remove()
    served.settle()
    if served.hits() != before:
        raise TransferError("prompts that were drawn just now were found in the tiers: please report this")
    return HookCost(
        REQUESTS, PROMPT_TOKENS, _times(storing), _times(decoding), Spread.of(arriving), _by_hook(decoding)
    )


_Step: TypeAlias = tuple[dict[str, float], float]
"""Seconds by hook, and of the step."""


def _steps(served: Served, clock: HookClock) -> tuple[list[_Step], list[_Step]]:
    """Step until all requests have ended; steps until all got a token at once, and those in which all do."""
    storing: list[_Step] = []
    decoding: list[_Step] = []
    left, last = REQUESTS, 0
    while left:
        started = time.perf_counter()
        tokens, ended = served.step()
        took = clock.take(), time.perf_counter() - started
        left -= ended
        if last == tokens == REQUESTS:
            decoding.append(took)
        elif left == REQUESTS:
            storing.append(took)
        last = tokens
    return storing, decoding


def _times(of: Sequence[_Step]) -> StepTimes:
    return StepTimes(tuple(sum(hooks.values()) for hooks, _ in of), tuple(seconds for _, seconds in of))


def _by_hook(of: Sequence[_Step]) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for hooks, _ in of:
        for name, seconds in hooks.items():
            total[name] += seconds / len(of)
    return dict(sorted(total.items(), key=lambda item: -item[1]))


class HookClock:
    """Adds up the time inside public methods of connectors; what one calls of another counts once."""

    def __init__(self, connectors: Sequence[Any]) -> None:
        self._connectors = connectors
        self._seconds: dict[str, float] = defaultdict(float)
        self._inside = False
        for connector in connectors:
            for name in dir(type(connector)):
                method = getattr(type(connector), name)
                if not name.startswith("_") and callable(method):
                    setattr(connector, name, self._timed(getattr(connector, name)))

    def take(self) -> dict[str, float]:
        """Seconds by method since the last call."""
        seconds, self._seconds = self._seconds, defaultdict(float)
        return seconds

    def remove(self) -> None:
        """Leave the connectors as they were."""
        for connector in self._connectors:
            for name in [name for name, value in vars(connector).items() if hasattr(value, "__wrapped__")]:
                delattr(connector, name)

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return method(*args, **kwargs)
            self._inside = True
            started = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self._seconds[method.__name__] += time.perf_counter() - started
                self._inside = False

        return timed
