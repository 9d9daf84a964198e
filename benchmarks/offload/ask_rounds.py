"""Measure the time to query a peer and four tiers for a prompt, for several distributions of its chunks.

The time is that for which an engine's step waits for the connector, until it returns the number of tokens
that can be loaded. The scheduler queries for a request first in the step that would admit it, and again in
every step in which the request waits. The chunks' keys are digested when the request arrives; that time is
reported separately. The peer's ticket (the random id that claims the lease on its blocks) is redeemed before
the measured time begins. No prompt is used twice in a row.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal

import numpy as np

from benchmarks.offload.asking import SHARES, AskResults, AskTimes, CallTimes
from benchmarks.offload.sources import SLOW, AskingScheduler, KnownChunks, chunks_of, model
from kvferry.cache.prompt_chunks import PromptChunks
from kvferry.common.errors import TransferError
from kvferry.geometry import GroupKind
from kvferry.geometry.canonical import CanonicalForm
from kvferry.keys.chunk import ChunkKeys
from kvferry.tools.bench.rank_chunks import CHUNK_TOKENS

LAYERS = {
    "attention": (GroupKind.FULL,),
    "hybrid": (GroupKind.FULL, GroupKind.SLIDING, GroupKind.STATE),
}
POLICIES: Final[tuple[Literal["weight", "cost"], ...]] = ("weight", "cost")
ALL, EACH, PEER = PLACES = ("all five", "each a part", "the peer")

_PROMPTS, _AGAIN = 8, 3
_VOCABULARY = 128_000
_TIERS = 1 + len(SLOW)
# The tiers compute an offer of a part (`_part_bid`) only if another source offers the other part.
_SHARE_OF = {"tier_numbers": 0, "ask": 1, "_part_bid": 2}


def measure(path: Path, tokens: int, rounds: int, progress: Callable[[str], None]) -> AskResults:
    """Query for prompts of every kind, and return the times.

    Args:
        path: folder for empty files with the names of chunks. The files are removed.
        tokens: length of the longest prompt. The others are a little shorter, so that no two of a kind have
            the same chunks.
        rounds: number of requests of each kind whose total is timed, and of as many whose parts are timed.
            One more of each comes first and is not counted.
        progress: function that is called with a line of text before each step.

    Raises:
        TransferError: the sources offered fewer tokens than they have.
    """
    progress("making chunks to ask for")
    models = {name: model(name, kinds) for name, kinds in LAYERS.items()}
    canonical = chunks_of(models["hybrid"])
    draw = np.random.default_rng(17)
    prompts = {
        place: [draw.integers(0, _VOCABULARY, tokens - n).tolist() for n in range(_PROMPTS)]
        for place in PLACES
    }
    keys: list[list[bytes]] = [[] for _ in range(_TIERS)]
    for place in (ALL, EACH):
        for prompt in prompts[place]:
            _keep(canonical, prompt, place, keys)
    found = defaultdict[tuple[str, str, str], list[_AskSeconds]](list)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="bench-", dir=path)))
        kept = KnownChunks(stack, folder, canonical, keys)
        askers = {
            (name, policy): AskingScheduler(stack, models[name], kept, policy)
            for name, policy in product(LAYERS, POLICIES)
        }
        progress(f"asking for prompts of {tokens:,} tokens")
        for number, asker, place in product(range(2 * rounds + 2), askers, PLACES):
            prompt = prompts[place][number // 2 % _PROMPTS]
            took = _ask(askers[asker], f"{number} {place}", prompt, place, timed=number % 2 > 0)
            if number > 1:
                found[*asker, place].append(took)
    asks = tuple(_asks(*kind, took) for kind, took in found.items())
    return AskResults(
        tokens=tokens, chunks=tokens // CHUNK_TOKENS, known=tuple(map(len, keys)), rounds=rounds, asks=asks
    )


@dataclass(frozen=True, slots=True)
class _AskSeconds:
    """The times of one request in seconds: its arrival, the first query and later queries.

    `shares` has the time of each part of the first query, by `SHARES`; None if the parts were not timed.
    """

    arriving: float
    first: float
    again: tuple[float, ...]
    shares: tuple[float, ...] | None


def _keep(canonical: CanonicalForm, prompt: list[int], place: str, keys: list[list[bytes]]) -> None:
    """Add the keys of a prompt's chunks to those of the tiers that hold them. Mutates `keys`.

    Args:
        canonical: format of the chunks.
        prompt: token ids of the prompt.
        place: distribution of the chunks, one of `PLACES`.
        keys: keys by tier.
    """
    chunks, count = (
        PromptChunks(canonical.groups, ChunkKeys(CHUNK_TOKENS, prompt)),
        len(prompt) // CHUNK_TOKENS,
    )
    for group, number in product(range(len(canonical.groups)), range(count)):
        for tier in range(_TIERS) if place == ALL else (number * _TIERS // count,):
            keys[tier].append(chunks.key(group, number))


def _ask(asker: AskingScheduler, name: str, prompt: list[int], place: str, *, timed: bool) -> _AskSeconds:
    offered = len(prompt) // 2 if place == EACH else len(prompt) - 1
    one = asker.request(name, prompt, offered)
    times = [time.perf_counter()]
    asker.admission.on_new_request(one)
    arriving = time.perf_counter() - times[0]
    asker.wait_redeemed(one)
    times = [time.perf_counter()]
    with _shares(asker) if timed else nullcontext() as inside:
        tokens = asker.admission.matched(one, 0)
        times.append(time.perf_counter())
    for _ in range(_AGAIN):
        asker.admission.matched(one, 0)
        times.append(time.perf_counter())
    asker.finished(name)
    if tokens is None or tokens < offered:
        raise TransferError(f"{tokens} tokens are offered of a prompt of which a peer alone has {offered}")
    first, *again = np.diff(times).tolist()
    shares = None if inside is None else (*inside, first - sum(inside))
    return _AskSeconds(arriving, first, tuple(again), shares)


@contextmanager
def _shares(asker: AskingScheduler) -> Iterator[list[float]]:
    """Yield the seconds of each part of admission, for all `SHARES` but the last. They are updated by calls.

    The time of a nested call counts only for the inner call.
    """
    seconds, inner = [0.0] * (len(SHARES) - 1), [0.0]

    def timed(call: Callable[..., Any], share: int, *args: Any, **named: Any) -> Any:
        before, inner[0], began = inner[0], 0.0, time.perf_counter()
        try:
            return call(*args, **named)
        finally:
            took = time.perf_counter() - began
            seconds[share] += took - inner[0]
            inner[0] = before + took

    askers = (asker.cache, *asker.sources)
    owners = [(owner, name) for owner in askers for name in _SHARE_OF if hasattr(owner, name)]
    for owner, name in owners:
        setattr(owner, name, partial(timed, getattr(owner, name), _SHARE_OF[name]))
    try:
        yield seconds
    finally:
        for owner, name in owners:
            delattr(owner, name)


def _asks(layers: str, policy: str, place: str, took: Sequence[_AskSeconds]) -> AskTimes:
    whole = [one for one in took if one.shares is None]
    return AskTimes(
        layers=layers,
        policy=policy,
        place=place,
        arriving=CallTimes.of([one.arriving for one in took]),
        first=CallTimes.of([one.first for one in whole]),
        again=CallTimes.of([seconds for one in took for seconds in one.again]),
        shares=tuple(np.median([one.shares for one in took if one.shares], axis=0).tolist()),
    )
