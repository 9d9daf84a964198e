"""The hit rate for every capacity of host memory, from one pass over a trace.

Least recently used chunks form a stack: with any capacity, host memory holds the chunks at its top. So the
smallest capacity at which a chunk is a hit is the bytes above it, its *stack distance* (R. L. Mattson, J.
Gecsei, D. R. Slutz, I. L. Traiger, "Evaluation techniques for storage hierarchies", IBM Systems Journal 9(2),
1970). After a request, the stack begins with the chunks of its prompt, the first one on top, and below them
those of its answer. Each of the two is a *run* of the stack, and a later request takes a first part of it
away. A Fenwick tree over runs sums those above a chunk.

The chunks of every prompt are stored and used in this way, whatever the engine has of it. So the engine's own
prefix cache changes nothing in the stack: its tokens are hits at every capacity, and host memory adds those
after them.

Limits: all chunks must have one size and be needed from the first on, so the model has one KV cache group,
which attends to all tokens. The pass knows no slower tiers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, log2

import numpy as np

from kvferry.connector import saves_computation
from kvferry.tools.replay.arrivals import Arrivals
from kvferry.tools.replay.content import RequestKeys
from kvferry.tools.replay.engine import EngineCache
from kvferry.tools.replay.passes import Pass, Passes
from kvferry.tools.replay.replayed import Replayed
from kvferry.tools.replay.settings import UNLIMITED, BlockPool
from kvferry.tools.replay.trace.base import TraceRequest

# Least capacity of a curve, in chunks.
_LEAST_CHUNKS = 64
_PER_DOUBLING = 4
# Each pass replays the whole trace.
_PASSES = 8


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The share of prompt tokens that the engine's prefix cache and host memory provide at one capacity."""

    capacity_bytes: int
    hit_rate: float
    hit_rate_without_hints: float | None = None  # None if no hints were given


def curve_as_json(points: Iterable[CurvePoint]) -> list[dict[str, float]]:
    """Return the points of a curve as values that can be written as JSON."""
    found = []
    for one in points:
        values = {"capacity_bytes": one.capacity_bytes, "hit_rate": one.hit_rate}
        if one.hit_rate_without_hints is not None:
            values["hit_rate_without_hints"] = one.hit_rate_without_hints
        found.append(values)
    return found


class _Sums:
    """A Fenwick tree: numbers at places from 0, and sums over all later places. Grows as needed.

    Source: Peter M. Fenwick, "A new data structure for cumulative frequency tables", Software: Practice and
    Experience 24(3), 1994.
    """

    def __init__(self) -> None:
        self._tree = [0] * 1025
        self.total = 0

    def add(self, place: int, number: int) -> None:
        while place + 1 >= len(self._tree):
            # The new half begins with zeros, so its last node has the total.
            size = len(self._tree) - 1
            self._tree += [0] * size
            self._tree[2 * size] = self.total
        self.total += number
        at = place + 1
        while at < len(self._tree):
            self._tree[at] += number
            at += at & -at

    def after(self, place: int) -> int:
        at, before = place + 1, 0
        while at:
            before += self._tree[at]
            at -= at & -at
        return self.total - before


