"""Replays of traces with each policy, and the bound on what any policy could save."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from types import MappingProxyType

import numpy as np

from benchmarks.eviction.baselines import InTheWild, marconi
from benchmarks.eviction.bound import Demand, Prices, demand, lowest_bound
from benchmarks.eviction.costs import COSTS
from kvferry.tiers import EVICTION_POLICIES, EvictionPolicy
from kvferry.tools.models import read_model
from kvferry.tools.plan.find import find_config
from kvferry.tools.plan.kept import KeptSettings
from kvferry.tools.plan.side import EngineSide, resolve_layout
from kvferry.tools.replay.arrivals import Arrivals
from kvferry.tools.replay.content import RequestKeys, keys_of_each
from kvferry.tools.replay.engine import Hit
from kvferry.tools.replay.lookup import SimulatedTier
from kvferry.tools.replay.settings import UNLIMITED, ReplaySettings, ServedModel, TierSetting, served_model
from kvferry.tools.replay.simulation import Simulation
from kvferry.tools.replay.trace.base import Trace, TraceRequest

# Capacities of host memory, as shares of what all chunks of the trace take.
SHARES = (0.02, 0.05, 0.1, 0.2, 0.4)

POLICIES: Mapping[str, Callable[[int], EvictionPolicy]] = MappingProxyType(
    {
        **EVICTION_POLICIES,
        **{f"marconi {weight}": marconi(weight) for weight in (0.5, 1, 2)},
        "in the wild": InTheWild,
    }
)


@dataclass(frozen=True, slots=True)
class Cell:
    """What each policy saves with one trace, model and capacity, as shares of `bound`.

    `unlimited` is the share of the prompts' computation that unlimited host memory saves, `bound` the share
    of this. `offline` is what a schedule with knowledge of the future saves, so the optimum is not lower.
    """

    trace: str
    model: str
    capacity_bytes: int
    unlimited: float
    bound: float
    offline: float
    saved: Mapping[str, float]


def served(name: str) -> ServedModel:
    """Return a model that one GPU serves, in chunks of the default length."""
    found, config = find_config(name)
    reading = read_model(config, "auto", name=found)
    return served_model(reading, EngineSide(1, 1, resolve_layout("auto", reading), None), KeptSettings())


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The part of each trace that is replayed: `count` requests, or all if None, after the first `skip`.

    `concurrency` is the number of sessions at a time; 0 if sessions begin at their times.
    """

    skip: int = 0
    count: int | None = None
    concurrency: int = 0

    def of(self, trace: Trace) -> list[TraceRequest]:
        """Return the requests in the order in which they arrive if each has ended before the next one."""

        def keys(batch: Sequence[TraceRequest]) -> tuple[list[RequestKeys], list[RequestKeys]]:
            found = keys_of_each(batch, trace.unit_tokens, 1)
            return found, found

        arrivals = Arrivals(trace, keys, self.concurrency).at_once()
        some = islice(arrivals, self.skip, None if self.count is None else self.skip + self.count)
        return [replace(arrived.request, later=iter(()), branches=()) for arrived in some]


class _Replayed:
    """One trace and model."""

    def __init__(self, requests: Sequence[TraceRequest], unit_tokens: int, model: ServedModel) -> None:
        self._requests, self._unit_tokens, self._model = requests, unit_tokens, model
        self._cost = COSTS[model.name]

    def demand(self) -> Demand:
        return demand(self._model, self._requests, self._value)

    def saved(self, capacity: int, policy: Callable[[int], EvictionPolicy]) -> tuple[float, float, int]:
        """Return the computation saved, that of all prompts, and the most bytes that were stored."""
        tier = TierSetting(kind="host", capacity_bytes=capacity, shared=False, bytes_per_second=1.0)
        found, prompts = list[int](), list[int]()

        def on_hit(request: TraceRequest, hit: Hit) -> None:
            found.append(hit.found)
            prompts.append(request.prompt_tokens)

        simulation = Simulation(self._model, ReplaySettings(tiers=(tier,)), self._unit_tokens, on_hit)
        host = simulation.tiers[0][0]
        assert isinstance(host, SimulatedTier)  # noqa: S101 - the replay has no other tier
        host.policy = policy(capacity)
        simulation.run(self._requests)
        most = sum(counts.most_bytes for counts in host.counts)
        return float(self._value(found).sum()), float(self._value(prompts).sum()), most

    def _value(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        return self._cost.of_prefix(tokens, self._model.groups)


def measure(
    traces: Mapping[str, Trace],
    models: Sequence[str],
    policies: Mapping[str, Callable[[int], EvictionPolicy]],
    progress: Callable[[str], None],
    excerpt: Excerpt | None = None,
    shares: Sequence[float] = SHARES,
) -> list[Cell]:
    """Replay each trace with each model, capacity and policy.

    Args:
        excerpt: the part of each trace to replay; None for all of it.
    """
    cells = []
    for name, trace in traces.items():
        requests = (excerpt or Excerpt()).of(trace)
        for model in models:
            replayed = _Replayed(requests, trace.unit_tokens, served(model))
            progress(f"{name}, {model}")
            most, everything, size = replayed.saved(UNLIMITED, EVICTION_POLICIES["lru"])
            wanted = replayed.demand()
            for share in shares:
                capacity = int(size * share)
                saved = {}
                for policy, make in policies.items():
                    progress(f"{name}, {model}, {share:.0%}, {policy}")
                    saved[policy] = replayed.saved(capacity, make)[0]
                prices = Prices(wanted, capacity)
                bound, at = lowest_bound(prices, wanted.requests)
                shares_of = {policy: one / bound for policy, one in saved.items()}
                offline = prices.schedule(at) / bound
                cells.append(Cell(name, model, capacity, most / everything, bound / most, offline, shares_of))
    return cells
