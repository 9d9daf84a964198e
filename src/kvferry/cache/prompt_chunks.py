"""The chunks of one request, by group: what they are kept under, and how far a prefix is at hand.

A chunk of a group is kept under the chunk's key (`keys.chunk`) with its last byte replaced by the group's
number: 248 bits of digest are left, and one mapping or directory holds all groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvferry.cache.fetch import Want
from kvferry.geometry import GroupKind
from kvferry.geometry.canonical import CanonicalGroup
from kvferry.keys.chunk import ChunkKeys
from kvferry.planning.coverage import ChunkedPrompt, Coverage, TierNumbers, chunks_to_load, coverage
from kvferry.planning.select import LoadSpan
from kvferry.tiers.index.key_table import TAG_BYTES, Tags, tags_of


class PromptChunks:
    """Keys and look-ups of one request's chunks. Not thread-safe.

    Attributes:
        keys: of the request; extended as it grows.
    """

    def __init__(self, groups: Sequence[CanonicalGroup], keys: ChunkKeys) -> None:
        self.keys = keys
        self._groups = tuple(groups)
        self._numbers = np.arange(len(self._groups), dtype=np.uint64)[:, None] << _LAST
        self._of_any = tags_of(())
        self._of_any = self._more()

    @property
    def tails(self) -> bool:
        """Whether a prefix may end inside a chunk: a state is kept at its end only."""
        return all(group.kind is not GroupKind.STATE for group in self._groups)

    def key(self, group: int, number: int) -> bytes:
        """Of a whole chunk."""
        return _of_group(self.keys.chunk(number), group)

    def tail(self, group: int, tokens: int) -> bytes:
        """Of what lies between the last boundary before `tokens` and `tokens`."""
        return _of_group(self.keys.at(tokens), group)

    def every(self, prompt: int) -> list[bytes]:
        """Keys of all chunks that may be kept, from the first on.

        Args:
            prompt: tokens of the prompt, which may end in a tail.
        """
        whole, rest = divmod(prompt, self.keys.chunk_tokens)
        of_any = self.keys.chunks()
        if rest and self.tails:
            of_any.insert(whole, self.keys.at(prompt))
        return [_of_group(key, group) for key in of_any for group in range(len(self._groups))]

    def key_of(self, cut: ChunkedPrompt, group: int, number: int) -> bytes:
        """Of a chunk of a prompt that was cut so: a whole one, or the tail."""
        whole = (number + 1) * cut.chunk_tokens <= cut.tokens
        return self.key(group, number) if whole else self.tail(group, cut.tokens)

    def look_up(
        self, tokens: int, have: int, places: Callable[[Tags], TierNumbers], *, in_full: bool = True
    ) -> Coverage:
        """The longest prefix that can be continued from.

        Args:
            tokens: of the request, all of which the keys know.
            have: tokens that the engine has.
            places: where chunks would come from, by their keys' tags.
            in_full: all tokens may be loaded, the last one included.
        """
        whole, rest = divmod(tokens if in_full else tokens - 1, self.keys.chunk_tokens)
        ends_inside = in_full and rest > 0 and self.tails
        cut = ChunkedPrompt(
            tokens if ends_inside else whole * self.keys.chunk_tokens, self.keys.chunk_tokens, tokens, have
        )
        tags = self._tags(cut)
        return coverage(self._groups, cut, places(tags.ravel()).reshape(tags.shape))

    def wants(self, found: Coverage, span: LoadSpan) -> Iterator[Want]:
        """The chunks that a prefix takes, or a part of it, by number, so that the first come first."""
        cut = found.cut
        numbers = chunks_to_load(self._groups, cut, span.total, span.part)
        each = [(int(number), group) for group, of in enumerate(numbers) for number in of]
        size = self.keys.chunk_tokens
        for number, group in sorted(each):
            last = min((number + 1) * size, cut.tokens)
            state = self._groups[group].kind is GroupKind.STATE
            whole = last == (number + 1) * size
            key = self.key(group, number) if whole else self.tail(group, last)
            yield Want(group, number, key, 0 if state else last - number * size)

    def _tags(self, cut: ChunkedPrompt) -> Tags:
        """Of all chunks' keys, uint64 of shape (groups, chunks): all at once, without making the keys."""
        whole, rest = divmod(cut.tokens, cut.chunk_tokens)
        if len(self._of_any) < whole:
            self._of_any = np.concatenate((self._of_any, self._more()))
        tags = self._of_any[:whole]
        if rest:
            tags = np.concatenate((tags, tags_of([self.keys.at(cut.tokens)]) & _BUT_LAST))
        return tags | self._numbers

    def _more(self) -> Tags:
        """What of the keys is the same for all groups, of the chunks that are new."""
        return self.keys.digests(len(self._of_any)).view("<u8")[:, -1] & _BUT_LAST


_LAST = np.uint64(8 * (TAG_BYTES - 1))
_BUT_LAST = np.uint64(1 << 8 * (TAG_BYTES - 1)) - np.uint64(1)


def _of_group(key: bytes, group: int) -> bytes:
    return key[:-1] + bytes((group,))
