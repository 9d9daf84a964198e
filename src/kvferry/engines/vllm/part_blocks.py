"""Blocks that loads fill in part: nobody but the request they were loaded for may use them.

A source with smaller blocks has only the end of the block in which a window begins. The request that waits
for it looks no farther back; but vLLM keeps the block for every prompt that begins alike, and one that ends
earlier would look farther back. So such a block is taken out of vLLM's prefix cache as soon as it is in it,
and is neither stored nor offered to other engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvferry.engines.vllm.meta import BlockIds
from kvferry.geometry import Group
from kvferry.planning.select import NULL_BLOCK, Span, part_block


class PartBlocks:
    """See the module. The engine's thread calls it."""

    def __init__(self, groups: Sequence[Group], pool: Any) -> None:
        """None.

        Args:
            groups: the engine's, as a rank has them.
            pool: the engine's block pool.
        """
        self._groups, self._pool = tuple(groups), pool
        self._parts: dict[str, frozenset[int]] = {}
        self._not_cached_yet: dict[str, frozenset[int]] = {}

    def begin(self, request_id: str, tables: BlockIds, span: Span, grains: Sequence[int]) -> None:
        """A load fills these tables; what an earlier one filled in part is the request's no more.

        Args:
            request_id: whose.
            tables: destination blocks by position per group.
            span: how much is loaded.
            grains: tokens per group, see `part_block`.
        """
        self.forget(request_id)
        found = set()
        for group, ids, grain in zip(self._groups, tables, grains, strict=True):
            at = part_block(group.kind, group.reach, group.block_tokens, span, grain)
            if at is not None:
                found.add(ids[at])
        if found:
            self._parts[request_id] = self._not_cached_yet[request_id] = frozenset(found)

    def evict(self) -> bool:
        """Take those that the engine has cached since the last call out of its cache; whether any were."""
        if not self._not_cached_yet:
            return False
        cached = {
            block
            for blocks in self._not_cached_yet.values()
            for block in blocks
            if self._pool.blocks[block].block_hash is not None
        }
        if cached:
            self._pool.evict_blocks(cached)
        return bool(cached)

    def computing(self, request_id: str) -> None:
        """The engine has cached what was loaded, as far as it does: it goes on from there."""
        if request_id in self._not_cached_yet:
            self.evict()
            del self._not_cached_yet[request_id]

    def without(self, request_id: str, tables: BlockIds) -> BlockIds:
        """A request's block tables as far as their blocks are whole: null blocks instead of others."""
        parts = self._parts.get(request_id)
        if parts is None:
            return tables
        return tuple([NULL_BLOCK if block in parts else block for block in ids] for ids in tables)

    def forget(self, request_id: str) -> None:
        """The request's blocks are not its own any more."""
        self._parts.pop(request_id, None)
        self._not_cached_yet.pop(request_id, None)
