"""The block pool, and the block tables of a request."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvferry.common.errors import KVFerryError
from kvferry.connector.engine import Block, BlockIds, CacheGroup
from kvferry.planning.select import first_attended


@dataclass(slots=True, eq=False)
class PoolBlock:
    """Block of the KV cache, with the interface that kvferry expects (`Block`). Block 0 is the null block.

    Attributes:
        block_id: index of the block in the pool.
        references: number of requests, loads and stores that hold the block.
        block_hash: always None, because this engine has no prefix cache.
    """

    block_id: int
    references: int = 0
    block_hash: None = None

    @property
    def is_null(self) -> bool:
        """True for the null block, which fills positions of a block table that have no block."""
        return self.block_id == 0


class Pool:
    """All blocks of the engine with their reference counts, as kvferry expects them (`BlockPool`).

    All KV cache groups allocate from this pool.

    Attributes:
        blocks: all blocks, by id.
    """

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [PoolBlock(number) for number in range(num_blocks)]
        self._free = deque(self.blocks[1:])

    def allocate(self) -> PoolBlock:
        """Allocate a free block, set its reference count to 1, and return it.

        Raises:
            KVFerryError: no block is free.
        """
        if not self._free:
            raise KVFerryError(f"all {len(self.blocks) - 1} blocks are in use; give the engine more blocks")
        block = self._free.popleft()
        block.references = 1
        return block

    def touch(self, blocks: Sequence[Block]) -> None:
        """Increment the reference count of each block."""
        for block in blocks:
            self.blocks[block.block_id].references += 1

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        """Decrement the reference count of each block. A block with a count of 0 becomes free.

        The null block has no reference count, and is ignored.
        """
        for block in ordered_blocks:
            own = self.blocks[block.block_id]
            if own.is_null:
                continue
            own.references -= 1
            if not own.references:
                self._free.append(own)

    def get_num_free_blocks(self) -> int:
        """Return the number of free blocks."""
        return len(self._free)

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Do nothing: this engine has no prefix cache."""


class Tables:
    """Block tables of one request.

    Attributes:
        blocks: blocks of the request by position, for each KV cache group.
    """

    def __init__(self, pool: Pool, groups: Sequence[CacheGroup]) -> None:
        self.blocks: list[list[PoolBlock]] = [[] for _ in groups]
        self._pool, self._groups = pool, groups

    def cover(self, tokens: int, next_token: int) -> None:
        """Allocate the request's missing blocks, and free the blocks that it no longer needs.

        A block is no longer needed if `next_token` and later tokens do not attend to its tokens. A null block
        takes the place of each freed block.

        Args:
            tokens: number of tokens that the blocks must have room for.
            next_token: position of the next token to compute.
        """
        for group, held in zip(self._groups, self.blocks, strict=True):
            first = max(first_attended(group, next_token), 0) // group.block_tokens
            self._pool.free_blocks(held[:first])
            held[:first] = [self._pool.blocks[0]] * first
            while len(held) * group.block_tokens < tokens:
                held.append(self._pool.allocate())

    def free(self) -> None:
        """Return all blocks of the request to the pool."""
        for held in self.blocks:
            self._pool.free_blocks(held)
            held.clear()

    def get_block_ids(self) -> BlockIds:
        """Return the request's block ids by position, for each KV cache group."""
        return tuple([block.block_id for block in held] for held in self.blocks)
