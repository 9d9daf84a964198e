"""Blocks that loads fill in part: nobody but the request they were loaded for may use them.

A source with smaller blocks has only the end of the block in which a window begins. The request that waits
for it looks no farther back; but vLLM keeps the block for every prompt that begins alike, and one that ends
earlier would look farther back. So such a block is taken out of vLLM's prefix cache as soon as it is in it,
and is neither stored nor offered to other engines.

vLLM caches a block once, when all of it is computed: as the load's request goes on, or tokens later, if the
window is shorter than the block. Until then, or until the request sees it no more, the block is *watched*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.connector.engine import BlockIds, BlockPool, Request
from kvferry.geometry import Group
from kvferry.planning.descriptors import Int64s
from kvferry.planning.select import NULL_BLOCK, LoadSpan, first_independent, partial_block


@dataclass(frozen=True, slots=True)
class _Part:
    """A block that a load fills in part.

    Attributes:
        group, at: where it is in the request's tables.
        block: its id.
        until: tokens computed from which on the request looks at it no more.
    """

    group: int
    at: int
    block: int
    until: int


@dataclass(slots=True)
class _Watch:
    """Parts of a request that vLLM has not cached yet.

    Attributes:
        request: vLLM's.
        admission: its preemptions when it was admitted; when there are more, its blocks were given back.
        parts: these.
    """

    request: Request
    admission: int
    parts: list[_Part]


class PartBlocks:
    """The partly loaded blocks of an engine. Only the engine's thread calls it."""

    def __init__(self, groups: Sequence[Group], pool: BlockPool, refused: bool = False) -> None:
        """Begin without any.

        Args:
            groups: the engine's, as a rank has them.
            pool: the engine's block pool.
            refused: there must be none.
        """
        self._groups, self._pool, self._refused = tuple(groups), pool, refused
        self._parts: dict[str, list[_Part]] = {}
        self._loading: dict[str, _Watch] = {}
        self._going_on: dict[str, _Watch] = {}
        self._looked = False
        self._doubted: set[str] = set()

    def doubt(self, request_id: str) -> None:
        """Note a request whose blocks another connector fills during a step: all may prove wrong."""
        self._doubted.add(request_id)

    def refuses(self, span: LoadSpan, alignments: Sequence[int]) -> bool:
        """Return whether a load would fill a block in part although none may be; arguments as of `begin`."""
        return self._refused and any(
            partial_block(group.kind, group.attention_span, group.block_tokens, span, alignment_tokens)
            is not None
            for group, alignment_tokens in zip(self._groups, alignments, strict=True)
        )

    def begin(
        self, request: Request, tables: Sequence[Int64s], span: LoadSpan, alignments: Sequence[int]
    ) -> None:
        """Note the blocks that a load fills in part. Forgets those of the request's earlier loads.

        Args:
            request: the request.
            tables: destination blocks by position per group, int64.
            span: how much is loaded.
            alignments: tokens per group, see `partial_block`.
        """
        self.forget(request.request_id)
        found = []
        for number, (group, ids, alignment_tokens) in enumerate(
            zip(self._groups, tables, alignments, strict=True)
        ):
            size = group.block_tokens
            at = partial_block(group.kind, group.attention_span, size, span, alignment_tokens)
            if at is not None:
                until = first_independent(group.kind, group.attention_span, (at + 1) * size)
                found.append(_Part(number, at, int(ids[at]), until))
        if found:
            self._parts[request.request_id] = found
            self._loading[request.request_id] = _Watch(request, request.num_preemptions, list(found))

    def evict(self) -> bool:
        """Take partly loaded blocks out of the engine's prefix cache; return whether any was in it.

        In a scheduling pass what is running comes first. Of requests that had gone on before it, blocks are
        cached by the time the first request is looked up, so they are looked at once in a pass.
        """
        found = self._evict(self._loading)
        if not self._looked:
            self._looked = True
            found |= self._evict(self._going_on)
        return found

    def end_pass(self) -> None:
        """End a scheduling pass."""
        self._looked = False
        self.evict()
        self._looked = False

    def goes_on(self, request_id: str) -> None:
        """Note that the engine has cached a request's loaded blocks, except those that are not full yet."""
        if request_id in self._loading:
            self._evict(self._loading)
            if (watch := self._loading.pop(request_id, None)) is not None:
                self._going_on[request_id] = watch

    def without(self, request_id: str, tables: BlockIds) -> BlockIds:
        """Return block tables of a request with null blocks in place of those that a load filled in part."""
        if request_id in self._doubted:
            return tuple([NULL_BLOCK] * len(ids) for ids in tables)
        parts = self._parts.get(request_id)
        if parts is None:
            return tables
        whole = [list(ids) for ids in tables]
        for part in parts:
            ids = whole[part.group]
            if part.at < len(ids) and ids[part.at] == part.block:
                ids[part.at] = NULL_BLOCK
        return tuple(whole)

    def forget(self, request_id: str) -> None:
        """Forget a request whose blocks are not its own any more, or are computed anew."""
        self._doubted.discard(request_id)
        for of in (self._parts, self._loading, self._going_on):
            of.pop(request_id, None)

    def _evict(self, watched: dict[str, _Watch]) -> bool:
        cached: set[int] = set()
        for name, watch in list(watched.items()):
            request = watch.request
            if request.num_preemptions != watch.admission:
                del watched[name]
                continue
            seen = [part for part in watch.parts if request.num_computed_tokens < part.until]
            now = {part.block for part in seen if self._pool.blocks[part.block].block_hash is not None}
            watch.parts = [part for part in seen if part.block not in now]
            cached |= now
            if not watch.parts:
                del watched[name]
        if cached:
            self._pool.evict_blocks(cached)
        return bool(cached)
