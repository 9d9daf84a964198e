"""Coverage: the longest usable prefix of a prompt when groups have different chunks cached.

The last chunk of a prompt may be a shorter *tail*. A prefix that ends at a *boundary*, the end of a chunk, is
usable if every group can continue there. Unless the engine itself holds the tokens, a group needs:

- full attention and MLA: every chunk before the boundary
- sliding window, chunked local attention: the chunks with tokens that the next computed token attends to
- state: the snapshot (recurrent state) at the boundary itself

These chunks are consecutive and end at the boundary. So one number per group and boundary is enough: the
slowest of the tiers that hold them.

The engine always computes the last prompt token itself, to sample from it. Attention overwrites its KV with
the same content, but recurrent state would consume the token twice. So if the model has a state group, a
prefix has at most ``prompt - 1`` tokens (`longest_usable_prefix`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.common.errors import TransferError
from kvferry.geometry import GroupKind, GroupPattern
from kvferry.planning.descriptors import Int64s
from kvferry.planning.select import LoadSpan, attends_to_all, first_attended, needed_tokens

Bools: TypeAlias = npt.NDArray[np.bool_]
TierNumbers: TypeAlias = npt.NDArray[np.int64]

# Tier number of a chunk that no tier holds. Tiers are numbered from 0, the fastest first.
NO_TIER = 1 << 16

_NO_CHUNK = np.zeros(1, np.int64)


@dataclass(frozen=True, slots=True)
class ChunkedPrompt:
    """A prompt that is divided into chunks.

    `local_tokens` may end inside a chunk. Of a sliding window, the engine may hold only the trailing part.
    """

    tokens: int  # to look up, from the start of the prompt
    chunk_tokens: int
    prompt: int  # length
    local_tokens: int = 0  # prefix that the engine itself holds, in every group
    first: int = 0  # prefix that another source loads for the groups that attend to all tokens; or 0

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
        """Number of chunks, including the tail."""
        return -(-self.tokens // self.chunk_tokens)

    @property
    def boundaries(self) -> Int64s:
        """End of every chunk in tokens, int64 of shape (chunks,), ascending."""
        ends = np.arange(1, self.chunks + 1, dtype=np.int64) * self.chunk_tokens
        ends[-1:] = self.tokens
        return ends


@dataclass(frozen=True, slots=True)
class MissingChunk:
    """The first chunk, in a state group the first snapshot, that a group lacks for a longer prefix."""

    group: int
    chunk: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Coverage:
    """The usable prefixes of a prompt, and the chunks that are missing for longer ones.

    Attributes:
        tier_numbers: number of the fastest tier that holds each chunk, int64 of shape (groups, chunks).
        ends: tokens before each boundary, int64 of shape (chunks,).
        usable: True for each boundary at which a loaded prefix may end, whatever the tiers hold; bool of
            shape (chunks,). False up to the end of the prefix that the engine or another source supplies.
        slowest: per group, int64 of shape (chunks,): the slowest tier that the group must read if the prefix
            ends at each boundary; `NO_TIER` if the group lacks a chunk.
        slowest_overall: the largest number in `slowest` over all groups.
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
        """Length in tokens of the longest usable prefix, at least that of the engine's own prefix."""
        return self.longest()[0]

    @property
    def per_group(self) -> tuple[int, ...]:
        """Tokens of the longest prefix that each group can use, whatever the other groups lack."""
        return tuple(self._last(row, NO_TIER)[0] for row in self.slowest)

    @property
    def full_attention_tokens(self) -> int:
        """Length in tokens of the longest prefix for which all full-attention and MLA chunks are cached."""
        found = []
        for group, slowest in zip(self.groups, self.slowest, strict=True):
            if attends_to_all(group.kind):
                found.append(self._last(slowest, NO_TIER)[0])
        return min(found, default=self.chunked.local_tokens)

    @property
    def nearest_unusable_prefix(self) -> int | None:
        """Tokens of the prefix that comes closest to being usable, to explain a miss; None if none does."""
        at = self._nearest_index()
        return None if at is None else int(self.ends[at])

    @property
    def missing(self) -> tuple[MissingChunk, ...]:
        """First missing chunk of each group that cannot use a prefix of `nearest_unusable_prefix`."""
        at = self._nearest_index()
        if at is None:
            return ()
        end = int(self.ends[at])
        part = min(self.chunked.first, end), end
        span = LoadSpan(self.chunked.local_tokens, end, self.chunked.prompt, part)
        found = []
        for number, (group, slowest) in enumerate(zip(self.groups, self.slowest, strict=True)):
            if slowest[at] == NO_TIER:
                run = _chunks(group, span, self.chunked)
                # `NO_TIER` is the largest number, so `argmax` finds the first chunk that is missing.
                found.append(MissingChunk(number, int(run[self.tier_numbers[number, run].argmax()])))
        return tuple(found)

    def longest(self, before: int = NO_TIER) -> tuple[int, int]:
        """Return (tokens, slowest tier) of the longest prefix that needs only tiers before `before`.

        If no chunk extends the prefix that the engine itself holds, the result is (length of that prefix, 0).
        """
        return self._last(self.slowest_overall, before)

    def tokens_after_head(self, head: int) -> int:
        """Return the tokens of the longest usable prefix, if another source loads the first `head` tokens."""
        return _covered(self.groups, replace(self.chunked, first=head), self.tier_numbers, self).tokens

    def tokens_by_tier(self, group: int, first: int, last: int) -> Int64s:
        """Return the tokens of ``[first, last)`` that each tier provides to a group, int64 of shape (tiers,).

        The range is not empty, and the result ends with the slowest tier that provides a chunk.
        """
        size = self.chunked.chunk_tokens
        low, high = first // size, -(-last // size)
        # A load does not need a chunk that no tier holds, for example before a window. It counts as tier 0.
        row = self.tier_numbers[group, low:high] % NO_TIER
        sums = np.bincount(row) * size
        sums[row[0]] -= first - low * size
        sums[row[-1]] -= high * size - last
        return sums

    def _last(self, slowest: TierNumbers, before: int) -> tuple[int, int]:
        good = (self.usable & (slowest < before)).nonzero()[0]
        return (
            (int(self.ends[good[-1]]), int(slowest[good[-1]]))
            if len(good)
            else (self.chunked.local_tokens, 0)
        )

    def _nearest_index(self) -> int | None:
        beyond = (self.usable & (self.ends > self.tokens)).nonzero()[0]
        if not len(beyond):
            return None
        # The boundary that the fewest groups fail, and of several the shortest: `argmin` takes the first.
        failing = np.zeros(len(beyond), np.int64)
        for row in self.slowest:
            failing += row[beyond] >= NO_TIER
        return int(beyond[failing.argmin()])


