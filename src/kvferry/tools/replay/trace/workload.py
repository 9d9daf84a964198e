"""Made-up content for requests of which only the lengths are known, and traces that are made up altogether.

These are of users who hold conversations. A text such as ``users=500,turns=6,hours=0.5`` describes them.
Left-out numbers have the defaults of `Workload`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from kvferry.common.errors import ConfigError
from kvferry.common.units import parse_count
from kvferry.tools.replay.trace.base import (
    BATCH_REQUESTS,
    MAX_TOKENS,
    Ids,
    Trace,
    TraceRequest,
    batches,
    identity,
    mixed,
    places_within,
)

# Pattern of the texts that describe a workload.
DESCRIBED = re.compile(r"[a-z-]+=[^/]*")

_BATCH_REQUESTS = 4096
_SECONDS_PER_HOUR = 3600
_SIGMA = 1.0
_BOUNDS = {
    "users": (1, 10_000_000),
    "requests_per_second": (1e-6, 1e6),
    "shared_prompt_tokens": (0, MAX_TOKENS),
    "turns": (1, MAX_TOKENS),
    "prompt_tokens": (1, MAX_TOKENS),
    "output_tokens": (1, MAX_TOKENS),
    "hours": (0, 3e5),
    "seed": (0, (1 << 64) - 1),
    "unit_tokens": (1, MAX_TOKENS),
}


class Passage(NamedTuple):
    """The tokens of a request from `first_token` on, up to the next passage or to the end of the request.

    They are the tokens of the text with this seed (uint64) at the same positions.
    """

    first_token: int
    seed: int


class Outline(NamedTuple):
    """A request with passages in place of identities. The first passage begins at token 0."""

    arrival: float
    prompt_tokens: int
    output_tokens: int
    passages: Sequence[Passage]
    session: str = ""
    tenant: str = ""


def text_units(seed: int, first_unit: int, last_unit: int) -> Ids:
    """Return identities of the prefixes of a text that end at its units from the first to before the last."""
    start = mixed(np.array([seed], np.uint64))
    found: Ids = mixed(start + np.arange(first_unit, last_unit, dtype=np.uint64))
    return found


def text_prompt(seed: int, tokens: int) -> int:
    """Return the identity of a prompt of so many tokens of a text, which may end inside a unit."""
    return int(_prompts([seed], [tokens])[0])


def _prompts(seeds: Sequence[int], tokens: Sequence[int]) -> Ids:
    # Mixed once more than units, so that a number of tokens and a number of units never agree.
    found: Ids = mixed(mixed(mixed(np.array(seeds, np.uint64))) + np.array(tokens, np.uint64))
    return found


def write_out(
    outlines: Iterable[Outline], unit_tokens: int, batch_requests: int = BATCH_REQUESTS
) -> Iterator[TraceRequest]:
    """Give requests the identities of their content. They cover the generated tokens too.

    >>> first = Outline(0.0, 40, 8, [Passage(0, seed=1)])
    >>> longer = Outline(1.0, 64, 0, [Passage(0, seed=1)])
    >>> other = Outline(2.0, 64, 0, [Passage(0, seed=1), Passage(40, seed=2)])
    >>> ids = [request.prefix_ids.tolist() for request in write_out([first, longer, other], 16)]
    >>> ids[1][:3] == ids[0], ids[2][:2] == ids[0][:2], ids[2][2] in ids[1]
    (True, True, False)
    """
    for batch in batches(
        outlines,
        lambda each: (each.prompt_tokens + each.output_tokens) // unit_tokens,
        max_items=batch_requests,
    ):
        yield from _written(batch, unit_tokens)


def _written(batch: Sequence[Outline], unit_tokens: int) -> Iterator[TraceRequest]:
    # A text always follows the same passages, so the text at the end of a prefix identifies the whole prefix.
    seeds: list[int] = []
    first_units: list[int] = []
    counts: list[int] = []
    last_seeds: list[int] = []
    totals: list[int] = []
    for outline in batch:
        total = (outline.prompt_tokens + outline.output_tokens) // unit_tokens
        firsts = [passage.first_token // unit_tokens for passage in outline.passages]
        first_units += firsts
        counts += [end - start for start, end in pairwise([*firsts, total])]
        seeds += [passage.seed for passage in outline.passages]
        last_seeds.append(
            next(p.seed for p in reversed(outline.passages) if p.first_token < outline.prompt_tokens)
        )
        totals.append(total)
    repeats = np.array(counts)
    starts = mixed(np.array(seeds, np.uint64)) + np.array(first_units, np.uint64)
    prefixes = mixed(np.repeat(starts, repeats) + places_within(repeats).astype(np.uint64))
    prompts = _prompts(last_seeds, [outline.prompt_tokens for outline in batch]).tolist()
    for outline, prompt_id, end, total in zip(batch, prompts, accumulate(totals), totals, strict=True):
        yield TraceRequest(
            arrival=outline.arrival,
            prompt_tokens=outline.prompt_tokens,
            output_tokens=outline.output_tokens,
            unit_tokens=unit_tokens,
            prefix_ids=prefixes[end - total : end],
            prompt_id=prompt_id,
            session=outline.session,
            tenant=outline.tenant,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Users who hold conversations with a model.

    The users are independent of each other, and the time between two requests of a user is exponentially
    distributed, so all requests together arrive as a Poisson process. After the last turn of a conversation,
    its user begins another one.

    A prompt consists of the shared prompt, all earlier turns of the conversation, and new text. Two
    conversations have nothing but the shared prompt in common. The lengths of new texts and outputs are
    log-normally distributed with sigma 1: half of them are shorter than 0.61 times the mean, and 1 in 20 is
    longer than 3.1 times the mean.

    In this example, each of two users asks twice. The session is the number of the user and the number of the
    conversation.

    >>> workload = Workload(
    ...     users=2, requests_per_second=0.5, shared_prompt_tokens=64, turns=3, prompt_tokens=100,
    ...     output_tokens=50, hours=14.3 / 3600, seed=1,
    ... )
    >>> requests = list(workload.requests())
    >>> for each in requests:
    ...     print(f"{each.arrival:4.1f} s  {each.session}  {each.prompt_tokens:3} {each.output_tokens:3}")
     2.1 s  1-0  189   5
     2.8 s  1-0  290  38
    13.5 s  0-1  231 102
    14.2 s  0-1  397  21

    The first request has 194 tokens, which are 12 whole units. The second one begins with all of them. The
    other user's first request begins with the 4 units of the shared prompt:

    >>> first, second, other, _ = [request.prefix_ids[:12] for request in requests]
    >>> int((second == first).sum()), int((other == first).sum())
    (12, 4)

    Raises:
        ConfigError: a number is out of bounds.
    """

    users: int = 1000
    requests_per_second: float = 10.0  # mean number of all users together
    # Number of tokens with which every prompt begins, such as a system prompt.
    shared_prompt_tokens: int = 1000
    turns: int = 5
    prompt_tokens: int = 500  # mean number of new tokens of each prompt
    output_tokens: int = 300
    hours: float = 0.5
    # Seed of all random numbers. With the same release of NumPy, equal workloads give equal requests.
    seed: int = 0
    unit_tokens: int = 16

    def __post_init__(self) -> None:
        for name, (least, most) in _BOUNDS.items():
            found = getattr(self, name)
            if not least <= found <= most:
                raise ConfigError(f"workload: {name} is {found}; give a number from {least:,} to {most:,}")
        longest = self.shared_prompt_tokens + self.turns * (self.prompt_tokens + self.output_tokens)
        if longest > MAX_TOKENS:
            raise ConfigError(
                f"workload: {self.turns} turns take {longest:,} tokens, and a conversation has at most "
                f"{MAX_TOKENS:,}; lower the number of turns, or of tokens in each"
            )

    def requests(self) -> Iterator[TraceRequest]:
        return write_out(self._outlines(), self.unit_tokens)

    def _outlines(self) -> Iterator[Outline]:
        generator = np.random.default_rng(self.seed)
        conversations: dict[int, _Conversation] = {}
        begun = 0
        start = 0.0
        while True:
            gaps = generator.exponential(1 / self.requests_per_second, _BATCH_REQUESTS)
            arrivals = start + gaps.cumsum()
            users = generator.integers(self.users, size=_BATCH_REQUESTS)
            added = _lengths(generator, self.prompt_tokens)
            outputs = _lengths(generator, self.output_tokens)
            for arrival, user, new_tokens, output_tokens in zip(
                arrivals.tolist(), users.tolist(), added, outputs, strict=True
            ):
                if arrival >= self.hours * _SECONDS_PER_HOUR:
                    return
                if user not in conversations:
                    conversations[user] = self._begin(user, begun)
                    begun += 1
                session, passages, turns, tokens = conversations.pop(user)
                prompt_tokens = tokens + new_tokens
                yield Outline(arrival, prompt_tokens, output_tokens, passages, session)
                if turns > 1:
                    tokens = prompt_tokens + output_tokens
                    conversations[user] = _Conversation(session, passages, turns - 1, tokens)
            start = float(arrivals[-1])

    def _begin(self, user: int, number: int) -> _Conversation:
        passages = (
            Passage(0, identity(f"shared prompt of {self.seed}")),
            Passage(self.shared_prompt_tokens, identity(f"conversation {number} of {self.seed}")),
        )
        return _Conversation(f"{user}-{number}", passages, self.turns, self.shared_prompt_tokens)


