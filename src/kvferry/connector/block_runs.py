"""Blocks of tokens under the names that the engine's own prefix cache gives them.

A router that follows an engine's KV events knows blocks by these names. It does not know the keys of chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvferry.connector.engine import Request


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive blocks of a prompt in one KV cache group.

    >>> run = BlockRun(0, (b"a", b"b"), parent=None, tokens=(1, 2, 3, 4), block_tokens=2)
    >>> run.part(1, 2)
    BlockRun(group=0, hashes=(b'b',), parent=b'a', tokens=(3, 4), block_tokens=2, adapter=None, extra_keys=())

    Attributes:
        group: index of the engine's KV cache group.
        hashes: the engine's hash of each block. It covers all tokens up to the end of the block.
        parent: hash of the block before the first one; None at the start of a prompt.
        tokens: token ids of all blocks.
        block_tokens: number of tokens per block.
        adapter: (id, name) of the request's LoRA adapter; None without one.
        extra_keys: for each block, what else the engine hashes with its tokens; empty if there is nothing.
    """

    group: int
    hashes: tuple[bytes, ...]
    parent: bytes | None
    tokens: Sequence[int]
    block_tokens: int
    adapter: tuple[int, str] | None = None
    extra_keys: tuple[tuple[object, ...] | None, ...] = ()

    def part(self, first: int, last: int) -> BlockRun:
        """Return the blocks with indices from `first` to `last`, half-open, of this run."""
        size = self.block_tokens
        return BlockRun(
            self.group,
            self.hashes[first:last],
            self.hashes[first - 1] if first else self.parent,
            self.tokens[first * size : last * size],
            size,
            self.adapter,
            self.extra_keys[first:last],
        )

    def parts(self, wanted: Sequence[bool]) -> Iterator[BlockRun]:
        """Yield the wanted blocks as the fewest runs.

        Args:
            wanted: whether each block of this run is wanted.
        """
        first = 0
        for at, is_wanted in enumerate([*wanted, False]):
            if not is_wanted:
                if first < at:
                    yield self.part(first, at)
                first = at + 1


DescribeBlocks: TypeAlias = Callable[[Request, int, range], BlockRun | None]
"""Function of a request, the index of a KV cache group, and a range of the request's tokens.

It returns the engine's blocks that end in the range. The first one may begin before it. It returns None if
there is no such block, or if the engine has no hash of them.
"""
