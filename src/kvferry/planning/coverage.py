"""Coverage: the longest usable prefix of a prompt when groups have different chunks cached.

A prompt is cut into chunks from its first token on; the last one may be a shorter *tail*. The end of a chunk
is a *boundary*. A prefix is usable up to a boundary if every group can continue there. A group can continue
if every chunk that the next computed token attends to (`select.first_attended`), and that the engine itself
does not hold, is in some tier:

- full attention and MLA: every chunk before the boundary;
- sliding window: the chunks with tokens of the next token's window; chunked-local: of its attention chunk;
- state: the snapshot at the boundary itself, and nothing else.

For every kind this is one run of chunks that ends at the boundary. So one number decides for each group and
boundary: the slowest tier that a chunk of the run comes from. A chunk in no tier makes the boundary unusable.
A prefix that avoids slow tiers ends at the last boundary whose run needs none of them. Block sizes do not
matter here.

The end of the prompt is special, because the engine always computes the last prompt token itself, to sample
from it. Attention overwrites that token's loaded content with the same content, so a prefix may extend to the
end of the prompt; the next computed token is then the last one, and its window counts. A recurrent state that
has consumed the last token would consume it twice. So with a state group in the model, a prefix ends at
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
"""The tier number of a chunk that no tier has. Tiers are numbered from 0, the fastest first."""


class GroupPattern(Protocol):
    """A group's attention pattern. `geometry.Group` and `geometry.store.LayerCache` implement it."""

    @property
    def kind(self) -> GroupKind:
        """Kind of attention or state."""

    @property
    def attention_span(self) -> int:
        """Window or attention chunk in tokens; 0 for other kinds."""


