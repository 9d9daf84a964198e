"""Coverage: how much of a prompt's prefix can be used, when every group has other parts of it at hand.

A prompt is cut in chunks from its first token on; the last one may be a shorter *tail*. Where a chunk ends is
a *boundary*. A prefix can be used up to a boundary if every group can continue there, that is, has at hand
what the next computed token will look at (`select.first_attended`) and the engine lacks:

- full attention and MLA: every chunk before the boundary;
- sliding window: the chunks with tokens of the next token's window; chunked-local: of its attention chunk;
- state: the snapshot at the boundary itself, and nothing else.

For every kind that is one run of chunks that ends at the boundary, so one question answers for all of them:
from which place does the slowest chunk between the first of the run and its last come? One that is nowhere
makes the boundary unusable, and without the slower places a prefix ends where nothing of them is needed.
Block sizes have no part in this.

Which boundaries may be used at all: the engine always computes the last prompt token itself, to sample from
it. Attention writes that token's content over what was loaded, which is the same, so a prefix may reach to
the end of the prompt; the next computed token is then the last one, and its window counts. A state *after*
the last token would take that token in twice: with a state group in the model, a prefix ends at
``prompt - 1`` at most (`farthest`), and a snapshot at the end of the prompt is of no use to that prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.errors import TransferError
from kvferry.geometry import GroupKind
from kvferry.planning.descriptors import Int64s
from kvferry.planning.select import LoadSpan, attends_to_all, first_attended, needed_tokens

Bools: TypeAlias = npt.NDArray[np.bool_]
TierNumbers: TypeAlias = npt.NDArray[np.int64]

NO_TIER = 1 << 16
"""Of a chunk that is in no place; places have numbers from 0 on, the fastest first."""


class GroupPattern(Protocol):
    """What decides how a group is continued; a `geometry.Group` and a `geometry.store.LayerCache` say it."""

    @property
    def kind(self) -> GroupKind:
        """What a continuation needs of the group."""

    @property
    def attention_span(self) -> int:
        """Window or attention chunk in tokens, else 0."""


@dataclass(frozen=True, slots=True)
class ChunkedPrompt:
    """A prompt that is looked up in chunks.

    Attributes:
        tokens: how much of it is looked up, from its start; not more than `prompt`. What is no whole chunk at
            the end is the tail.
        chunk_tokens: tokens of a chunk.
        prompt: tokens of the whole prompt.
        have: tokens that the engine has already, from the start, of every group; need not be on a boundary.
            Of a window it may have the last one only: a prefix that ends farther looks less far back.
        first: tokens that come from elsewhere, from the start, of groups that see everything; of other groups
            nothing does.
    """

    tokens: int
    chunk_tokens: int
    prompt: int
    have: int = 0
    first: int = 0

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1 or not 0 <= self.tokens <= self.prompt or min(self.have, self.first) < 0:
            raise TransferError(
                f"{self.tokens} of {self.prompt} tokens in chunks of {self.chunk_tokens}, {self.have} there"
            )

    @property
    def chunks(self) -> int:
        """How many chunks, the tail included."""
        return -(-self.tokens // self.chunk_tokens)

    @property
    def boundaries(self) -> Int64s:
        """Where the chunks end, in tokens; int64 of shape (chunks,), ascending."""
        ends = np.arange(1, self.chunks + 1, dtype=np.int64) * self.chunk_tokens
        return np.minimum(ends, self.tokens)


@dataclass(frozen=True, slots=True)
class Missing:
    """What keeps a group from continuing at a boundary.

    Attributes:
        group: its number.
        chunk: the first chunk that it lacks there; for a state group, the one whose end has no snapshot.
    """

    group: int
    chunk: int


@dataclass(frozen=True, slots=True, eq=False)
class Coverage:
    """How far a prefix can be used, and why not farther.

    Attributes:
        groups: all groups of the model.
        cut: the prompt.
        places: where chunks come from, int64 of shape (groups, `cut.chunks`).
        ends: the boundaries, in tokens; int64 of shape (`cut.chunks`,).
        usable: whether each may be used at all; bool of the same shape.
        slowest: by group, the slowest place that its run up to each boundary takes; int64 of the same shape.
        of_all: the slowest of all groups.
    """

    groups: Sequence[GroupPattern]
    cut: ChunkedPrompt
    places: TierNumbers
    ends: Int64s
    usable: Bools
    slowest: tuple[TierNumbers, ...]
    of_all: TierNumbers

    @property
    def tokens(self) -> int:
        """The longest usable prefix; `ChunkedPrompt.have` if there is nothing to gain."""
        return self.longest()[0]

    @property
    def alone(self) -> tuple[int, ...]:
        """How far each group could be used if the others had everything, in tokens."""
        return tuple(self._last(row, NO_TIER)[0] for row in self.slowest)

    @property
    def beginning(self) -> int:
        """Tokens from the start of which all is at hand that groups hold that see everything.

        Where it ends, other groups need something as well.
        """
        each = zip(self.groups, self.alone, strict=True)
        return min((tokens for group, tokens in each if attends_to_all(group.kind)), default=self.cut.have)

    @property
    def better(self) -> int | None:
        """The boundary that was closest to being usable, None if there is none.

        Of all beyond `tokens` that may be used, the one at which the fewest groups fail, and of those the
        nearest.
        """
        at = self._better()
        return None if at is None else int(self.ends[at])

    @property
    def missing(self) -> tuple[Missing, ...]:
        """Why `better` is not usable, for each group that fails there; empty if it is None."""
        at = self._better()
        if at is None:
            return ()
        end = int(self.ends[at])
        span, found = LoadSpan(self.cut.have, end, self.cut.prompt, (min(self.cut.first, end), end)), []
        for number, (group, slowest) in enumerate(zip(self.groups, self.slowest, strict=True)):
            if slowest[at] == NO_TIER:
                run = _chunks(needed_tokens(group.kind, group.attention_span, span), group.kind, self.cut)
                found.append(Missing(number, int(run[self.places[number, run].argmax()])))
        return tuple(found)

    def longest(self, before: int = NO_TIER) -> tuple[int, int]:
        """The longest usable prefix that takes nothing of a place or of slower ones.

        Args:
            before: the place, not the first.

        Returns:
            Tokens, `ChunkedPrompt.have` if there is nothing to gain, and the slowest place that they take.
        """
        return self._last(self.of_all, before)

    def after(self, first: int) -> int:
        """Return the tokens of the longest usable prefix, given another `ChunkedPrompt.first`."""
        return _covered(self.groups, replace(self.cut, first=first), self.places, self).tokens

    def _last(self, slowest: TierNumbers, before: int) -> tuple[int, int]:
        good = (self.usable & (slowest < before)).nonzero()[0]
        return (int(self.ends[good[-1]]), int(slowest[good[-1]])) if len(good) else (self.cut.have, 0)

    def _better(self) -> int | None:
        """Number of the chunk that ends at `better`."""
        beyond = (self.usable & (self.ends > self.tokens)).nonzero()[0]
        if not len(beyond):
            return None
        failing = sum((row[beyond] >= NO_TIER).view(np.uint8) for row in self.slowest)
        return int(beyond[np.argmin(failing)])


def longest_usable_prefix(groups: Sequence[GroupPattern], prompt: int) -> int:
    """The longest prefix of a prompt that may be used at all, in tokens."""
    return max(prompt - any(group.kind is GroupKind.STATE for group in groups), 0)


def coverage(groups: Sequence[GroupPattern], cut: ChunkedPrompt, places: TierNumbers) -> Coverage:
    """How far every group can continue.

    Args:
        groups: all groups of the model.
        cut: the prompt.
        places: where a group's content of a chunk comes from, int64 of shape (groups, `cut.chunks`);
            `NO_TIER` if it is not at hand. For a state group, the snapshot at the chunk's end. Chunks inside
            `cut.have` need not be at hand, a snapshot at the end must be. For attention, a longer chunk that
            begins with the tail serves as one.

    Raises:
        TransferError: `places` is of another shape, or there is no group.

    >>> from kvferry.geometry.store import LayerCache
    >>> full, state = LayerCache(GroupKind.FULL, 0, ()), LayerCache(GroupKind.STATE, 0, ())
    >>> found = np.array([[0, 0, 1, NO_TIER], [NO_TIER, 0, NO_TIER, 0]])
    >>> both = coverage([full, state], ChunkedPrompt(tokens=1024, chunk_tokens=256, prompt=1025), found)
    >>> both.longest(), both.alone, both.better, both.missing
    ((512, 0), (768, 1024), 768, (Missing(group=1, chunk=2),))
    """
    if not groups or places.shape != (len(groups), cut.chunks) or places.dtype != np.int64:
        raise TransferError(
            f"places of chunks are {places.dtype} of shape {places.shape}, not int64 of ({len(groups)}, "
            f"{cut.chunks}): groups of the model, chunks of the prompt"
        )
    return _covered(groups, cut, places)


def _covered(
    groups: Sequence[GroupPattern], cut: ChunkedPrompt, places: TierNumbers, before: Coverage | None = None
) -> Coverage:
    """Compute `coverage`.

    `before` is a coverage that differs in `ChunkedPrompt.first` alone; rows that do not depend on it are
    kept.
    """
    ends = cut.boundaries if before is None else before.ends
    usable = ends > max(cut.have, cut.first)
    if cut.tokens > longest_usable_prefix(groups, cut.prompt):
        usable[-1:] = False
    slowest = tuple(
        _slowest(group, cut, ends, row)
        if before is None or attends_to_all(group.kind)
        else before.slowest[number]
        for number, (group, row) in enumerate(zip(groups, places, strict=True))
    )
    return Coverage(groups, cut, places, ends, usable, slowest, reduce(np.maximum, slowest))


def chunks_to_load(
    groups: Sequence[GroupPattern], cut: ChunkedPrompt, tokens: int, part: tuple[int, int] | None = None
) -> tuple[Int64s, ...]:
    """The chunks of each group that a prefix of `tokens` takes, beyond what the engine has.

    Args:
        groups: all groups of the model.
        cut: the prompt.
        tokens: a boundary, or `cut.have` or less, which takes none.
        part: of the prefix, as of `LoadSpan`: `tokens` may lie anywhere if it ends before.

    Returns:
        Numbers of chunks, int64, ascending, per group; of a state group, the one whose end has the snapshot.

    Raises:
        TransferError: there is no boundary at `tokens`, or it lies beyond the farthest that may be used.
    """
    if tokens <= cut.have:
        return tuple(np.zeros(0, np.int64) for _ in groups)
    span = LoadSpan(cut.have, tokens, cut.prompt, part)
    whole = span.ends == tokens
    on_boundary = not whole or tokens == cut.tokens or tokens % cut.chunk_tokens == 0
    if not on_boundary or span.ends > min(cut.tokens, longest_usable_prefix(groups, cut.prompt)):
        raise TransferError(
            f"a prefix of {span.ends} tokens ends on no boundary of {cut.tokens} tokens in chunks of "
            f"{cut.chunk_tokens}, or beyond the {longest_usable_prefix(groups, cut.prompt)} that may be used"
        )
    return tuple(
        _chunks(needed_tokens(group.kind, group.attention_span, span), group.kind, cut) for group in groups
    )


def _chunks(tokens: tuple[int, int], kind: GroupKind, cut: ChunkedPrompt) -> Int64s:
    """Numbers of the chunks that tokens ``[low, high)`` lie in; of a state, the last alone."""
    low, high = tokens
    if low >= high:
        return np.zeros(0, np.int64)
    first = high - 1 if kind is GroupKind.STATE else low
    return np.arange(first // cut.chunk_tokens, -(-high // cut.chunk_tokens), dtype=np.int64)


_NONE = np.zeros(1, np.int64)


def _slowest(group: GroupPattern, cut: ChunkedPrompt, ends: Int64s, places: TierNumbers) -> TierNumbers:
    """The slowest place of the run of chunks that a group takes up to each boundary, 0 if it takes none.

    As `select.needed_tokens`, for all boundaries at once.
    """
    if group.kind is GroupKind.STATE:
        return places
    if attends_to_all(group.kind):
        run = places.copy()
        run[: max(cut.have, cut.first) // cut.chunk_tokens] = 0
        return np.maximum.accumulate(run, out=run)
    computed, after = np.minimum(ends, cut.prompt - 1), np.arange(1, len(ends) + 1)
    low = np.maximum(first_attended(group.kind, group.attention_span, computed), cut.have)
    bounds = np.empty((len(ends), 2), np.int64)
    bounds[:, 0], bounds[:, 1] = np.where(low < ends, low // cut.chunk_tokens, after), after
    found = np.maximum.reduceat(np.concatenate((places, _NONE)), bounds.ravel())[::2]
    return found * (low < ends)
