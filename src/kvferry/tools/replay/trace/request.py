"""One request of a trace, and identities of its content."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.errors import ConfigError

# Identities of content, uint64. Equal identities mean equal tokens.
Ids: TypeAlias = npt.NDArray[np.uint64]

_GOLDEN, _FIRST, _SECOND = (
    np.uint64(value) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
# Number of a unit that no request has.
_BEYOND = 1 << 62


@dataclass(frozen=True, slots=True)
class RecordedHits:
    """Prompt tokens that an engine found in its own prefix cache, and loaded from each tier by name."""

    local_tokens: int
    loaded_tokens: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceRequest:
    """A request of a trace. Its content is divided into units of equal length.

    Attributes:
        arrival: seconds from the start of the trace to the arrival of the request.
        prompt_tokens: length of the prompt in tokens, at least 1.
        output_tokens: number of generated tokens.
        prefix_ids: identity of the prefix that ends at each whole unit, uint64 of shape (units,). Equal
            identities mean that all tokens so far are equal. The units may include generated tokens.
        prompt_id: identity of the whole prompt. Used only if the prompt ends inside a unit.
        session: name of the conversation that the request belongs to; empty if unknown.
        recorded: cache hits of the engine that recorded the trace; None for other traces.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    unit_tokens: int
    prefix_ids: Ids
    prompt_id: int
    session: str = ""
    recorded: RecordedHits | None = None

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 0 or self.unit_tokens < 1:
            raise ConfigError(
                f"a request has {self.prompt_tokens} prompt tokens, {self.output_tokens} output tokens, units"
                f" of {self.unit_tokens} tokens; prompts and units have at least 1"
            )
        if len(self.prefix_ids) < self.prompt_tokens // self.unit_tokens:
            raise ConfigError(
                f"a prompt of {self.prompt_tokens} tokens has {len(self.prefix_ids)} identities for units of "
                f"{self.unit_tokens}; give one for each whole unit"
            )


def identity(text: str) -> int:
    """Return an identity for a name: the first 64 bits of its BLAKE2b digest."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def mixed(values: Ids) -> Ids:
    """Return a digest of each value: the finalizer of SplitMix64, a bijection without visible pattern.

    Source: Guy Steele, Doug Lea, Christine Flood, "Fast splittable pseudorandom number generators", OOPSLA
    2014.
    """
    found = values + _GOLDEN
    found = (found ^ (found >> _SHIFTS[0])) * _FIRST
    found = (found ^ (found >> _SHIFTS[1])) * _SECOND
    return found ^ (found >> _SHIFTS[2])


def chained(ids: npt.ArrayLike) -> Ids:
    """Return identities of prefixes, uint64, from the identity of each unit's own content.

    Each result depends on all units up to its own and on their order.

    >>> first, second = chained([7, 8, 9]), chained([7, 9, 9])
    >>> (first == second).tolist()
    [True, False, False]
    """
    own = np.asarray(ids).astype(np.uint64)
    return chained_each(own, np.array([len(own)]))


def chained_each(ids: Ids, counts: npt.NDArray[np.int64]) -> Ids:
    """Return what `chained` returns for each of several requests, in one array.

    >>> both = chained_each(np.array([7, 8, 7], np.uint64), np.array([2, 1]))
    >>> both.tolist() == [*chained([7, 8]).tolist(), *chained([7]).tolist()]
    True

    Args:
        ids: identity of each unit's own content, of all requests one after the other, shape (units,).
        counts: number of units of each request, int64 of shape (requests,).
    """
    # One array for many short requests takes a tenth of the time.
    places = places_within(counts) + 1
    sums = mixed(mixed(ids) + places.astype(np.uint64) * _FIRST).cumsum(dtype=np.uint64)
    earlier = np.concatenate([np.zeros(1, np.uint64), sums])[counts.cumsum() - counts]
    found: Ids = sums - np.repeat(earlier, counts)
    return found


def places_within(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the place of each element in its group, counted from 0, for groups one after the other.

    >>> places_within(np.array([2, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    starts = counts.cumsum() - counts
    return np.arange(counts.sum(), dtype=np.int64) - np.repeat(starts, counts)


def chunk_ids(requests: Sequence[TraceRequest], chunk_tokens: int, counts: npt.NDArray[np.int64]) -> Ids:
    """Return the identities of the first whole chunks of each request, uint64, in one array.

    A chunk that ends inside the prompt's incomplete last unit depends on the whole prompt.

    Args:
        requests: requests of one trace.
        counts: number of chunks of each request, int64 of shape (requests,).
    """
    # A chunk's identity covers the unit in which it ends. So equal chunks have different identities if their
    # prompts differ later in that unit, and the replay counts too few hits, unless units divide chunks.
    unit = requests[0].unit_tokens
    ends = (places_within(counts) + 1) * chunk_tokens
    units = (ends - 1) // unit
    found = _prefix_ids(requests, np.arange(len(requests)).repeat(counts), units)
    found += ((units + 1) * unit - ends).astype(np.uint64) * _SECOND
    return found


def tail_ids(requests: Sequence[TraceRequest], chunk_tokens: int, tokens: npt.NDArray[np.int64]) -> Ids:
    """Return the identity of the incomplete last chunk of each request's first tokens, uint64.

    Args:
        tokens: number of tokens from the start of each request, int64 of shape (requests,); at most its
            prompt. An identity means nothing where this is a multiple of `chunk_tokens`.
    """
    unit = requests[0].unit_tokens
    units = (tokens - 1) // unit
    whole = np.array([request.prompt_tokens // unit for request in requests])
    units[units >= whole] = _BEYOND
    known = _prefix_ids(requests, np.arange(len(requests)), units)
    found: Ids = mixed(mixed(known ^ (tokens % chunk_tokens).astype(np.uint64)) + tokens.astype(np.uint64))
    return found


def _prefix_ids(
    requests: Sequence[TraceRequest], owners: npt.NDArray[np.int64], units: npt.NDArray[np.int64]
) -> Ids:
    """Return the identity of each prefix that ends at a unit; of the whole prompt if the unit is unknown.

    Args:
        owners: index of the request of each prefix, int64 of shape (prefixes,).
        units: number of the unit at whose end each prefix ends, int64 of shape (prefixes,).
    """
    each = [request.prefix_ids for request in requests]
    prompts = np.array([request.prompt_id for request in requests], np.uint64)
    known = np.array([len(ids) for ids in each])
    places = np.where(units < known[owners], (known.cumsum() - known)[owners] + units, known.sum() + owners)
    found: Ids = np.concatenate([*each, prompts])[places]
    return found
