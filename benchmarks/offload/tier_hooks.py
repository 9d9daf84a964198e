"""Measure the time inside the connector's hooks per engine step, if no request finds anything in the tiers.

The connector's public methods are timed, which are all hooks of the scheduler and the worker. A real engine
computes a batch of prompts, stores their chunks, and then decodes them together. The result is a share of the
time of a decoding step of this model on this machine.
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
from benchmarks.served import SteppedEngine
from kvferry.common.errors import TransferError
from kvferry.tools.measuring.rounds import Spread, percentile

REQUESTS = 16
PROMPT_TOKENS = 520
TARGET_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The times of steps of one kind.

    Attributes:
        hooks: time inside hooks of each step, in seconds.
        steps: time of each whole step including hooks, in seconds.
    """

    hooks: tuple[float, ...]
    steps: tuple[float, ...]

    @property
    def share(self) -> Spread:
        """Return the share of a step's time that is inside hooks, up to 1."""
        return Spread.of([h / s for h, s in zip(self.hooks, self.steps, strict=True)])

    @property
    def p99(self) -> float:
        """Return the 99th percentile of the time inside hooks, in seconds."""
        return percentile(self.hooks, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class HookCost:
    """The time that tiers cost per step.

    Attributes:
        requests: number of requests in the batch.
        prompt_tokens: length of each prompt, in tokens.
        storing: times of steps that compute prompts and store their chunks.
        decoding: times of steps in which every request gets a token, and nothing is stored or found.
        arriving: time inside hooks when a request arrives, outside of steps, in seconds.
        by_hook: mean seconds per decoding step by name of the hook, the longest first.
    """

    requests: int
    prompt_tokens: int
    storing: StepTimes
    decoding: StepTimes
    arriving: Spread
    by_hook: dict[str, float]

    @property
    def reached(self) -> bool:
        """Return whether the median share of a decoding step is below the target."""
        return self.decoding.share.median < TARGET_SHARE


def measure(served: SteppedEngine, steps: int, progress: Callable[[str], None]) -> HookCost:
    """Run a batch of requests through the engine, and return the times inside hooks.

    Args:
        served: idle engine for `REQUESTS` requests.
        steps: number of decoding steps.
        progress: function that is called with a line of text at the beginning.

    Raises:
        TransferError: a request found something in the tiers.
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
        requests=REQUESTS,
        prompt_tokens=PROMPT_TOKENS,
        storing=_times(storing),
        decoding=_times(decoding),
        arriving=Spread.of(arriving),
        by_hook=_by_hook(decoding),
    )


_Step: TypeAlias = tuple[dict[str, float], float]
"""Times of one step in seconds: inside each hook by the hook's name, and of the whole step."""


def _steps(served: SteppedEngine, clock: HookClock) -> tuple[list[_Step], list[_Step]]:
    """Run steps until all requests have ended. Return the times of storing and of decoding steps.

    Steps with a varying number of running requests, between these phases and at the end, are left out.
    """
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
    """Times all calls of the public methods of connectors. The time of nested calls counts once."""

    def __init__(self, connectors: Sequence[Any], clock: Callable[[], float] = time.perf_counter) -> None:
        self._connectors, self._clock = connectors, clock
        self._seconds: dict[str, float] = defaultdict(float)
        self._inside = False
        for connector in connectors:
            for name in dir(type(connector)):
                method = getattr(type(connector), name)
                if not name.startswith("_") and callable(method):
                    setattr(connector, name, self._timed(getattr(connector, name)))

    def take(self) -> dict[str, float]:
        """Return the seconds by name of the method since the last call, and clear them."""
        seconds, self._seconds = self._seconds, defaultdict(float)
        return seconds

    def remove(self) -> None:
        """Restore the connectors' original methods."""
        for connector in self._connectors:
            for name in [name for name, value in vars(connector).items() if hasattr(value, "__wrapped__")]:
                delattr(connector, name)

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return method(*args, **kwargs)
            self._inside = True
            started = self._clock()
            try:
                return method(*args, **kwargs)
            finally:
                self._seconds[method.__name__] += self._clock() - started
                self._inside = False

        return timed