def longest_usable_prefix(groups: Sequence[GroupPattern], prompt: int) -> int:
    """Return the length in tokens of the longest prefix that a prompt may use if every chunk is cached."""
    # Attention overwrites the KV of the last token with the same content. Recurrent state would see it twice.
    for group in groups:
        if group.kind is GroupKind.STATE:
            return max(prompt - 1, 0)
    return prompt


def widest_group(groups: Sequence[GroupPattern]) -> int:
    """Return the index of the group that needs the most chunks to load a prefix."""
    kinds = [(one.kind is not GroupKind.STATE, not one.attention_span, one.attention_span) for one in groups]
    return kinds.index(max(kinds))


def find_coverage(
    groups: Sequence[GroupPattern], chunked: ChunkedPrompt, tier_numbers: TierNumbers
) -> Coverage:
    """Compute the usable prefixes of a prompt, and the chunks that are missing for longer prefixes.

    `tier_numbers` has the fastest tier that holds each chunk, or `NO_TIER`: int64 of shape (groups, chunks).
    In a state group, that is the tier of the snapshot at the end of the chunk. A tier also holds the tail if
    it holds a longer chunk that begins with the same tokens.

    Raise TransferError if `tier_numbers` has another shape or dtype, or `groups` is empty.

    >>> from kvferry.geometry import Attention
    >>> full, state = Attention(GroupKind.FULL), Attention(GroupKind.STATE)
    >>> found = np.array([[0, 0, 1, NO_TIER], [NO_TIER, 0, NO_TIER, 0]])
    >>> both = find_coverage([full, state], ChunkedPrompt(tokens=1024, chunk_tokens=256, prompt=1025), found)
    >>> both.longest(), both.per_group, both.nearest_unusable_prefix, both.missing
    ((512, 0), (768, 1024), 768, (MissingChunk(group=1, chunk=2),))
    """
    if not groups or tier_numbers.shape != (len(groups), chunked.chunks) or tier_numbers.dtype != np.int64:
        raise TransferError(
            f"tier numbers are {tier_numbers.dtype} of shape {tier_numbers.shape}, not int64 of "
            f"({len(groups)}, {chunked.chunks}): groups of the model, chunks of the prompt"
        )
    return _covered(groups, chunked, tier_numbers)


