"""Chunks by their beginnings, so that a load may end inside a chunk.

The key of a chunk covers all of its tokens, so a prompt that shares only the first of them cannot compute it.
A *beginning* of a chunk is its tokens up to the end of one of the engine's blocks. It has the key of an
incomplete chunk (tail) with these tokens, which such a prompt can compute.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class BegunChunk(NamedTuple):
    """A stored chunk that is found by its beginnings: its key and number of tokens."""

    key: bytes
    tokens: int


class ChunkBeginnings:
    """Maps the key of each beginning to the chunks that begin so. Not thread-safe.

    >>> beginnings = ChunkBeginnings(4)
    >>> list(beginnings.ends(16, 31))
    [20, 24, 28]
    >>> beginnings.add(BegunChunk(b"chunk", 16), [b"of 4", b"of 8", b"of 12"])
    >>> beginnings.chunks_with(b"of 8")
    (BegunChunk(key=b'chunk', tokens=16),)

    Args:
        block_tokens: number of tokens per block of the engine; the least common multiple if its KV cache
            groups differ.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._chunks: dict[bytes, tuple[BegunChunk, ...]] = {}

    def ends(self, first: int, last: int) -> range:
        """Return the positions after `first`, up to and including `last`, at which blocks end."""
        return range((first // self._block_tokens + 1) * self._block_tokens, last + 1, self._block_tokens)

    def add(self, chunk: BegunChunk, beginnings: Iterable[bytes]) -> None:
        """Add a chunk that is not yet known, with the keys of its beginnings."""
        for key in beginnings:
            self._chunks[key] = (*self._chunks.get(key, ()), chunk)

    def discard(self, chunk: BegunChunk, beginnings: Iterable[bytes]) -> None:
        """Remove a chunk with all of its beginnings, as they were added."""
        for key in beginnings:
            left = tuple(one for one in self._chunks[key] if one != chunk)
            if left:
                self._chunks[key] = left
            else:
                del self._chunks[key]

    def chunks_with(self, beginning: bytes) -> tuple[BegunChunk, ...]:
        return self._chunks.get(beginning, ())