@dataclass(frozen=True, slots=True)
class ChunkedPrompt:
    """A prompt that is looked up chunk by chunk.

    Attributes:
        tokens: tokens to look up, from the start; at most `prompt`. Tokens after the last whole chunk are the
            tail.
        chunk_tokens: tokens of a chunk.
        prompt: tokens of the whole prompt.
        local_tokens: tokens of the prefix that the engine has computed, in every group; need not be a
            boundary. In a sliding-window group the engine may hold the trailing window only. That is enough,
            because a longer prefix needs no older tokens.
        first: tokens of the prefix that another source loads for the groups that attend to all tokens.
    """

    tokens: int
    chunk_tokens: int
    prompt: int
    local_tokens: int = 0
    first: int = 0

    def __post_init__(self) -> None:
        if (
            self.chunk_tokens < 1
            or not 0 <= self.tokens <= self.prompt
            or min(self.local_tokens, self.first) < 0
        ):
            raise TransferError(
                f"cannot look up {self.tokens} of {self.prompt} tokens in chunks of {self.chunk_tokens}, "
                f"with {self.local_tokens} computed"
            )

    @property
    def chunks(self) -> int:
        """Number of chunks, the tail included."""
        return -(-self.tokens // self.chunk_tokens)

    @property
    def boundaries(self) -> Int64s:
        """End of every chunk in tokens; int64 of shape (chunks,), ascending."""
        ends = np.arange(1, self.chunks + 1, dtype=np.int64) * self.chunk_tokens
        return np.minimum(ends, self.tokens)


@dataclass(frozen=True, slots=True)
class MissingChunk:
    """A missing chunk, without which a group cannot continue at a boundary.

    Attributes:
        group: number of the group.
        chunk: number of the first missing chunk; in a state group, the chunk whose end has no snapshot.
    """

    group: int
    chunk: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Coverage:
    """The usable prefixes of a prompt, and what is missing for longer ones.

    Attributes:
        groups: all groups of the model.
        chunked: the prompt.
        tier_numbers: number of the fastest tier that has a chunk, int64 of shape (groups, `chunked.chunks`).
        ends: boundaries in tokens, int64 of shape (`chunked.chunks`,).
        usable: boundaries at which a prefix may end at all, bool of shape (`chunked.chunks`,).
        slowest: per group, the slowest tier in the run that ends at each boundary, int64 of shape
            (`chunked.chunks`,).
        slowest_overall: the slowest tier over all groups, int64 of shape (`chunked.chunks`,).
    """

    groups: Sequence[GroupPattern]
    chunked: ChunkedPrompt
    tier_numbers: TierNumbers
    ends: Int64s
    usable: Bools
    slowest: tuple[TierNumbers, ...]
    slowest_overall: TierNumbers

    @property
    def tokens(self) -> int:
        """Tokens of the longest usable prefix; `ChunkedPrompt.local_tokens` if no chunk extends it."""
        return self.longest()[0]

    @property
    def per_group(self) -> tuple[int, ...]:
        """Tokens of the longest usable prefix of each group, if all other groups were complete."""
        return tuple(self._last(row, NO_TIER)[0] for row in self.slowest)

    @property
    def full_attention_tokens(self) -> int:
        """Tokens of the longest prefix of the groups that attend to all tokens.

        Windows and states may be missing at its end.
        """
        each = zip(self.groups, self.per_group, strict=True)
        return min(
            (tokens for group, tokens in each if attends_to_all(group.kind)),
            default=self.chunked.local_tokens,
        )

    @property
    def nearest_boundary(self) -> int | None:
        """Tokens of the boundary beyond `tokens` that came closest to being usable; None if there is none.

        It is the boundary at which the fewest groups fail; of several, the nearest.
        """
        at = self._better()
        return None if at is None else int(self.ends[at])

    @property
    def missing(self) -> tuple[MissingChunk, ...]:
        """The first missing chunk at `nearest_boundary` of each group that fails there.

        Empty if `nearest_boundary` is None.
        """
        at = self._better()
        if at is None:
            return ()
        end = int(self.ends[at])
        span, found = (
            LoadSpan(
                self.chunked.local_tokens, end, self.chunked.prompt, (min(self.chunked.first, end), end)
            ),
            [],
        )
        for number, (group, slowest) in enumerate(zip(self.groups, self.slowest, strict=True)):
            if slowest[at] == NO_TIER:
                run = _chunks(needed_tokens(group.kind, group.attention_span, span), group.kind, self.chunked)
                found.append(MissingChunk(number, int(run[self.tier_numbers[number, run].argmax()])))
        return tuple(found)

    def longest(self, before: int = NO_TIER) -> tuple[int, int]:
        """Return the longest usable prefix that takes no chunk from tier `before` or a slower one.

        Args:
            before: number of the tier, at least 1.

        Returns:
            (tokens, number of the slowest tier used); tokens are `ChunkedPrompt.local_tokens` if no chunk
            extends it.
        """
        return self._last(self.slowest_overall, before)

    def after(self, first: int) -> int:
        """Return the tokens of the longest usable prefix, given another `ChunkedPrompt.first`."""
        return _covered(self.groups, replace(self.chunked, first=first), self.tier_numbers, self).tokens

    def _last(self, slowest: TierNumbers, before: int) -> tuple[int, int]:
        good = (self.usable & (slowest < before)).nonzero()[0]
        return (
            (int(self.ends[good[-1]]), int(slowest[good[-1]]))
            if len(good)
            else (self.chunked.local_tokens, 0)
        )

    def _better(self) -> int | None:
        """Return the number of the chunk that ends at `nearest_boundary`."""
        beyond = (self.usable & (self.ends > self.tokens)).nonzero()[0]
        if not len(beyond):
            return None
        failing = sum((row[beyond] >= NO_TIER).view(np.uint8) for row in self.slowest)
        return int(beyond[np.argmin(failing)])


def longest_usable_prefix(groups: Sequence[GroupPattern], prompt: int) -> int:
    """Return the tokens of the longest prefix that may be used if every chunk is cached."""
    return max(prompt - any(group.kind is GroupKind.STATE for group in groups), 0)


def coverage(groups: Sequence[GroupPattern], chunked: ChunkedPrompt, tier_numbers: TierNumbers) -> Coverage:
    """Compute the usable prefixes of a prompt.

    Args:
        groups: all groups of the model.
        chunked: the prompt.
        tier_numbers: number of the tier that each chunk of a group comes from, int64 of shape (groups,
            `chunked.chunks`); `NO_TIER` if none has it. In a state group, the tier of the snapshot at the
            chunk's end. Attention chunks inside `chunked.local_tokens` may be missing. The tail of an
            attention group may also come from a longer chunk that begins with it.

    Raises:
        TransferError: `tier_numbers` is of another shape, or there is no group.

    >>> from kvferry.geometry.store import LayerCache
    >>> full, state = LayerCache(GroupKind.FULL, 0, ()), LayerCache(GroupKind.STATE, 0, ())
    >>> found = np.array([[0, 0, 1, NO_TIER], [NO_TIER, 0, NO_TIER, 0]])
    >>> both = coverage([full, state], ChunkedPrompt(tokens=1024, chunk_tokens=256, prompt=1025), found)
    >>> both.longest(), both.per_group, both.nearest_boundary, both.missing
    ((512, 0), (768, 1024), 768, (MissingChunk(group=1, chunk=2),))
    """
    if not groups or tier_numbers.shape != (len(groups), chunked.chunks) or tier_numbers.dtype != np.int64:
        raise TransferError(
            f"tier numbers are {tier_numbers.dtype} of shape {tier_numbers.shape}, not int64 of "
            f"({len(groups)}, {chunked.chunks}): groups of the model, chunks of the prompt"
        )
    return _covered(groups, chunked, tier_numbers)


def _covered(
    groups: Sequence[GroupPattern],
    chunked: ChunkedPrompt,
    tier_numbers: TierNumbers,
    before: Coverage | None = None,
) -> Coverage:
    """Compute `coverage`.

    `before` is a coverage that differs in `ChunkedPrompt.first` alone; rows that do not depend on it are
    kept.
    """
    ends = chunked.boundaries if before is None else before.ends
    usable = ends > max(chunked.local_tokens, chunked.first)
    if chunked.tokens > longest_usable_prefix(groups, chunked.prompt):
        usable[-1:] = False
    slowest = tuple(
        _slowest(group, chunked, ends, row)
        if before is None or attends_to_all(group.kind)
        else before.slowest[number]
        for number, (group, row) in enumerate(zip(groups, tier_numbers, strict=True))
    )
    return Coverage(
        groups=groups,
        chunked=chunked,
        tier_numbers=tier_numbers,
        ends=ends,
        usable=usable,
        slowest=slowest,
        slowest_overall=reduce(np.maximum, slowest),
    )


def chunks_to_load(
    groups: Sequence[GroupPattern], chunked: ChunkedPrompt, tokens: int, part: tuple[int, int] | None = None
) -> tuple[Int64s, ...]:
    """Return the chunks to load of each group for a prefix of `tokens`.

    Args:
        groups: all groups of the model.
        chunked: the prompt.
        tokens: a boundary; `chunked.local_tokens` or less needs no chunk.
        part: as in `LoadSpan`. If it ends before `tokens`, `tokens` need not be a boundary.

    Returns:
        Per group, chunk numbers: int64, ascending; in a state group, the chunk whose end has the snapshot.

    Raises:
        TransferError: `tokens` is not a boundary, or exceeds `longest_usable_prefix`.
    """
    if tokens <= chunked.local_tokens:
        return tuple(np.zeros(0, np.int64) for _ in groups)
    span = LoadSpan(chunked.local_tokens, tokens, chunked.prompt, part)
    whole = span.ends == tokens
    on_boundary = not whole or tokens == chunked.tokens or tokens % chunked.chunk_tokens == 0
    if not on_boundary or span.ends > min(chunked.tokens, longest_usable_prefix(groups, chunked.prompt)):
        raise TransferError(
            f"a prefix of {span.ends} tokens ends on no boundary of {chunked.tokens} tokens in chunks of "
            f"{chunked.chunk_tokens}, or beyond the "
            f"{longest_usable_prefix(groups, chunked.prompt)} that may be used"
        )
    return tuple(
        _chunks(needed_tokens(group.kind, group.attention_span, span), group.kind, chunked)
        for group in groups
    )


def _chunks(tokens: tuple[int, int], kind: GroupKind, chunked: ChunkedPrompt) -> Int64s:
    """Return the chunks that tokens ``[low, high)`` lie in; in a state group, the last one only."""
    low, high = tokens
    if low >= high:
        return np.zeros(0, np.int64)
    first = high - 1 if kind is GroupKind.STATE else low
    return np.arange(first // chunked.chunk_tokens, -(-high // chunked.chunk_tokens), dtype=np.int64)


_NONE = np.zeros(1, np.int64)


def _slowest(
    group: GroupPattern, chunked: ChunkedPrompt, ends: Int64s, tier_numbers: TierNumbers
) -> TierNumbers:
    """Return the slowest tier of the run of chunks that ends at each boundary; 0 for an empty run.

    Equals `select.needed_tokens` for all boundaries at once.
    """
    if group.kind is GroupKind.STATE:
        return tier_numbers
    if attends_to_all(group.kind):
        run = tier_numbers.copy()
        run[: max(chunked.local_tokens, chunked.first) // chunked.chunk_tokens] = 0
        return np.maximum.accumulate(run, out=run)
    computed, after = np.minimum(ends, chunked.prompt - 1), np.arange(1, len(ends) + 1)
    low = np.maximum(first_attended(group.kind, group.attention_span, computed), chunked.local_tokens)
    bounds = np.empty((len(ends), 2), np.int64)
    bounds[:, 0], bounds[:, 1] = np.where(low < ends, low // chunked.chunk_tokens, after), after
    found = np.maximum.reduceat(np.concatenate((tier_numbers, _NONE)), bounds.ravel())[::2]
    return found * (low < ends)
