"""The choice of an engine for each request, as routers in front of engines make it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from kvferry.tools.replay.settings import RouteName
from kvferry.tools.replay.trace.request import TraceRequest

# The route `prefix` remembers at most this many prefixes. The oldest half is then forgotten.
_MOST_PREFIXES = 1 << 22
# Share of a prompt that an engine must have served to be preferred: the default of vllm-router's policy
# ``cache_aware`` (``--cache-threshold``).
_LEAST_SHARE = 0.3
# Requests by which the queue of a preferred engine may be longer than the shortest queue.
_MOST_AHEAD = 4


class Route(Protocol):
    """A way to choose an engine."""

    def choose(self, request: TraceRequest, queues: Sequence[int]) -> int:
        """Return the index of the engine for a request, by the requests that wait or run at each engine."""


class RandomRoute:
    """Chooses any engine."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - a simulation

    def choose(self, request: TraceRequest, queues: Sequence[int]) -> int:
        del request
        return self._random.randrange(len(queues))


class SessionRoute:
    """Chooses the same engine for all requests of a session.

    A request without a session goes to an engine by its first unit of content.
    """

    def choose(self, request: TraceRequest, queues: Sequence[int]) -> int:
        first = int(request.prefix_ids[0]) if len(request.prefix_ids) else request.prompt_id
        seed = request.session or first
        return random.Random(seed).randrange(len(queues))  # noqa: S311 - a stable digest of the session


class PrefixRoute:
    """Chooses the engine that served the longest prefix of the prompt before.

    A prompt of which no engine served at least `_LEAST_SHARE` goes to the engine with the shortest queue, of
    several to the one that got the fewest tokens so far.
    """

    def __init__(self) -> None:
        self._owners: dict[int, int] = {}
        self._tokens: Counter[int] = Counter()

    def choose(self, request: TraceRequest, queues: Sequence[int]) -> int:
        units = request.prompt_tokens // request.unit_tokens
        ids = request.prefix_ids[:units].tolist()
        shortest = min(range(len(queues)), key=lambda number: (queues[number], self._tokens[number]))
        least = max(int(units * _LEAST_SHARE), 1)
        owner = next(
            (self._owners[one] for one in reversed(ids[least - 1 :]) if one in self._owners), shortest
        )
        # A long queue costs more time than the prefix saves.
        if queues[owner] - queues[shortest] >= _MOST_AHEAD:
            owner = shortest
        self._tokens[owner] += request.prompt_tokens
        self._owners.update(dict.fromkeys(ids, owner))
        if len(self._owners) > _MOST_PREFIXES:
            for old in list(self._owners)[: _MOST_PREFIXES // 2]:
                del self._owners[old]
        return owner


def route_named(name: RouteName, seed: int) -> Route:
    """Return the route with a name. Random choices have a seed."""
    routes: dict[RouteName, Callable[[], Route]] = {
        "random": lambda: RandomRoute(seed),
        "session": SessionRoute,
        "prefix": PrefixRoute,
    }
    return routes[name]()
