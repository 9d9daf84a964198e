"""The chunks of one request in each KV cache group: their keys, and the longest cached prefix.

A *tail* is the incomplete chunk at the end of a prompt. A prefix ends with a chunk or with the prompt. If the
engine knows chunks by their beginnings, a prefix may also end inside a chunk: a chunk with the same beginning
stands in for the tail there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from kvferry.cache.chunk_cache import PromptChunk
from kvferry.geometry import GroupKind
from kvferry.geometry.canonical import CanonicalGroup
from kvferry.keys.chunk import ChunkKeys
from kvferry.keys.tenant import key_of_chunk
from kvferry.planning.coverage import ChunkedPrompt, Coverage, TierNumbers, chunks_to_load, find_coverage
from kvferry.planning.retention import needed_chunks
from kvferry.planning.select import LoadSpan, attends_to_all
from kvferry.tiers.index import TAG_BYTES, Tags, tags_of

_LAST = np.uint64(8 * (TAG_BYTES - 1))
_BUT_LAST = np.uint64(1 << 8 * (TAG_BYTES - 1)) - np.uint64(1)


class ChunkBeginnings:
    """Maps the key of each beginning to the chunks that begin so. Not thread-safe.

    `block_tokens` is the least common multiple of the tokens per block of the engine's groups.

    >>> beginnings = ChunkBeginnings(4)
    >>> list(beginnings.ends(16, 31))
    [20, 24, 28]
    >>> beginnings.add(PromptChunk(0, 1, b"chunk", 16), [b"of 20", b"of 24", b"of 28"])
    >>> beginnings.chunks_with(b"of 24")
    (PromptChunk(group=0, number=1, key=b'chunk', tokens=16, cold=False),)
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._chunks: dict[bytes, tuple[PromptChunk, ...]] = {}

    def ends(self, first: int, last: int) -> range:
        """Return the positions after `first`, up to and including `last`, at which blocks end."""
        return range((first // self._block_tokens + 1) * self._block_tokens, last + 1, self._block_tokens)

    def add(self, chunk: PromptChunk, beginnings: Iterable[bytes]) -> None:
        """Add a chunk that is not yet known, with the keys of its beginnings."""
        for key in beginnings:
            self._chunks[key] = (*self._chunks.get(key, ()), chunk)

    def discard(self, chunk: PromptChunk, beginnings: Iterable[bytes]) -> None:
        """Remove a chunk with all of its beginnings, as they were added."""
        for key in beginnings:
            left = tuple(one for one in self._chunks[key] if one != chunk)
            if left:
                self._chunks[key] = left
            else:
                del self._chunks[key]

    def chunks_with(self, beginning: bytes) -> tuple[PromptChunk, ...]:
        return self._chunks.get(beginning, ())


class PromptChunks:
    """The chunk keys of one request in each KV cache group, and their look-up in the tiers. Not thread-safe.

    Attributes:
        keys: chunk keys of the request. The caller extends them as the request grows.
        shared_tokens: length in tokens of the longest prefix whose full-attention chunks were all cached at
            the last look-up. Another request has stored these chunks, so other prompts begin with them too.
    """

    def __init__(
        self, groups: Sequence[CanonicalGroup], keys: ChunkKeys, beginnings: ChunkBeginnings | None = None
    ) -> None:
        self.keys = keys
        self.shared_tokens = 0
        self._beginnings = beginnings
        self._stand_ins: dict[bytes, PromptChunk] = {}  # chunks of the last look-up, by the tail they replace
        self._groups = tuple(groups)
        # A cached prefix may end with a tail unless a group has recurrent state.
        self._has_tail = all(group.kind is not GroupKind.STATE for group in groups)
        self._numbers = np.arange(len(self._groups), dtype=np.uint64)[:, None] << _LAST
        self._of_any = tags_of(())  # tags of the whole chunks that were looked up, without a group

    def key(self, group: int, number: int) -> bytes:
        return self.tail(group, (number + 1) * self.keys.chunk_tokens)

    def tail(self, group: int, tokens: int) -> bytes:
        """Return the key of the last chunk of the prefix of `tokens` tokens, which may be whole or a tail."""
        # With the group in the key, one mapping or directory can hold the chunks of all groups. 200 bits of
        # digest are left.
        return key_of_chunk(self.keys.at(tokens), self.keys.tenant, group)

    def all_keys(self, prompt: int) -> list[bytes]:
        """Return the keys of the request's whole chunks and of its prompt's tail, in all groups, in order."""
        return [key for _, _, key in self._each(prompt)]

    def keys_of_span(self, first: int, end: int, prompt: int) -> list[bytes]:
        """Return those of `all_keys` whose chunks have tokens from `first` up to, and not including, `end`.

        A snapshot has the tokens of the chunk that it ends.
        """
        size = self.keys.chunk_tokens
        numbers = range(first // size, -(-end // size))
        return [key for number, _, key in self._each(prompt) if number in numbers]

    def keys_by_need(
        self, prompt: int, ends: Iterable[int], snapshots: Collection[int] = ()
    ) -> tuple[list[bytes], list[bytes]]:
        """Return the keys of the chunks to mark as used when the request ends, and of those to make cold.

        Later prompts are likely to load prefixes of `ends` tokens. `used` are the chunks of `all_keys` that
        these need, and the snapshots at `snapshots`. `cold` are the chunks of generated tokens that none of
        them needs. A chunk may be in neither: a prompt that needs it marks it as used.
        """
        size = self.keys.chunk_tokens
        taken = frozenset(tokens // size - 1 for tokens in snapshots if tokens % size == 0)
        of_state = [group.kind is GroupKind.STATE for group in self._groups]
        needed = [
            taken if state else some for state, some in zip(of_state, self.needed_chunks(ends), strict=True)
        ]
        whole = prompt // size
        used: list[bytes] = []
        cold: list[bytes] = []
        for number, group, key in self._each(prompt):
            some = needed[group]
            if some is None or number in some:
                used.append(key)
            elif number >= whole and not of_state[group]:
                cold.append(key)
        return used, cold

    def needed_chunks(self, ends: Iterable[int]) -> tuple[Collection[int] | None, ...]:
        """Return the chunks that later prompts need to load prefixes of `ends` or `shared_tokens` tokens."""
        return needed_chunks(self._groups, self.keys.chunk_tokens, (*ends, self.shared_tokens))

    def key_of(self, chunked: ChunkedPrompt, group: int, number: int) -> bytes:
        return self.tail(group, min((number + 1) * chunked.chunk_tokens, chunked.tokens))

    def look_up(
        self,
        tokens: int,
        local_tokens: int,
        tier_numbers: Callable[[Tags], TierNumbers],
        *,
        in_full: bool = True,
    ) -> Coverage:
        """Look up the request's chunks in the tiers, set `shared_tokens`, and return the loadable prefixes.

        Args:
            tokens: number of tokens of the request to look up, which `keys` must cover.
            local_tokens: number of tokens at the start of the request whose KV the engine already has.
            in_full: True if a prefix of all `tokens` tokens may be loaded. False if the engine must compute
                the last of these tokens itself: only whole chunks before this token are looked up.
        """
        whole, rest = divmod(tokens if in_full else tokens - 1, self.keys.chunk_tokens)
        ends_inside = in_full and rest > 0 and self._has_tail
        chunked = ChunkedPrompt(
            tokens if ends_inside else whole * self.keys.chunk_tokens,
            self.keys.chunk_tokens,
            tokens,
            local_tokens,
        )
        tags = self._tags(chunked)
        found = find_coverage(self._groups, chunked, tier_numbers(tags.ravel()).reshape(tags.shape))
        self.shared_tokens = found.full_attention_tokens
        # They are those of one look-up: chunks may have been evicted since.
        self._stand_ins.clear()
        if self._beginnings is None or not self._has_tail:
            return found
        return self._end_inside(found, self._beginnings, tokens if in_full else tokens - 1, tier_numbers)

    def wanted_chunks(self, found: Coverage, span: LoadSpan) -> Iterator[PromptChunk]:
        """Yield the chunks that a load of `span` needs after a look-up, in the order of the prompt."""
        chunked = found.chunked
        numbers = chunks_to_load(self._groups, chunked, span.total, span.part)
        each = [(int(number), group) for group, of in enumerate(numbers) for number in of]
        size = self.keys.chunk_tokens
        for number, group in sorted(each):
            state = self._groups[group].kind is GroupKind.STATE
            key, tokens = self.key_of(chunked, group, number), min(size, chunked.tokens - number * size)
            yield self._stand_ins.get(key) or PromptChunk(group, number, key, 0 if state else tokens)

    def _end_inside(
        self,
        found: Coverage,
        beginnings: ChunkBeginnings,
        last: int,
        tier_numbers: Callable[[Tags], TierNumbers],
    ) -> Coverage:
        """Return the coverage of the longest prefix, up to `last`, that ends inside a chunk; else `found`."""
        size, groups = self.keys.chunk_tokens, range(len(self._groups))

        def is_lacking(end: int) -> bool:
            return not all(beginnings.chunks_with(self.tail(group, end)) for group in groups)

        attends = any(attends_to_all(one.kind) for one in self._groups)
        # A chunk inside of which a prefix ends must follow whole chunks that are all cached.
        furthest = found.full_attention_tokens if attends else last
        for number in range(furthest // size, found.tokens // size - 1, -1):
            low, high = number * size, (number + 1) * size
            ends = beginnings.ends(max(low, found.tokens), min(high - 1, last))
            # A chunk with a beginning has all shorter ones too.
            for end in reversed(ends[: bisect_left(ends, 1, key=is_lacking)]):
                numbers = np.empty((len(groups), number + 1), np.int64)
                numbers[:, :number] = found.tier_numbers[:, :number]
                for group in groups:
                    chunks = beginnings.chunks_with(key := self.tail(group, end))
                    of_each = tier_numbers(tags_of([chunk.key for chunk in chunks]))
                    self._stand_ins[key] = chunks[fastest := int(of_each.argmin())]
                    numbers[group, number] = of_each[fastest]
                longer = find_coverage(self._groups, replace(found.chunked, tokens=end), numbers)
                if longer.tokens == end:
                    return longer
        return found

    def _each(self, prompt: int) -> Iterator[tuple[int, int, bytes]]:
        whole, rest = divmod(prompt, self.keys.chunk_tokens)
        of_any = list(enumerate(self.keys.chunks()))
        if rest and self._has_tail:
            of_any.insert(whole, (whole, self.keys.at(prompt)))
        for number, key in of_any:
            for group in range(len(self._groups)):
                yield number, group, key_of_chunk(key, self.keys.tenant, group)

    def _tags(self, chunked: ChunkedPrompt) -> Tags:
        """Return the tags of a prompt's chunks in all groups: uint64 of shape (groups, chunks)."""
        whole, rest = divmod(chunked.tokens, chunked.chunk_tokens)
        if len(self._of_any) < whole:
            new = self.keys.digests(len(self._of_any)).view("<u8")[:, -1] & _BUT_LAST
            self._of_any = np.concatenate((self._of_any, new))
        tags = self._of_any[:whole]
        if rest:
            tags = np.concatenate((tags, tags_of([self.keys.at(chunked.tokens)]) & _BUT_LAST))
        return tags | self._numbers
