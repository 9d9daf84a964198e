"""Coverage: how much of a prompt's prefix can be used, when every group has other parts of it at hand.

A prompt is cut in chunks from its first token on; the last one may be a shorter *tail*. Where a chunk ends is
a *boundary*. A prefix can be used up to a boundary if every group can continue there, that is, has at hand
what the next computed token will look at (`select.first_seen`) and the engine lacks:

- full attention and MLA: every chunk before the boundary;
- sliding window: the chunks with tokens of the next token's window; chunked-local: of its attention chunk;
- state: the snapshot at the boundary itself, and nothing else.

For every kind that is one run of chunks that ends at the boundary, so one question answers for all of them:
is any chunk missing between the first of the run and its last? Running counts of missing chunks answer it for
all boundaries at once. Block sizes have no part in this.

Which boundaries may be used at all: the engine always computes the last prompt token itself, to sample from
it. Attention writes that token's content over what was loaded, which is the same, so a prefix may reach to
the end of the prompt; the next computed token is then the last one, and its window counts. A state *after*
the last token would take that token in twice: with a state group in the model, a prefix ends at
``prompt - 1`` at most (`farthest`), and a snapshot at the end of the prompt is of no use to that prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.errors import TransferError
from kvferry.geometry import GroupKind
from kvferry.planning.pieces import Int64s
from kvferry.planning.select import Span, first_seen, needed, sees_all

Bools: TypeAlias = npt.NDArray[np.bool_]


class Continued(Protocol):
    """What decides how a group is continued; a `geometry.Group` and a `geometry.store.LayerStore` say it."""

    @property
    def kind(self) -> GroupKind:
        """What a continuation needs of the group."""

    @property
    def reach(self) -> int:
        """Window or attention chunk in tokens, else 0."""


@dataclass(frozen=True, slots=True)
class Cut:
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


@dataclass(frozen=True, slots=True)
class Coverage:
    """How far a prefix can be used, and why not farther.

    Attributes:
        tokens: the usable prefix; `Cut.have` if there is nothing to gain.
        alone: how far each group could be used if the others had everything, in tokens.
        better: the boundary that was closest to being usable: of all beyond `tokens` that may be used, the
            one at which the fewest groups fail, and of those the nearest; None if there is none.
        missing: why it was not, for each group that fails there; empty if `better` is None.
    """

    tokens: int
    alone: tuple[int, ...]
    better: int | None
    missing: tuple[Missing, ...]


def farthest(groups: Sequence[Continued], prompt: int) -> int:
    """The longest prefix of a prompt that may be used at all, in tokens."""
    return _farthest([group.kind for group in groups], prompt)


def _farthest(kinds: Sequence[GroupKind], prompt: int) -> int:
    return max(prompt - (GroupKind.STATE in kinds), 0)


def coverage(groups: Sequence[Continued], cut: Cut, at_hand: Bools) -> Coverage:
    """The longest prefix from which every group can continue.

    Args:
        groups: all groups of the model.
        cut: the prompt.
        at_hand: whether a group has the content of a chunk, bool of shape (groups, `cut.chunks`); for a state
            group, whether it has the snapshot at the chunk's end. Chunks inside `cut.have` need not be at
            hand, a snapshot at the end must be. For attention, a longer chunk that begins with the tail
            serves as one.

    Raises:
        TransferError: `at_hand` is of another shape, or there is no group.

    >>> from kvferry.geometry.store import LayerStore
    >>> full, state = LayerStore(GroupKind.FULL, 0, ()), LayerStore(GroupKind.STATE, 0, ())
    >>> found = np.array([[True, True, True, False], [False, True, False, True]])
    >>> coverage([full, state], Cut(tokens=1024, chunk_tokens=256, prompt=1025), found)
    Coverage(tokens=512, alone=(768, 1024), better=768, missing=(Missing(group=1, chunk=2),))
    """
    if not groups or at_hand.shape != (len(groups), cut.chunks) or at_hand.dtype != np.bool_:
        raise TransferError(
            f"what is at hand is {at_hand.dtype} of shape {at_hand.shape}, not bool of ({len(groups)}, "
            f"{cut.chunks}): groups of the model, chunks of the prompt"
        )
    ends, usable, first = _runs(tuple((group.kind, group.reach) for group in groups), cut)
    lacks = _lacking(at_hand, first)
    failing = np.add.reduce(lacks, axis=0, dtype=np.int64)
    rows = np.vstack([failing == 0, ~lacks]) & usable
    tokens, *alone = _last(ends, rows, cut.have)
    beyond = np.flatnonzero(usable & (ends > tokens))
    if not len(beyond):
        return Coverage(tokens, tuple(alone), None, ())
    better = int(beyond[failing[beyond].argmin()])
    missing = []
    for group in np.flatnonzero(lacks[:, better]).tolist():
        begin = int(first[group][better])
        missing.append(Missing(group, begin + int(at_hand[group, begin : better + 1].argmin())))
    return Coverage(tokens, tuple(alone), int(ends[better]), tuple(missing))


def usable_prefix(groups: Sequence[Continued], cut: Cut, at_hand: Bools) -> int:
    """The longest prefix from which every group can continue, in tokens; arguments as of `coverage`."""
    ends, usable, first = _runs(tuple((group.kind, group.reach) for group in groups), cut)
    good = ends[usable & ~_lacking(at_hand, first).any(axis=0)]
    return int(good[-1]) if len(good) else cut.have


def to_load(
    groups: Sequence[Continued], cut: Cut, tokens: int, part: tuple[int, int] | None = None
) -> tuple[Int64s, ...]:
    """The chunks of each group that a prefix of `tokens` takes, beyond what the engine has.

    Args:
        groups: all groups of the model.
        cut: the prompt.
        tokens: a boundary, or `cut.have` or less, which takes none.
        part: of the prefix, as of `Span`: `tokens` may lie anywhere if it ends before.

    Returns:
        Numbers of chunks, int64, ascending, per group; of a state group, the one whose end has the snapshot.

    Raises:
        TransferError: there is no boundary at `tokens`, or it lies beyond the farthest that may be used.
    """
    if tokens <= cut.have:
        return tuple(np.zeros(0, np.int64) for _ in groups)
    span = Span(cut.have, tokens, cut.prompt, part)
    whole = span.ends == tokens
    on_boundary = not whole or tokens == cut.tokens or tokens % cut.chunk_tokens == 0
    if not on_boundary or span.ends > min(cut.tokens, farthest(groups, cut.prompt)):
        raise TransferError(
            f"a prefix of {span.ends} tokens ends on no boundary of {cut.tokens} tokens in chunks of "
            f"{cut.chunk_tokens}, or beyond the {farthest(groups, cut.prompt)} that may be used"
        )
    return tuple(_chunks(needed(group.kind, group.reach, span), group.kind, cut) for group in groups)


def _chunks(tokens: tuple[int, int], kind: GroupKind, cut: Cut) -> Int64s:
    """Numbers of the chunks that tokens ``[low, high)`` lie in; of a state, the last alone."""
    low, high = tokens
    if low >= high:
        return np.zeros(0, np.int64)
    first = high - 1 if kind is GroupKind.STATE else low
    return np.arange(first // cut.chunk_tokens, -(-high // cut.chunk_tokens), dtype=np.int64)


@lru_cache(maxsize=64)
def _runs(groups: tuple[tuple[GroupKind, int], ...], cut: Cut) -> tuple[Int64s, Bools, tuple[Int64s, ...]]:
    """Boundaries, and the runs of chunks that a continuation takes there, whatever is at hand.

    As `select.needed`, for all boundaries at once. Of a state, the run is the last chunk alone.

    Args:
        groups: kind and reach of all groups of the model.
        cut: the prompt.

    Returns:
        Boundaries, int64 of shape (n,); whether each may be used, bool; per group the first chunk of its
        run, the one after the last if it takes none, int64. Not to be changed: all who ask alike get them.
    """
    ends = cut.boundaries
    beyond = max(cut.have, cut.first)
    usable = (ends > beyond) & (ends <= _farthest([kind for kind, _ in groups], cut.prompt))
    computed, none = np.minimum(ends, cut.prompt - 1), -(-ends // cut.chunk_tokens)
    found: dict[tuple[GroupKind, int], Int64s] = {}
    for kind, reach in set(groups):
        low = ends - 1 if kind is GroupKind.STATE else first_seen(kind, reach, computed)
        low = np.maximum(low, beyond if sees_all(kind) else cut.have)
        found[kind, reach] = np.where(low < ends, low // cut.chunk_tokens, none)
    return ends, usable, tuple(found[group] for group in groups)


def _lacking(at_hand: Bools, first: Sequence[Int64s]) -> Bools:
    """Whether a group lacks a chunk of the run to a boundary, bool of shape (groups, chunks)."""
    groups, chunks = at_hand.shape
    before = np.zeros((groups, chunks + 1), np.int64)
    np.cumsum(~at_hand, axis=1, out=before[:, 1:])
    lacks = np.empty((groups, chunks), np.bool_)
    for row in range(groups):
        np.not_equal(before[row, 1:], before[row].take(first[row]), out=lacks[row])
    return lacks


def _last(ends: Int64s, usable: Bools, have: int) -> list[int]:
    """Of each row, the last usable boundary, or what is there anyway; `usable` is of shape (rows, chunks)."""
    if not len(ends):
        return [have] * len(usable)
    back = usable[:, ::-1].argmax(axis=1)
    at = len(ends) - 1 - back
    found: list[int] = np.where(usable[np.arange(len(usable)), at], ends[at], have).tolist()
    return found
