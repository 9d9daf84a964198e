"""How long a scheduler's thread asks five sources of a long prompt (`sources`), whoever has how much of it.

Timed is what an engine's step waits for: what the connector does to say how many tokens could be loaded. A
request is asked for as it comes in, which is when its keys are digested, apart; then once, and again as in
every further step in which it waits. Every prompt that comes in is another one than that before it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from kvferry.bench.chunks import CHUNK_TOKENS
from kvferry.bench.sources import SLOW, Asker, Kept, chunks_of, model, request
from kvferry.bench.stats import percentile
from kvferry.engines.vllm.prompts import Prompts
from kvferry.errors import TransferError
from kvferry.geometry import GroupKind
from kvferry.geometry.canonical import Canonical

TARGET_SECONDS = 1e-3
KINDS = {
    "attention": (GroupKind.FULL,),
    "with windows and states": (GroupKind.FULL, GroupKind.SLIDING, GroupKind.STATE),
}
POLICIES = ("weight", "cost")
ALL, PARTS, PEER_ALONE = PLACES = ("all sources", "each a part", "the peer alone")

_PROMPTS = 8
_AGAIN = 3
_VOCABULARY = 128_000
_TIERS = 1 + len(SLOW)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of many calls.

    Attributes:
        median, p99: of all.
    """

    median: float
    p99: float

    @staticmethod
    def of(values: Sequence[float]) -> Times:
        """Of at least one value."""
        return Times(percentile(values, 50), percentile(values, 99))


@dataclass(frozen=True, slots=True)
class Asks:
    """Askings of one kind.

    Attributes:
        layers: of the model, of `KINDS`.
        policy: of `POLICIES`.
        place: who has the prompts, of `PLACES`.
        arriving: of a request; keys and the offer's tokens are digested.
        first, again: what a step waits for.
        parts: seconds by what takes them, of a first asking, the medians: finding chunks in the tiers, what follows for each tier,
            what two sources have together, and the rest: choosing, and telling what was chosen.
    """

    layers: str
    policy: str
    place: str
    arriving: Times
    first: Times
    again: Times
    parts: dict[str, float]


@dataclass(frozen=True, slots=True)
class Asking:
    """All that was measured.

    Attributes:
        tokens: of a prompt.
        known: chunks that each tier knows.
        rounds: requests of each kind.
        asks: by kind.
    """

    tokens: int
    known: tuple[int, ...]
    rounds: int
    asks: tuple[Asks, ...]

    @property
    def reached(self) -> bool:
        """Every step's wait is within the target, by the median."""
        return all(max(one.first.median, one.again.median) < TARGET_SECONDS for one in self.asks)


def measure(path: Path, tokens: int, rounds: int, progress: Callable[[str], None]) -> Asking:
    """Ask for prompts of every kind in turns.

    Args:
        path: folder for what names chunks, which is removed again.
        tokens: of a prompt, whole chunks.
        rounds: requests of each kind; one more comes before them that does not count.
        progress: told what is going on.

    Raises:
        TransferError: something else was offered than there is.
    """
    progress("making chunks to ask for")
    models = {name: model(name, kinds) for name, kinds in KINDS.items()}
    canonical = chunks_of(models["with windows and states"])
    draw = np.random.default_rng(17)
    prompts = {
        place: [draw.integers(0, _VOCABULARY, tokens).tolist() for _ in range(_PROMPTS)] for place in PLACES
    }
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="bench-", dir=path)))
        keys = [
            [
                key
                for place in PLACES
                for prompt in prompts[place]
                for key in _keys(canonical, prompt, place, tier)
            ]
            for tier in range(_TIERS)
        ]
        kept = Kept(stack, folder, canonical, keys)
        askers = {
            (name, policy): Asker(stack, of, kept, policy)
            for (name, of), policy in product(models.items(), POLICIES)
        }
        progress(f"asking for prompts of {tokens:,} tokens")
        found = defaultdict[tuple[str, str, str], list[_Took]](list)
        for number in range(rounds + 1):
            for (name, policy), place in product(askers, PLACES):
                prompt = prompts[place][number % _PROMPTS]
                took = _ask(askers[name, policy], f"{number} {place}", prompt, place)
                if number:
                    found[name, policy, place].append(took)
    return Asking(
        tokens, tuple(map(len, keys)), rounds, tuple(_asks(*kind, of) for kind, of in found.items())
    )


@dataclass(frozen=True, slots=True)
class _Took:
    """Seconds of one request."""

    arriving: float
    first: float
    again: tuple[float, ...]
    parts: dict[str, float]


def _keys(canonical: Canonical, prompt: list[int], place: str, tier: int) -> Iterator[bytes]:
    """Of what a tier has of a prompt."""
    chunks = Prompts(canonical).add(request("keys", prompt))
    assert chunks is not None
    count = len(prompt) // CHUNK_TOKENS
    for group, number in product(range(len(canonical.groups)), range(count)):
        if place == ALL or (place == PARTS and number * _TIERS // count == tier):
            yield chunks.key(group, number)


def _ask(asker: Asker, name: str, prompt: list[int], place: str) -> _Took:
    offered = len(prompt) // 2 if place == PARTS else len(prompt) - 1
    one = asker.request(name, prompt, offered)
    began = time.perf_counter()
    asker.admission.on_new_request(one)
    arrived = time.perf_counter()
    tokens = asker.admission.matched(one, 0)
    asked = time.perf_counter()
    if tokens is None or tokens < offered:
        raise TransferError(f"{tokens} tokens of a prompt are offered, of which a peer has {offered}")
    again = []
    for _ in range(_AGAIN):
        begins = time.perf_counter()
        asker.admission.matched(one, 0)
        again.append(time.perf_counter() - begins)
    asker.finished(name)
    return _Took(arrived - began, asked - arrived, tuple(again), {})


def _asks(layers: str, policy: str, place: str, took: Sequence[_Took]) -> Asks:
    return Asks(
        layers,
        policy,
        place,
        Times.of([one.arriving for one in took]),
        Times.of([one.first for one in took]),
        Times.of([seconds for one in took for seconds in one.again]),
        {},
    )
