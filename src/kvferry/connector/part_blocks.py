"""Blocks that a load fills only in part. Only the request that they were loaded for may use them.

If a source has smaller blocks than this engine, it may have only the end of the block in which an attention
window begins. The waiting request does not attend to the missing tokens. But vLLM would reuse the block for
any prompt with the same prefix, and a shorter prompt would attend to them. So such a block is evicted from
vLLM's prefix cache as soon as it is there. It is neither stored nor offered to other engines.

vLLM caches a block once, when all its tokens are computed: when the request goes on after its load, or some
tokens later if the window is shorter than the block. The block is *watched* until then, or until the request
no longer attends to it.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass

from kvferry.connector.engine import BlockIds, BlockPool, Request
from kvferry.geometry import Group
from kvferry.planning.descriptors import Int64s
from kvferry.planning.select import NULL_BLOCK, LoadSpan, first_independent, partial_block


@dataclass(frozen=True, slots=True)
class _Part:
    """A block that a load fills only in part.

    Attributes:
        at: position of the block in the request's block table.
        until: number of computed tokens at which the request stops attending to the block.
    """

    group: int
    at: int
    block: int
    until: int


@dataclass(slots=True)
class _Watch:
    """The partly filled blocks of a request that are not in vLLM's prefix cache yet.

    Attributes:
        admission: `request.num_preemptions` when the request was admitted.
        parts: those that vLLM has not cached yet and that the request still attends to.
    """

    request: Request
    admission: int
    parts: list[_Part]


class PartBlocks:
    """The blocks that loads have filled only in part. Only the engine's thread calls it.

    If `refused` is True, no load may fill a block only in part.
    """

    def __init__(self, groups: Sequence[Group], pool: BlockPool, refused: bool = False) -> None:
        self._groups, self._pool, self._refused = tuple(groups), pool, refused
        self._parts: dict[str, list[_Part]] = {}
        self._loading: dict[str, _Watch] = {}
        self._resumed: dict[str, _Watch] = {}
        self._looked = False
        self._distrusted: set[str] = set()

    def distrust_all(self, request_id: str) -> None:
        """Treat all blocks of a request as partly loaded, because another connector loads its KV."""
        # If the other connector's load fails, this connector learns of it too late, and may have stored wrong
        # KV by then. So these blocks are neither stored nor offered to peers.
        self._distrusted.add(request_id)

    def refuses(self, span: LoadSpan, alignments: Sequence[int]) -> bool:
        """Return True if a load must be refused because it would fill a block only in part.

        Args:
            alignments: of the loaded content in tokens, for each KV cache group, as in `Source.alignments`.
        """
        return self._refused and any(
            partial_block(group, span, alignment_tokens) is not None
            for group, alignment_tokens in zip(self._groups, alignments, strict=True)
        )

    def begin(
        self, request: Request, tables: Sequence[Int64s], span: LoadSpan, alignments: Sequence[int]
    ) -> None:
        """Record the blocks that a load fills only in part, and forget those of the request's earlier load.

        Args:
            tables: destination block table of each KV cache group, int64, indexed by block position.
            alignments: as for `refuses`.
        """
        self.forget(request.request_id)
        found = []
        for number, (group, ids, alignment_tokens) in enumerate(
            zip(self._groups, tables, alignments, strict=True)
        ):
            at = partial_block(group, span, alignment_tokens)
            if at is not None:
                until = first_independent(group, (at + 1) * group.block_tokens)
                found.append(_Part(number, at, int(ids[at]), until))
        if found:
            self._parts[request.request_id] = found
            self._loading[request.request_id] = _Watch(request, request.num_preemptions, found)

    def evict(self) -> bool:
        """Evict partly loaded blocks from the engine's prefix cache; return True if any was in the cache.

        Admission calls this for every waiting request of a scheduling pass.
        """
        found = self._evict(self._loading)
        if self._resumed and not self._looked:
            # Once per pass: the engine has scheduled all running requests before the first waiting one.
            self._looked = True
            found |= self._evict(self._resumed)
        return found

    @property
    def agenda(self) -> tuple[Sized, ...]:
        return self._loading, self._resumed

    def end_pass(self) -> None:
        """End a scheduling pass: evict the partly loaded blocks that the engine cached during the pass."""
        self._evict(self._loading)
        self._evict(self._resumed)
        self._looked = False

    def on_resumed(self, request_id: str) -> None:
        """Record that a request continues after its load, and evict its partly loaded blocks."""
        if request_id in self._loading:
            # The engine has just put all full blocks of the load into its prefix cache.
            self._evict(self._loading)
            if (watch := self._loading.pop(request_id, None)) is not None:
                self._resumed[request_id] = watch

    def masked_tables(self, request_id: str, tables: BlockIds) -> BlockIds:
        """Return a request's block tables with null blocks in place of its partly loaded blocks."""
        if request_id in self._distrusted:
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
        """Forget a request's partly loaded blocks, because they are freed or will be computed instead."""
        self._distrusted.discard(request_id)
        for of in (self._parts, self._loading, self._resumed):
            of.pop(request_id, None)

    def _evict(self, watched: dict[str, _Watch]) -> bool:
        cached: set[int] = set()
        for name, watch in list(watched.items()):
            request = watch.request
            if request.num_preemptions != watch.admission:
                del watched[name]  # a preemption has freed the request's blocks
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
