"""The protocol of a storage tier: a disk, a mount or a bucket, which keeps chunks after engines end.

A chunk moves as a whole through host memory. `body` and `into` are slots of the arena. They contain the
chunk's sections as `geometry.canonical` places them. Calls that block belong on threads of their own. The
caller limits how many threads a hanging mount can block.
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
    """The bytes in use of a tier's storage, and a hint why a namespace is empty.

    Attributes:
        used, capacity: bytes of all namespaces together; None if unknown.
        same_name_namespace: digest, in hex, of another namespace whose model has the same name as this one's.
            Empty if there is none, or while this namespace has chunks.
    """

    used: int | None = None
    capacity: int | None = None
    same_name_namespace: str = ""


class StorageTier(Protocol):
    """The chunks of one namespace, in storage that processes may share. Any thread may make any call.

    Failures of a disk, a network or another process are outcomes, not exceptions. They are counted, and the
    first of each kind is logged with what to do about it.

    Attributes:
        keys: keys of the chunks that this process knows to be in the tier. `refresh` adds chunks that other
            processes stored and removes those that they evicted. Until then `get` may miss a known chunk.
    """

    keys: TierKeys

    @property
    def paused(self) -> bool:
        """Return whether the tier currently refuses all requests because earlier ones failed."""
        return False

    def contains(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Return which keys can be fetched, from memory alone: bool of shape (len(keys),)."""
        return np.zeros(len(keys), np.bool_) if self.paused else self.keys.contains(tags_of(keys))

    def put(self, key: bytes, group: ChunkGroup, body: memoryview) -> PutOutcome:
        """Store a chunk. Blocks, and does not read `body` after it returns.

        Args:
            key: 16 to 32 bytes.
            group: group, shape and tokens of the chunk.
            body: sections of the chunk, each at a multiple of 4096 bytes. `put` sets the padding between them
                to zero. The sections must not change during the call. Page-aligned memory is not copied.

        Raises:
            ChunkError: key, group and body do not form a chunk; nothing was stored.
        """
        ...

    def get(self, key: bytes, group: ChunkGroup, into: memoryview) -> GetOutcome:
        """Fetch a whole chunk. Blocks, and does not write `into` after it returns.

        A chunk that is absent, damaged or unreadable is removed from `keys`.

        Args:
            key: 16 to 32 bytes.
            group: expected group, shape and tokens; a chunk of another shape is not a hit.
            into: writable memory, as long as the chunk's body. Its content is valid only after a hit.
                Storage is read directly into page-aligned memory.

        Raises:
            ChunkError: `into` has another length; nothing was read.
        """
        ...

    def mark_used(self, keys: Sequence[bytes]) -> None:
        """Record that chunks were used, the most valuable one last. Blocks.

        Does nothing in a tier that does not evict by use.

        Args:
            keys: keys of chunks, which need not be in the tier.
        """
        del keys

    def usage(self) -> StoreUsage:
        """Return the usage of the storage. Blocks, and must be called by one thread at a time."""
        return StoreUsage()

    def refresh(self) -> int:
        """Update `keys` with chunks that other processes stored or evicted. Blocks; called every few seconds.

        Returns:
            The number of listings that had changed.
        """
        ...

    @property
    def stats(self) -> TierStats:
        """Counts of this process since it opened the tier."""
        ...

    def close(self) -> None:
        """Release open resources. Idempotent; no other call may be under way or follow."""
        ...