class _Conversation(NamedTuple):
    """A conversation between two requests: what it contains, and how many turns are to come."""

    session: str
    passages: tuple[Passage, ...]
    turns: int
    tokens: int


class WorkloadTrace(Trace):
    """The requests of a workload described by a text. A position is a time in seconds."""

    def __init__(self, description: str, unit_tokens: int | None) -> None:
        given = {} if unit_tokens is None else {"unit_tokens": unit_tokens}
        self._workload = Workload(**{**_parse(description), **given})
        self.name = "a described workload"
        self.unit_tokens = self._workload.unit_tokens
        self.length = self._workload.hours * _SECONDS_PER_HOUR
        self.header = {}
        self._arrival = 0.0

    def __iter__(self) -> Iterator[TraceRequest]:
        for request in self._workload.requests():
            self._arrival = request.arrival
            yield request

    def position(self) -> float:
        return self._arrival


def _parse(description: str) -> dict[str, Any]:
    kinds = {field.name.replace("_", "-"): field for field in fields(Workload) if field.name != "unit_tokens"}
    found: dict[str, Any] = {}
    for part in description.split(","):
        name, _, value = part.partition("=")
        if name not in kinds:
            raise ConfigError(f"workload: {part!r} is not known; give NAME=VALUE of {', '.join(kinds)}")
        field = kinds[name]
        try:
            found[field.name] = float(value) if field.type == "float" else parse_count(value)
        except ValueError:
            raise ConfigError(
                f"workload: {name} is {value!r}; give a number, such as {field.default}"
            ) from None
    return found


def _lengths(generator: np.random.Generator, mean: int) -> list[int]:
    """Draw lengths of texts, at least 1, in tokens."""
    # The mean of a log-normal distribution is exp(mu + sigma²/2).
    drawn = generator.lognormal(np.log(mean) - _SIGMA**2 / 2, _SIGMA, _BATCH_REQUESTS)
    lengths: list[int] = np.maximum(drawn.round(), 1).astype(np.int64).tolist()
    return lengths
