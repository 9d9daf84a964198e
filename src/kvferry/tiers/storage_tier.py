"""The protocol of a tier in storage: a disk, a mount or a bucket, which keeps chunks when engines have ended.

A chunk moves whole, by way of host memory: `body` and `into` are slots of the arena, whose content is the
chunk's sections as `geometry.canonical` places them. Calls that block belong on threads of their own. The
caller bounds how many threads a mount that hangs may block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvferry.tiers.format.chunk import ChunkGroup
from kvferry.tiers.index.key_table import tags_of
from kvferry.tiers.index.tier_keys import TierKeys
from kvferry.tiers.outcome import GetOutcome, PutOutcome, TierStats


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """How full a tier's storage is, and a hint at why a namespace is empty.

    Attributes:
        used, capacity: bytes of all namespaces together; None if unknown.
        same_name_namespace: digest, in hex, of another namespace whose model has the same name as this one's.
            Set only while this namespace is empty; else, or if there is none, an empty string.
    """

    used: int | None = None
    capacity: int | None = None
    same_name_namespace: str = ""


class StorageTier(Protocol):
    """The chunks of one namespace, in storage that other processes may share. Any thread may make any call.

    Failures of a disk, a network or another process are outcomes, not exceptions. They are counted, and the
    first of each kind is logged with what to do about it.

    Attributes:
        name: "file" or "object", as in metrics and messages.
        keys: the chunks that this process knows to be there. `refresh` adds and removes what other processes
            stored and evicted; until then a `get` may miss a known chunk.
    """

    name: str
    keys: TierKeys

    @property
    def paused(self) -> bool:
        """Whether the tier currently refuses all requests because earlier ones failed."""
        return False

    def contains(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Return which keys can be fetched, from memory alone: bool of shape (len(keys),)."""
        return np.zeros(len(keys), np.bool_) if self.paused else self.keys.contains(tags_of(keys))

    def put(self, key: bytes, group: ChunkGroup, body: memoryview) -> PutOutcome:
        """Store a chunk. Blocks; does not read `body` after it has returned.

        Args:
            key: 16 to 32 bytes.
            group: what the chunk holds.
            body: its sections, each at a multiple of 4096 bytes. The padding between them is set to zero; the
                rest is read and must not change meanwhile. Page-aligned memory is not copied.

        Raises:
            ChunkError: key, group and body do not form a chunk. Nothing was stored.
        """
        ...

    def get(self, key: bytes, group: ChunkGroup, into: memoryview) -> GetOutcome:
        """Fetch a whole chunk. Blocks; does not write `into` after it has returned.

        A chunk that is absent, damaged or unreadable is removed from `keys`.

        Args:
            key: 16 to 32 bytes.
            group: what the chunk must hold; a chunk of another shape is not a hit.
            into: writable, as long as the chunk's body. Overwritten; its content is valid only after a hit.
                Page-aligned memory is read into directly.

        Raises:
            ChunkError: `into` has another length. Nothing was read.
        """
        ...

    def mark_used(self, keys: Sequence[bytes]) -> None:
        """Record that chunks were used, the most valuable one last. Blocks.

        Does nothing in a tier that does not evict by use.

        Args:
            keys: of chunks that need not be in the tier.
        """
        del keys

    def usage(self) -> StoreUsage:
        """Return how full the storage is. Blocks; one thread at a time calls it."""
        return StoreUsage()

    def refresh(self) -> int:
        """Learn what other processes stored and evicted. Blocks; a thread calls it every few seconds.

        Returns:
            The number of listings that had changed.
        """
        ...

    @property
    def stats(self) -> TierStats:
        """What this process has done with the tier since it was opened."""
        ...

    def close(self) -> None:
        """Release what is open. No call may be under way or follow. Idempotent."""
        ...