class Prefixes(NamedTuple):
    """The longest prefixes of a prompt that can be loaded, in tokens, at least the engine's own prefix."""

    tokens: int
    # If only groups that attend to all tokens count. Without such groups, it is the engine's own prefix.
    attention_tokens: int
    group_tokens: tuple[int, ...]  # if only one group counts


def longest_prefixes(
    groups: Sequence[GroupPattern], chunked: ChunkedPrompt, held: Sequence[bytes]
) -> Prefixes:
    """Return the longest prefixes of a prompt that no other source loads a part of.

    They are those of `find_coverage`. For prompts of a few dozen chunks, this takes a tenth of the time, most
    of which is the making of arrays.

    Args:
        held: for each group, a byte for each chunk: 1 if a tier holds it, else 0.
    """
    size, local = chunked.chunk_tokens, chunked.local_tokens
    first, after = local // size, chunked.chunks
    if chunked.tokens > longest_usable_prefix(groups, chunked.prompt):
        after -= 1
    if chunked.tokens <= local:
        after = 0

    each = [_last_end(group, chunked, row, first, after) for group, row in zip(groups, held, strict=True)]
    lasts, common = each, min(each)
    while first <= common < max(lasts):
        # The groups that can continue later may not be able to continue here.
        lasts = [
            last if last == common else _last_end(group, chunked, row, first, common + 1)
            for last, group, row in zip(lasts, groups, held, strict=True)
        ]
        common = min(lasts)
    ends = [min((last + 1) * size, chunked.tokens) if last >= first else local for last in (common, *each)]
    attention = [end for group, end in zip(groups, ends[1:], strict=True) if attends_to_all(group.kind)]
    return Prefixes(ends[0], min(attention, default=local), tuple(ends[1:]))


