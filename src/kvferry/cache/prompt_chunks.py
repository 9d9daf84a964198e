"""The chunks of one request, by group: their keys, and the longest cached prefix.

The key of a group's chunk is the chunk's key (`keys.chunk`) with its last byte replaced by the group's
number. This leaves 248 bits of digest, and one mapping or directory holds all groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvferry.cache.fetch import WantedChunk
from kvferry.geometry import GroupKind
from kvferry.geometry.canonical import CanonicalGroup
from kvferry.keys.chunk import ChunkKeys
from kvferry.planning.coverage import ChunkedPrompt, Coverage, TierNumbers, chunks_to_load, coverage
from kvferry.planning.select import LoadSpan
from kvferry.tiers.index.key_table import TAG_BYTES, Tags, tags_of


class PromptChunks:
    """Keys and look-ups of one request's chunks. Not thread-safe.

    Attributes:
        keys: chunk keys of the request, extended as it grows.
    """

    def __init__(self, groups: Sequence[CanonicalGroup], keys: ChunkKeys) -> None:
        self.keys = keys
        self._groups = tuple(groups)
        self._numbers = np.arange(len(self._groups), dtype=np.uint64)[:, None] << _LAST
        self._of_any = tags_of(())
        self._of_any = self._more()

    @property
    def has_tail(self) -> bool:
        """Return whether a prefix may end inside a chunk; False if any group is a state."""
        return all(group.kind is not GroupKind.STATE for group in self._groups)

    def key(self, group: int, number: int) -> bytes:
        """Return the key of a whole chunk."""
        return _of_group(self.keys.chunk(number), group)

    def tail(self, group: int, tokens: int) -> bytes:
        """Return the key of the chunk from the last chunk boundary before `tokens` to `tokens`."""
        return _of_group(self.keys.at(tokens), group)

    def all_keys(self, prompt: int) -> list[bytes]:
        """Return the keys of all chunks that a tier may have, the first chunk first.

        Args:
            prompt: number of tokens of the prompt, which may end in a tail.
        """
        whole, rest = divmod(prompt, self.keys.chunk_tokens)
        of_any = self.keys.chunks()
        if rest and self.has_tail:
            of_any.insert(whole, self.keys.at(prompt))
        return [_of_group(key, group) for key in of_any for group in range(len(self._groups))]

    def key_of(self, chunked: ChunkedPrompt, group: int, number: int) -> bytes:
        """Return the key of a chunk of the prompt: a whole chunk or the tail."""
        whole = (number + 1) * chunked.chunk_tokens <= chunked.tokens
        return self.key(group, number) if whole else self.tail(group, chunked.tokens)

    def look_up(
        self,
        tokens: int,
        local_tokens: int,
        tier_numbers: Callable[[Tags], TierNumbers],
        *,
        in_full: bool = True,
    ) -> Coverage:
        """Return the longest prefix that the engine can continue from.

        Args:
            tokens: number of tokens of the request, all of which `keys` covers.
            local_tokens: number of tokens that the engine has.
            tier_numbers: function from key tags to the numbers of the tiers that chunks would come from.
            in_full: whether all tokens may be loaded, including the last one.
        """
        whole, rest = divmod(tokens if in_full else tokens - 1, self.keys.chunk_tokens)
        ends_inside = in_full and rest > 0 and self.has_tail
        chunked = ChunkedPrompt(
            tokens if ends_inside else whole * self.keys.chunk_tokens,
            self.keys.chunk_tokens,
            tokens,
            local_tokens,
        )
        tags = self._tags(chunked)
        return coverage(self._groups, chunked, tier_numbers(tags.ravel()).reshape(tags.shape))

    def wanted_chunks(self, found: Coverage, span: LoadSpan) -> Iterator[WantedChunk]:
        """Yield the chunks to load for a prefix, or for a part of it, in order of their numbers."""
        chunked = found.chunked
        numbers = chunks_to_load(self._groups, chunked, span.total, span.part)
        each = [(int(number), group) for group, of in enumerate(numbers) for number in of]
        size = self.keys.chunk_tokens
        for number, group in sorted(each):
            last = min((number + 1) * size, chunked.tokens)
            state = self._groups[group].kind is GroupKind.STATE
            whole = last == (number + 1) * size
            key = self.key(group, number) if whole else self.tail(group, last)
            yield WantedChunk(group, number, key, 0 if state else last - number * size)

    def _tags(self, chunked: ChunkedPrompt) -> Tags:
        """Return the tags of all chunks' keys, uint64 of shape (groups, chunks)."""
        whole, rest = divmod(chunked.tokens, chunked.chunk_tokens)
        if len(self._of_any) < whole:
            self._of_any = np.concatenate((self._of_any, self._more()))
        tags = self._of_any[:whole]
        if rest:
            tags = np.concatenate((tags, tags_of([self.keys.at(chunked.tokens)]) & _BUT_LAST))
        return tags | self._numbers

    def _more(self) -> Tags:
        """Return, for the new chunks, the part of the tags that all groups share."""
        return self.keys.digests(len(self._of_any)).view("<u8")[:, -1] & _BUT_LAST


_LAST = np.uint64(8 * (TAG_BYTES - 1))
_BUT_LAST = np.uint64(1 << 8 * (TAG_BYTES - 1)) - np.uint64(1)


def _of_group(key: bytes, group: int) -> bytes:
    return key[:-1] + bytes((group,))