class StackDistances:
    """The tokens that need not be computed at each capacity, added up while requests pass.

    Args:
        capacities: capacities in bytes, ascending. Chunks that are deeper in the stack than the last one are
            forgotten, so it bounds the memory that this object takes.
    """

    def __init__(self, chunk_bytes: int, chunk_tokens: int, capacities: Sequence[int]) -> None:
        self._capacities = list(capacities)
        self._depths = np.asarray(capacities, np.int64) // chunk_bytes
        self._chunk_tokens = chunk_tokens
        self._hits = np.zeros(len(self._depths) + 1, np.int64)
        self._tokens = self._local_tokens = 0
        self._users: dict[bytes, int] = {}  # number of the run that each chunk is in
        self._runs: deque[tuple[int, list[bytes]]] = deque()  # runs of the stack, the oldest first
        self._left: dict[int, int] = {}  # number of chunks left in each run
        self._sums, self._count = _Sums(), 0

    def add(
        self, request: TraceRequest, names: RequestKeys, local_tokens: int = 0, *, counted: bool = True
    ) -> None:
        """Pass a request: count its hits at each capacity, and put its chunks on top of the stack."""
        prompt, size = request.prompt_tokens, self._chunk_tokens
        whole, chunks = names.whole[0][: names.computed_tokens // size], prompt // size
        keys, generated = whole[:chunks], whole[chunks:]
        if prompt % size:
            keys.append(names.tail(prompt)[0])
        self._tokens += prompt * counted
        self._local_tokens += local_tokens * counted
        runs = self._hit_runs(keys)
        if counted and runs and saves_computation(prompt - local_tokens):
            depths = [self._sums.after(user) + np.arange(1, last - first + 1) for user, first, last in runs]
            at = self._depths.searchsorted(np.concatenate(depths))
            ends = np.minimum(np.arange(1, len(at) + 1) * size, prompt)
            added = np.diff(np.maximum(ends, local_tokens), prepend=local_tokens)
            np.add.at(self._hits, at, added)
        for user, first, last in (*runs, *self._hit_runs(generated)):
            self._left[user] -= last - first
            self._sums.add(user, first - last)
        self._push(generated)
        self._push(keys)
        self._forget()

    def points(self) -> list[CurvePoint]:
        sums = (self._local_tokens + self._hits[:-1].cumsum()).tolist()
        each = zip(self._capacities, sums, strict=True)
        return [CurvePoint(capacity, hits / max(self._tokens, 1)) for capacity, hits in each]

    def _push(self, keys: list[bytes]) -> None:
        """Put chunks on top of the stack, the first one uppermost."""
        if keys:
            self._users.update(dict.fromkeys(keys, self._count))
            self._runs.append((self._count, keys))
            self._left[self._count] = len(keys)
            self._sums.add(self._count, len(keys))
            self._count += 1

    def _hit_runs(self, keys: Sequence[bytes]) -> list[tuple[int, int, int]]:
        """Return the runs of the stack in which the first chunks of a prompt lie, as (run, first, last + 1).

        Places are indices in `keys`. The chunk at the first place is the uppermost one of the run.
        """
        found: list[tuple[int, int, int]] = []
        for place, key in enumerate(keys):
            user = self._users.get(key)
            if user is None:
                break
            if found and found[-1][0] == user:
                found[-1] = (user, found[-1][1], place + 1)
            else:
                found.append((user, place, place + 1))
        return found

    def _forget(self) -> None:
        """Forget the oldest runs as long as the others alone fill the largest capacity."""
        most = int(self._depths[-1])
        while self._sums.total - self._left[self._runs[0][0]] >= most or not self._left[self._runs[0][0]]:
            number, keys = self._runs.popleft()
            for key in keys:
                if self._users[key] == number:
                    del self._users[key]
            self._sums.add(number, -self._left.pop(number))


def hit_rate_curve(passes: Passes, replayed: Replayed) -> list[CurvePoint]:
    """Return the hit rate of one engine by the capacity of its host memory, without slower tiers.

    The engine has the pools of all engines of the replay.
    """
    model, settings = replayed.model, replayed.settings
    least = _LEAST_CHUNKS * max(group.chunk_bytes for group in model.groups)
    largest = max(replayed.tiers[0].counts.stored_bytes, 2 * least)
    pool = BlockPool(settings.pool.blocks * settings.engines)
    # One pass is enough if the chunks form a stack and all of them have one size.
    is_stack = settings.policy == "lru" and settings.hints is None and settings.tenants is None
    if is_stack and model.has_one_row:
        distances = StackDistances(
            model.groups[0].chunk_bytes, model.chunk_tokens, _capacities(largest, least)
        )
        cache = EngineCache(model, pool.blocks, replayed.unit_tokens)
        arrivals = Arrivals(passes.requests("curve, pass 1"), cache.keys_of_each, settings.concurrency)
        for number, (request, keys, runs, _) in enumerate(arrivals.at_once()):
            local = cache.look_up(request.prompt_tokens, runs).tokens
            cache.keep(request, runs, (), 0)
            distances.add(request, keys, local, counted=number >= settings.skip)
        return distances.points()
    begun: list[tuple[int, Pass, Pass | None]] = []
    for number, capacity in enumerate(_capacities(largest, least, _PASSES), 1):
        host = replace(settings.tiers[0], capacity_bytes=min(capacity, UNLIMITED))
        alone = replace(settings, tiers=(host,), engines=1, pool=pool, prefill_tokens_per_second=0.0)
        one, before = passes.begin(f"curve, pass {number}", model, alone), None
        if settings.hints is not None:
            name = f"curve without hints, pass {number}"
            before = passes.begin(name, model, replace(alone, hints=None))
        begun.append((capacity, one, before))
    return [
        CurvePoint(
            capacity,
            passes.result(one).results.hit_rate,
            None if before is None else passes.result(before).results.hit_rate,
        )
        for capacity, one, before in begun
    ]


def _capacities(largest: int, least: int, most: int = 0) -> list[int]:
    """Return capacities from `least` to `largest` bytes, by equal factors.

    >>> _capacities(1024, 256), _capacities(1024, 256, 3)
    ([256, 304, 362, 431, 512, 609, 724, 861, 1024], [256, 512, 1024])

    Args:
        most: number of capacities; 0 for a factor of at most 2^(1/4).
    """
    steps = most - 1 if most else max(ceil(_PER_DOUBLING * log2(largest / least)), 1)
    return [round(least * (largest / least) ** (number / steps)) for number in range(steps)] + [largest]