def _last_end(group: GroupPattern, chunked: ChunkedPrompt, held: bytes, first: int, after: int) -> int:
    """Return the last chunk of ``[first, after)`` that can end a prefix; less than `first` if none can."""
    if group.kind is GroupKind.STATE:
        return held.rfind(1, first, after)
    if attends_to_all(group.kind):
        gap = held.find(0, first, after)
        return (after if gap < 0 else gap) - 1
    last = after - 1
    while last >= first:
        end = min((last + 1) * chunked.chunk_tokens, chunked.tokens)
        low = max(first_attended(group, min(end, chunked.prompt - 1)), chunked.local_tokens)
        if low >= end or (gap := held.rfind(0, low // chunked.chunk_tokens, last + 1)) < 0:
            break
        last = gap - 1  # all ends between the gap and `last` need the missing chunk too
    return last


def _covered(
    groups: Sequence[GroupPattern],
    chunked: ChunkedPrompt,
    tier_numbers: TierNumbers,
    before: Coverage | None = None,
) -> Coverage:
    # `before` is a result whose inputs differ only in `ChunkedPrompt.first`.
    ends = chunked.boundaries if before is None else before.ends
    usable = ends > max(chunked.local_tokens, chunked.first)
    if chunked.tokens > longest_usable_prefix(groups, chunked.prompt):
        usable[-1:] = False
    # What another source loads first matters only to groups that attend to all tokens.
    slowest = []
    for number, group in enumerate(groups):
        if before is None or attends_to_all(group.kind):
            slowest.append(_slowest(group, chunked, ends, tier_numbers[number]))
        else:
            slowest.append(before.slowest[number])
    return Coverage(
        groups=groups,
        chunked=chunked,
        tier_numbers=tier_numbers,
        ends=ends,
        usable=usable,
        slowest=tuple(slowest),
        slowest_overall=reduce(np.maximum, slowest),
    )


def chunks_to_load(
    groups: Sequence[GroupPattern], chunked: ChunkedPrompt, tokens: int, part: tuple[int, int] | None = None
) -> tuple[Int64s, ...]:
    """Return the indices of the chunks of each group that must be loaded for a prefix, int64, ascending.

    Args:
        tokens: length of the prefix. It must be the end of a chunk, unless `part` ends earlier.
        part: token range ``[first, last)`` to load if other sources load the rest; None for the whole prefix.

    Raise TransferError if the tokens to load end inside a chunk, or after `longest_usable_prefix`.
    """
    if tokens <= chunked.local_tokens:
        return tuple(np.zeros(0, np.int64) for _ in groups)
    span = LoadSpan(chunked.local_tokens, tokens, chunked.prompt, part)
    on_boundary = span.ends != tokens or tokens == chunked.tokens or tokens % chunked.chunk_tokens == 0
    usable = longest_usable_prefix(groups, chunked.prompt)
    if not on_boundary or span.ends > min(chunked.tokens, usable):
        raise TransferError(
            f"a prefix of {span.ends} tokens ends on no boundary of {chunked.tokens} tokens in chunks of "
            f"{chunked.chunk_tokens}, or beyond the {usable} that may be used"
        )
    return tuple(_chunks(group, span, chunked) for group in groups)


def _chunks(group: GroupPattern, span: LoadSpan, chunked: ChunkedPrompt) -> Int64s:
    needed = needed_chunk_range(group, span, chunked.chunk_tokens)
    return np.arange(needed.start, needed.stop, dtype=np.int64)


def needed_chunk_range(group: GroupPattern, span: LoadSpan, chunk_tokens: int) -> range:
    """Return the indices of the chunks of one group that a load needs, as `chunks_to_load` does for all."""
    low, high = needed_tokens(group, span)
    if low >= high:
        return range(0)
    # The snapshot lies at the end of the last chunk.
    first = high - 1 if group.kind is GroupKind.STATE else low
    return range(first // chunk_tokens, -(-high // chunk_tokens))


def _slowest(
    group: GroupPattern, chunked: ChunkedPrompt, ends: Int64s, tier_numbers: TierNumbers
) -> TierNumbers:
    """Return `Coverage.slowest` of a group. It agrees with `_chunks` of each prefix, but takes one pass."""
    if group.kind is GroupKind.STATE:
        return tier_numbers
    if attends_to_all(group.kind):
        run = tier_numbers.copy()
        run[: max(chunked.local_tokens, chunked.first) // chunked.chunk_tokens] = 0
        return np.maximum.accumulate(run, out=run)
    computed, after = np.minimum(ends, chunked.prompt - 1), np.arange(1, len(ends) + 1)
    low = np.maximum(first_attended(group, computed), chunked.local_tokens)
    # `reduceat` over pairs (first chunk, chunk after the last) gives the maximum of each window at even
    # places. It needs each index to lie inside the array, hence one more element.
    bounds = np.empty((len(ends), 2), np.int64)
    bounds[:, 0], bounds[:, 1] = np.where(low < ends, low // chunked.chunk_tokens, after), after
    found = np.maximum.reduceat(np.concatenate((tier_numbers, _NO_CHUNK)), bounds.ravel())[::2]
    return found * (low < ends)
