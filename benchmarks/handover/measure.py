"""Time hand-overs from a prefill to a decode engine, up to the first token, with several connectors in turn.

For each connector there is a pair of engines. Only the pair that is measured runs. Engines in processes of
the benchmark are all started at once, and those that wait are paused. A pair of servers is started when its
turn comes, and ended after some rounds.

In each round, every connector does the same work once. The first round of a pair is not counted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from benchmarks.checkpoint import VOCABULARY
from benchmarks.conditions import QUIET, Conditions, watched
from benchmarks.handover.engine import Setup, Stamps
from benchmarks.handover.model import HandoverModel, write_model
from benchmarks.order import rotated
from kvferry.common.errors import KVFerryError, TransferError

_MEET_TOKENS, _MEET_TRIES = 300, 10
_SPARE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Handover:
    """One hand-over of all requests of a load, in seconds.

    Attributes:
        stamps: stages of each request.
        conditions: load of the machine around the hand-over.
    """

    stamps: tuple[Stamps, ...]
    conditions: Conditions = QUIET

    @property
    def seconds(self) -> float:
        """Return the mean time from a request's arrival at the decode engine to its first token."""
        return sum(one.answered - one.added for one in self.stamps) / len(self.stamps)

    @property
    def wait(self) -> float:
        """Return the longest time from a request's arrival to its first token."""
        return max(one.answered - one.added for one in self.stamps)

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


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that are handed over at once.

    Attributes:
        tokens: length of each prompt, in tokens.
        requests: number of requests.
    """

    tokens: int
    requests: int

    @property
    def longest(self) -> int:
        """Length of the longest request, in tokens."""
        return self.tokens + 1

    @property
    def at_once(self) -> int:
        """Number of requests at a time."""
        return self.requests

    def __str__(self) -> str:
        return f"{self.requests} requests of {self.tokens} tokens"

    def run(self, name: str, pair: Pair, number: int) -> tuple[Handover, Sequence[int]]:
        """Hand the load over. See `Work`."""
        prompts = [draw_prompt(self.tokens, 1000 * number + one) for one in range(self.requests)]
        result = pair.hand_over(prompts)
        if not result.loaded:
            raise TransferError(f"{name} did not load a prompt of {self.tokens} tokens")
        return result.handover, result.tokens


class Pair(Protocol):
    """A prefill and a decode engine with the same connector."""

    def running(self) -> AbstractContextManager[None]:
        """Let both engines run until the ``with`` block ends. They may be paused then."""

    def hand_over(self, prompts: Sequence[Sequence[int]]) -> Result:
        """Compute prompts in one engine and continue them in the other. Both are idle afterwards.

        Args:
            prompts: token ids of each prompt.

        Raises:
            TransferError: an engine does not answer.
        """


class Work(Protocol):
    """Work that every pair does in a round."""

    @property
    def longest(self) -> int:
        """Length of the longest request, in tokens."""

    @property
    def at_once(self) -> int:
        """Number of requests at a time."""

    def run(self, name: str, pair: Any, number: int) -> tuple[Any, Sequence[int]]:
        """Do the work; return its times, a dataclass with a field ``conditions``, and each first token.

        Args:
            name: name of the pair's connector.
            pair: engines, which run.
            number: number of the round, from which prompts are drawn.

        Raises:
            TransferError: an engine does not answer, or did not load a prompt.
        """


Start = Callable[[Setup], AbstractContextManager[Any]]
"""Start the engines of a `Pair` with a configuration. They run, and end with the ``with`` block."""

Found = dict[Any, dict[str, tuple[Any, ...]]]
"""Times of the counted rounds, by work and by connector."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of a measurement.

    Attributes:
        found: times of the connectors that did all works.
        failures: for each other connector, why it did not.
    """

    found: Found
    failures: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Turns:
    """How the pairs take turns.

    Attributes:
        rounds: number of counted rounds of a pair from its start to its end.
        sittings: how many times each pair is started, alone; 0 to start all pairs at once.
    """

    rounds: int
    sittings: int = 0

    def groups(self, names: Sequence[str]) -> list[tuple[str, ...]]:
        """Return the names of the pairs that are started together, one group after the other.

        >>> Turns(3, 2).groups(["a", "b"]), Turns(3).groups(["a", "b"])
        ([('a',), ('b',), ('b',), ('a',)], [('a', 'b')])
        """
        alone: list[tuple[str, ...]] = [
            (name,) for number in range(self.sittings) for name in rotated(names, number)
        ]
        return alone or [tuple(names)]


def measure(
    model: HandoverModel,
    works: Sequence[Work],
    connectors: Sequence[str],
    start: Start,
    *,
    turns: Turns,
    folder: Path,
    progress: Callable[[str], None],
) -> Measured:
    """Do all works with each connector in turn, and return the times.

    Args:
        model: model family.
        works: loads and mixes to measure.
        connectors: names of the connectors, as in `Setup`.
        start: function that starts the engines of a connector.
        turns: order and number of rounds.
        folder: folder for the checkpoint.
        progress: function that is called with a line of text before each load.

    A connector other than kvferry that is measured alone may fail; the others are measured then.

    Raises:
        ConfigError: an engine refuses its configuration.
        TransferError: an engine does not start or does not answer, a connector did not load a prompt, or two
            connectors gave unequal first tokens.
        LaunchError: an engine that is a server does not start.
    """
    longest = max(one.longest for one in works) + _SPARE_TOKENS
    progress(f"{model.name}: writing the checkpoint")
    path = write_model(model, folder / model.name, longest)
    common = Setup(
        model=path, connector="", longest=longest, requests=max(one.at_once for one in works),
        cache_bytes=_cache_bytes(works), engine=dict(model.engine),
    )  # fmt: skip
    times, said = _Times(), FirstTokens()
    failures: dict[str, str] = {}

    def measure_group(group: Sequence[str]) -> None:
        with ExitStack() as stack:
            pairs: dict[str, Pair] = {}
            for name in group:
                progress(f"{model.name}: starting engines with {name}")
                pairs[name] = stack.enter_context(start(replace(common, connector=name)))
                with pairs[name].running():
                    meet(name, pairs[name])
            for work in works:
                progress(f"{model.name}: {work}, {', '.join(group)}")
                times.add(work, measure_work(pairs, work, turns.rounds, said, times.rounds(work, group[0])))

    for group in turns.groups(connectors):
        if group[0] in failures:
            continue
        try:
            measure_group(group)
        except KVFerryError as error:
            if group[0] == "kvferry":
                raise
            failures[group[0]] = str(error)
            times.remove(group[0])
    return Measured(times.found, failures)


@dataclass(slots=True)
class _Times:
    """Times of the counted rounds so far, by work and connector."""

    found: Found = field(default_factory=dict)

    def rounds(self, work: Work, name: str) -> int:
        return len(self.found.get(work, {}).get(name, ()))

    def remove(self, name: str) -> None:
        for times in self.found.values():
            times.pop(name, None)

    def add(self, work: Work, more: Mapping[str, tuple[Any, ...]]) -> None:
        known = self.found.setdefault(work, {})
        for name, times in more.items():
            known[name] = (*known.get(name, ()), *times)


def _cache_bytes(works: Sequence[Work]) -> int:
    """Return a size of the KV cache, in bytes, with room to spare.

    Requests that come together take about a quarter, which loads from one peer may hold (`late_blocks`).
    """
    most = max(one.longest * one.at_once for one in works)
    return max(256 << 20, most * (64 << 10)) + (256 << 20)


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


@dataclass(slots=True)
class FirstTokens:
    """The first tokens of all requests, by work and round, as the first pair gave them."""

    _known: dict[tuple[Any, int], tuple[str, Sequence[int]]] = field(default_factory=dict)

    def check(self, name: str, work: Work, number: int, tokens: Sequence[int]) -> None:
        """Compare tokens with those of the first pair that did the same work.

        Raises:
            TransferError: most of them differ.
        """
        first, known = self._known.setdefault((work, number), (name, tokens))
        equal = sum(a == b for a, b in zip(tokens, known, strict=True))
        # bfloat16 and batching may flip a token, so most of them must be equal, not all.
        if 2 * equal < len(tokens) and len(tokens) > 1:
            raise TransferError(f"{name} gave other first tokens than {first}")


def measure_work(
    pairs: Mapping[str, Pair], work: Work, rounds: int, said: FirstTokens | None = None, first: int = 0
) -> dict[str, tuple[Any, ...]]:
    """Do the same work with each pair in turn; return the times of the counted rounds by connector.

    Args:
        pairs: paused engines by the name of their connector.
        work: what to do in a round.
        rounds: number of counted rounds.
        said: first tokens of pairs that were measured before; mutated. None if there are none.
        first: number of counted rounds of these pairs before. Each round has prompts of its own.

    Raises:
        TransferError: a connector did not load a prompt, or two connectors gave unequal first tokens.
    """
    found: dict[str, list[Any]] = {name: [] for name in pairs}
    said = FirstTokens() if said is None else said
    for number in range(rounds + 1):
        for name in rotated(tuple(pairs), number):  # no connector always follows the same one
            with watched() as round_, pairs[name].running():
                times, tokens = work.run(name, pairs[name], first + number)
            if number:
                found[name].append(replace(times, conditions=round_.conditions))
            said.check(name, work, first + number, tokens)
    return {name: tuple(times) for name, times in found.items()}


def draw_prompt(tokens: int, seed: int) -> list[int]:
    """Return a prompt of random token ids, always the same for a seed."""
    drawn = random.Random(seed)  # noqa: S311 - no secret
    return [drawn.randrange(1, VOCABULARY) for _ in range(tokens)]
