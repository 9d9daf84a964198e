"""A storage tier of an engine whose ranks run on several machines.

Storage has whole chunks, as those of any engine. So engines of all parallel sizes, on one machine or several,
share a directory or a bucket, and a chunk in storage never lacks a share.

    put   gather the shares of all machines ─▶ put of the tier
    get   get of the tier ─▶ scatter the chunk to all machines ─▶ HIT
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvferry.common.errors import TransferError
from kvferry.tiers.format.chunk import ChunkGroup, aligned
from kvferry.tiers.names import GetOutcome, PutOutcome, TierStats
from kvferry.tiers.shares.exchange import Buffer, ShareExchange
from kvferry.tiers.storage_tier import KeySearch, StorageTier, StoreUsage

logger = logging.getLogger(__name__)

# Threads of each such tier. Each has memory for a whole chunk.
READERS, WRITERS = 4, 2


class ShareTier(StorageTier):
    """A storage tier for chunks that are in host memory as shares. Bodies are this machine's shares."""

    def __init__(self, tier: StorageTier, exchange: ShareExchange) -> None:
        """Wrap a tier of whole chunks. From now on, only this object may use it."""
        self._tier, self._exchange = tier, exchange
        self.keys, self.find_seconds = tier.keys, tier.find_seconds
        self.read_only = tier.read_only  # type: ignore[misc]  # a constant of each class of tiers
        self._reads, self._writes = exchange.take_buffers(READERS), exchange.take_buffers(WRITERS)

    @property
    def paused(self) -> bool:
        return bool(self._exchange.lost) or self._tier.paused

    def contains(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        return np.zeros(len(keys), np.bool_) if self._exchange.lost else self._tier.contains(keys)

    def find(self, keys: Sequence[bytes], hints: Sequence[tuple[str, int]]) -> KeySearch | None:
        return self._tier.find(keys, hints)

    def put(self, key: bytes, group: ChunkGroup, body: memoryview, cold: bool = False) -> PutOutcome:
        if self._exchange.lost:
            return PutOutcome.IO_ERROR
        chunk = self._writes.get()
        try:
            self._exchange.move("READ", group.name, body, chunk)
        except TransferError as error:
            # The buffer is not used again, because bytes may still arrive in it.
            logger.warning("chunk %s is not stored: %s", key.hex(), error)
            return PutOutcome.IO_ERROR
        try:
            return self._tier.put(key, group, _body_in(chunk, group), cold)
        finally:
            self._writes.put(chunk)

    def get(self, key: bytes, group: ChunkGroup, into: memoryview) -> GetOutcome:
        if self._exchange.lost:
            return GetOutcome.IO_ERROR
        chunk = self._reads.get()
        try:
            outcome = self._tier.get(key, group, _body_in(chunk, group))
            if outcome is GetOutcome.HIT:
                self._exchange.move("WRITE", group.name, into, chunk)
        except TransferError as error:
            logger.warning("chunk %s is not loaded: %s", key.hex(), error)
            outcome = GetOutcome.IO_ERROR
        finally:
            self._reads.put(chunk)
        return outcome

    def mark_used(self, keys: Sequence[bytes]) -> None:
        self._tier.mark_used(keys)

    def usage(self) -> StoreUsage:
        return self._tier.usage()

    def refresh(self) -> int:
        return self._tier.refresh()

    @property
    def stats(self) -> TierStats:
        return self._tier.stats

    def close(self) -> None:
        self._tier.close()


def _body_in(chunk: Buffer, group: ChunkGroup) -> memoryview:
    return chunk[: sum(aligned(section.total_bytes) for section in group.sections)].data
