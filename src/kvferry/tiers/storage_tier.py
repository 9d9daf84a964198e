"""What a slow tier does: storage that takes a thread's time, and keeps chunks when the engines have gone.

A chunk goes to it and comes from it whole, by way of host memory: `body` and `into` are a slot of the arena,
whose content is the chunk's sections as `geometry.canonical` places them. The calls that block are for
threads of their own; who makes them bounds how many of those may hang in a mount that hangs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvferry.tiers.files.usage import StoreUsage
from kvferry.tiers.format.chunk import ChunkGroup
from kvferry.tiers.index.key_table import TierKeys, tags_of
from kvferry.tiers.outcome import GetOutcome, PutOutcome, TierStats


class StorageTier(Protocol):
    """The chunks of one namespace, in storage that other processes may share. Any thread may make any call.

    Nothing that can be foreseen raises: what a disk, a network or another process does is an outcome. It is
    counted, and the first of each kind is logged with what to do about it.

    Attributes:
        name: "file" or "object": what metrics and messages call it.
        tags: of the chunks that are there, as far as this process knows. What others have stored or evicted
            shows after the next `refresh`; a `get` may find absent what is known.
    """

    name: str
    tags: TierKeys

    @property
    def resting(self) -> bool:
        """Whether nothing is to be asked for now, whatever is known."""
        return False

    def known(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Which of `keys` can be asked for, from memory alone: bool of shape (len(keys),)."""
        return np.zeros(len(keys), np.bool_) if self.resting else self.tags.known(tags_of(keys))

    def put(self, key: bytes, group: ChunkGroup, body: memoryview) -> PutOutcome:
        """Keep a chunk. Blocks; when it returns, nothing reads `body` any more.

        Args:
            key: 16 to 32 bytes.
            group: what the chunk holds.
            body: its sections, each from a page (4096 bytes) on. What pads them is set to zero; the rest is
                read, and must not change meanwhile. Memory that begins at a page is not copied.

        Raises:
            ChunkError: key, group and body are no chunk: the caller's mistake, nothing was done.
        """
        ...

    def get(self, key: bytes, group: ChunkGroup, into: memoryview) -> GetOutcome:
        """Fetch a chunk, whole. Blocks; when it returns, nothing writes `into` any more.

        A chunk that turns out absent, damaged or unreadable is not `known` any more.

        Args:
            key: 16 to 32 bytes.
            group: what it must hold; a chunk of another shape is no hit.
            into: writable, as long as the body of such a chunk. Overwritten; unless this is a hit, what is in
                it means nothing. Memory that begins at a page is read into directly.

        Raises:
            ChunkError: `into` has another length: the caller's mistake, nothing was done.
        """
        ...

    def used(self, keys: Sequence[bytes]) -> None:
        """Note that chunks were used, in this order: the last is what should stay longest. Blocks.

        A tier that does not evict by use has nothing to note.

        Args:
            keys: of chunks, whether or not they are here.
        """
        del keys

    def had(self, key: bytes) -> bool:
        """Whether a chunk was known lately and is not any more, as far as that is remembered. From memory."""
        del key
        return False

    def around(self) -> StoreUsage:
        """What lies around the namespace. Blocks; one thread at a time calls it, after what may change it."""
        return StoreUsage()

    def refresh(self) -> int:
        """Learn what other processes have stored and evicted. Blocks; a thread calls it every few seconds.

        Returns:
            How many listings had changed.
        """
        ...

    @property
    def stats(self) -> TierStats:
        """What this process has done with it since it was opened."""
        ...

    def close(self) -> None:
        """Let go of what is open; no call may be under way or follow. Idempotent."""
        ...
