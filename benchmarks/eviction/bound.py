"""A bound on the computation that any eviction policy could save on a trace, with knowledge of the future.

A request may begin with a prefix that ends at the end of one of its chunks, its *end*. For that, some
chunks must have been kept since an earlier request had them: all full-attention chunks of the prefix, the
last window, the snapshot at its end. Each takes its bytes in every *gap* between two requests since then. In
no gap may more than the capacity be kept. So a schedule chooses for each request one end or none, and

    saved = max Σ value(r, end(r))   such that   Σ bytes kept in gap t ≤ capacity, for all gaps t.

Give each gap a price λ(t) ≥ 0 for a byte. For the best schedule, and whatever the prices are,

    saved ≤ Σ value(r, end(r)) + Σ λ(t) (capacity - bytes kept in t)
          = capacity · Σ λ(t) + Σ [value(r, end(r)) - price of the chunks that end(r) needs]
          ≤ capacity · Σ λ(t) + Σ max(0, max over ends of r [value - price]) =: bound(λ).

The first step adds terms that are not negative, because the schedule keeps to the capacity. The second sorts
the bytes by the request for which they are kept: each chunk is kept for the next request that uses it. The
third lets each request choose the best end for itself, so it needs no schedule at all. A subgradient method
searches prices with a low bound, and every bound that it finds is valid.

The lowest bound is the optimum if schedules may be mixed in shares, by the duality of linear programs. It is
never above FOO, the flow bound of Daniel S. Berger, Nathan Beckmann, Mor Harchol-Balter, "Practical Bounds on
Optimal Caching with Variable Object Sizes" (POMACS 2(2), 2018), with a value for each chunk: that one lets a
chunk be used without the chunks before it, and knows one kind of chunk only.

Where serving is not sure to leave a chunk in the engine's blocks, the bound assumes that it does: windows of
the whole prompt, and snapshots wherever any policy could have had one taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import lcm

import numpy as np
import numpy.typing as npt

from kvferry.geometry import GroupKind
from kvferry.planning import attends_to_all, first_attended, last_prefix_ends
from kvferry.tools.replay.content import in_batches, keys_of_each
from kvferry.tools.replay.settings import ServedModel
from kvferry.tools.replay.trace.base import TraceRequest

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Request in which a chunk was last seen, if there is none.
_NEVER = -1
# Steps without a lower bound after which `lowest_bound` aims at a closer target.
_PATIENCE = 15


@dataclass(frozen=True, slots=True)
class Need:
    """The chunks of one KV cache group that each end of each request needs; all arrays of shape (ends,).

    Attributes:
        size: bytes of a chunk.
        seen: the latest earlier request that left the chunk which ends here, or -1.
        first: index of the end of the first chunk that a prefix up to here needs.
    """

    size: int
    seen: Ints
    first: Ints


@dataclass(frozen=True, slots=True)
class Demand:
    """The ends of all requests, one request after the other.

    Attributes:
        requests: number of requests.
        of: request of each end, ascending, int64 of shape (ends,).
        values: computation that a prefix up to each end saves.
    """

    requests: int
    of: Ints
    values: Floats
    needs: tuple[Need, ...]


def demand(model: ServedModel, requests: Iterable[TraceRequest], value: Callable[[Ints], Floats]) -> Demand:
    """Return the ends of all requests of a trace that may be loaded from a tier of unlimited size.

    Args:
        value: computation of the first tokens of a prompt.
    """
    size, state = model.chunk_tokens, model.state
    seen: dict[bytes, int] = {}
    states: dict[bytes, int] = {}
    interval = lcm(size, model.block_tokens)
    of, ends, prompts = list[Ints](), list[Ints](), list[int]()
    last_seen, last_states = list[int](), list[int]()
    number = 0
    for batch in in_batches(requests):
        for request, keys in zip(batch, keys_of_each(batch, size, 1), strict=True):
            prompt, names = request.prompt_tokens, keys.whole[0][: keys.computed_tokens // size]
            mine = names[: prompt // size]
            places = list(range(size, len(mine) * size + 1, size))
            if prompt % size and state is None:
                mine, places = [*mine, keys.tail(prompt)[0]], [*places, prompt]
            shared = next((n for n, key in enumerate(mine) if key not in seen), len(mine))
            of.append(np.full(shared, number))
            ends.append(np.array(places[:shared], np.int64))
            prompts.append(prompt)
            last_seen += [seen[key] for key in mine[:shared]]
            if state is not None:
                last_states += [states.get(key, _NEVER) for key in mine[:shared]]
                taken = _snapshots(model, prompt, shared * size, interval)
                states.update((names[at // size - 1], number) for at in taken if 0 < at <= len(names) * size)
            seen.update(dict.fromkeys([*mine, *names], number))
            number += 1
    owners, positions = np.concatenate(of).astype(np.int64), np.concatenate(ends)
    starts = np.searchsorted(owners, owners)
    needs = []
    for group in model.groups:
        if group.kind is GroupKind.STATE:
            needs.append(Need(group.chunk_bytes, np.array(last_states, np.int64), np.arange(len(owners))))
            continue
        first = starts
        if not attends_to_all(group.kind):
            computed = np.minimum(positions, np.array(prompts)[owners] - 1)
            first = starts + np.maximum(first_attended(group, computed), 0) // size
        needs.append(
            Need(group.chunk_bytes, np.array(last_seen, np.int64), np.minimum(first, np.arange(len(owners))))
        )
    return Demand(number, owners, value(positions), tuple(needs))


def _snapshots(model: ServedModel, prompt: int, shared: int, interval: int) -> set[int]:
    """Return all positions at which a request may leave a snapshot, whatever the tiers have of it."""
    placed = model.form.placed(prompt)
    anywhere = model.form.steps.retention != 0
    inside = range(interval, (prompt if anywhere else shared) + 1, interval)
    return {*last_prefix_ends(prompt, model.chunk_tokens, model.block_tokens), *placed, *inside}


class Prices:
    """The bound of one trace and capacity, as a function of the prices.

    Args:
        capacity: bytes that are kept at most.
    """

    def __init__(self, demand: Demand, capacity: int) -> None:
        self.capacity = capacity
        usable = np.ones(len(demand.of), np.bool_)
        for need in demand.needs:
            missing = np.append(0, np.cumsum(need.seen == _NEVER))
            usable &= missing[1:] == missing[need.first]
        self._requests, self._of, self._needs = demand.requests, demand.of, demand.needs
        self._values = np.where(usable, demand.values, -np.inf)
        self._starts = np.flatnonzero(np.diff(self._of, prepend=-1))
        best = np.maximum.reduceat(self._values, self._starts) if len(self._starts) else np.zeros(0)
        # What is saved if nothing is ever evicted.
        self.unlimited = float(np.maximum(best, 0).sum())

    def bound(self, prices: Floats) -> tuple[float, Floats]:
        """Return the bound of prices, and the bytes that the requests' choices keep in each gap.

        Both arrays have the shape (requests,). Gap `t` follows request `t`.
        """
        chosen, gains = self._choices(prices)
        used = np.zeros(self._requests + 1)
        for need in self._needs:
            marks = np.zeros(len(self._of) + 1)
            np.add.at(marks, need.first[chosen], need.size)
            np.subtract.at(marks, chosen + 1, need.size)
            kept = np.cumsum(marks)[:-1]
            used += np.bincount(np.maximum(need.seen, 0), kept, minlength=len(used))
            used -= np.bincount(self._of, kept, minlength=len(used))
        return float(self.capacity * prices.sum() + gains.sum()), np.cumsum(used)[:-1]

    def schedule(self, prices: Floats) -> float:
        """Return what a schedule with knowledge of the future saves, which keeps to the capacity.

        It takes the choices of the requests at these prices, those with the largest gain first, if they fit.
        """
        chosen, gains = self._choices(prices)
        free, saved = np.full(self._requests, self.capacity, np.float64), 0.0
        for end in chosen[np.argsort(-gains, kind="stable")].tolist():
            taken = np.zeros(self._requests)
            for need in self._needs:
                seen = need.seen[need.first[end] : end + 1]
                begun = np.bincount(seen, minlength=self._requests) * need.size
                taken[: self._of[end]] += np.cumsum(begun)[: self._of[end]]
            if (taken <= free).all():
                free -= taken
                saved += float(self._values[end])
        return saved

    def _choices(self, prices: Floats) -> tuple[Ints, Floats]:
        """Return the ends that requests choose at these prices, and their values less the prices."""
        if not len(self._starts):
            return np.zeros(0, np.int64), np.zeros(0)
        until = np.append(0.0, np.cumsum(prices))
        net = self._values.copy()
        for need in self._needs:
            held = need.size * (until[self._of] - until[np.maximum(need.seen, 0)])
            total = np.append(0.0, np.cumsum(held))
            net -= total[1:] - total[need.first]
        best = np.maximum.reduceat(net, self._starts)
        lengths = np.diff(np.append(self._starts, len(net)))
        at = np.where(net == np.repeat(best, lengths), np.arange(len(net)), -1)
        gains = best > 0
        return np.maximum.reduceat(at, self._starts)[gains], best[gains]


def lowest_bound(prices: Prices, requests: int, steps: int = 300) -> tuple[float, Floats]:
    """Return a bound that is close to the lowest one, and its prices.

    Args:
        steps: number of steps of the subgradient method.
    """
    found, at = prices.unlimited, np.zeros(requests)
    now, direction = np.full(requests, _one_price(prices, requests)), np.zeros(requests)
    # Source of the length of a step: B. T. Polyak, "Minimization of unsmooth functionals", USSR Computational
    # Mathematics and Mathematical Physics 9(3), 1969. Its target is below the best bound by a share, which is
    # halved when no step has come closer for some time.
    share, since = 0.05, 0
    for _ in range(steps):
        bound, used = prices.bound(now)
        since = 0 if bound < found * (1 - 1e-4) else since + 1
        if bound < found:
            found, at = bound, now
        if since == _PATIENCE:
            share, since = share / 2, 0
            now, direction = at, np.zeros(requests)
            bound, used = prices.bound(now)
        slope = prices.capacity - used
        slope[(now <= 0) & (slope > 0)] = 0
        if not slope.any():  # these prices are the best ones
            break
        direction = 0.7 * direction + 0.3 * slope
        length = (bound - found * (1 - share)) / max(float(direction @ direction), 1e-300)
        now = np.maximum(now - length * direction, 0)
    return found, at


def _one_price(prices: Prices, requests: int) -> float:
    """Return a price that, asked in all gaps, leaves about the capacity in use on average."""
    low, high = 0.0, 1.0
    while prices.bound(np.full(requests, high))[1].mean() > prices.capacity:
        high *= 16
    for _ in range(40):
        middle = (low + high) / 2
        if prices.bound(np.full(requests, middle))[1].mean() > prices.capacity:
            low = middle
        else:
            high = middle
    return high
