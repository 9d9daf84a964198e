"""A mix of requests that clients send to servers: throughput, and how long the clients wait for tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.conditions import QUIET, Conditions
from benchmarks.handover.measure import draw_prompt

_PROMPT_TOKENS = (128, 2048)
_ANSWER_TOKENS = (16, 64)
_SEED = 1 << 20
"""Distance between the seeds of rounds, of which each prompt takes one."""


@dataclass(frozen=True, slots=True)
class MixRequest:
    """A request of a mix.

    Attributes:
        prompt: token ids of the prompt.
        answer: number of tokens to generate.
    """

    prompt: list[int]
    answer: int


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """When the tokens of one request arrived, in seconds of `time.perf_counter`.

    Attributes:
        sent: the client began to send the request.
        tokens: arrival of each token. Those of one event arrive at once.
    """

    sent: float
    tokens: tuple[float, ...]

    @property
    def first(self) -> float:
        """Time to the first token, in seconds."""
        return self.tokens[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Times between tokens, in seconds."""
        return [after - before for before, after in pairwise(self.tokens)]


@dataclass(frozen=True, slots=True)
class MixTimes:
    """The times of one round of a mix.

    Attributes:
        requests: times of each request.
        recomputed: share of the prompts' tokens that the decode server computed itself.
        conditions: load of the machine around the round.
    """

    requests: tuple[TokenTimes, ...]
    recomputed: float = 0.0
    conditions: Conditions = QUIET

    @property
    def seconds(self) -> float:
        """Time from the first request's beginning to the last token."""
        return max(one.tokens[-1] for one in self.requests) - min(one.sent for one in self.requests)

    @property
    def tokens(self) -> int:
        """Number of generated tokens."""
        return sum(len(one.tokens) for one in self.requests)

    @property
    def wait(self) -> float:
        """The longest wait of a request for a token, in seconds."""
        return max(max([one.first, *one.gaps]) for one in self.requests)

    def figures(self) -> dict[str, float]:
        """Return the seconds that a user cares about, by name. Less is better."""
        firsts = [one.first for one in self.requests]
        gaps = [gap for one in self.requests for gap in one.gaps]
        return {
            PER_REQUEST: self.seconds / len(self.requests),
            "time to first token, p50": float(np.percentile(firsts, 50)),
            "time to first token, p99": float(np.percentile(firsts, 99)),
            "time between tokens, p50": float(np.percentile(gaps, 50)),
            "time between tokens, p99": float(np.percentile(gaps, 99)),
            CPU_TIME: self.conditions.cpu_seconds / len(self.requests),
        }


CPU_TIME = "CPU time per request"
"""Name of the figure of all processes, the clients included. It depends little on what else runs."""

PER_REQUEST = "time per request"
"""Name of the figure whose inverse is the throughput in requests per second."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Requests of mixed lengths, sent by clients of which each waits for its answer before it sends the next.

    Attributes:
        requests: number of requests in a round.
        clients: number of clients.
    """

    requests: int
    clients: int

    @property
    def longest(self) -> int:
        """Length of the longest request, in tokens."""
        return _PROMPT_TOKENS[1] + _ANSWER_TOKENS[1]

    @property
    def at_once(self) -> int:
        """Number of requests at a time."""
        return self.clients

    def __str__(self) -> str:
        return f"{self.requests} requests of mixed lengths from {self.clients} clients"

    def draw(self, number: int) -> list[MixRequest]:
        """Return the requests of a round: the logarithms of the prompts' lengths are evenly distributed.

        Args:
            number: number of the round.
        """
        drawn = random.Random(number)  # noqa: S311 - no secret
        low, high = np.log(_PROMPT_TOKENS)
        return [
            MixRequest(
                draw_prompt(round(float(np.exp(drawn.uniform(low, high)))), _SEED * (number + 1) + one),
                drawn.randint(*_ANSWER_TOKENS),
            )
            for one in range(self.requests)
        ]

    def run(self, name: str, pair: Any, number: int) -> tuple[MixTimes, Sequence[int]]:
        """Serve a round's requests. See `Work`."""
        _ = name
        times, tokens = pair.serve(self.draw(number), self.clients)
        return times, tokens
