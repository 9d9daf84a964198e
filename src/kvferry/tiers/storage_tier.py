"""The protocol of a storage tier: a disk, a mount or a bucket, which keeps chunks after engines end.

A chunk is stored and fetched as a whole. Its *body* is its content in host memory, laid out by
`geometry.canonical`: one or more *sections*, each at a page boundary. Many calls block, so call them on
threads of their own. The caller must limit how many threads a hanging mount can block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.common.errors import TransferError
from kvferry.keys.namespace import Namespace
from kvferry.tiers.format.chunk import ChunkGroup
from kvferry.tiers.index import KeyTable, TierKeys, tags_of
from kvferry.tiers.names import GetOutcome, Medium, PutOutcome, TierStats
from kvferry.tiers.tenants import Tenants, TenantUsage


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """The usage of a tier's storage, by all namespaces together, and what others have read in it."""

    used: int | None = None  # bytes in use; None if unknown
    capacity: int | None = None  # maximum bytes; None if unknown
    # Digest (hex) of another namespace with the same model name, which may hold chunks stored with other
    # settings. Empty if there is none, or if the tier's own namespace has chunks.
    same_name_namespace: str = ""
    # Chunks that other engines were told to read in this engine's memory, their bytes, and chunks that they
    # were told to read elsewhere, because too much was read (`tiers.fleet`).
    served: int = 0
    served_bytes: int = 0
    refused: int = 0
    # Address at which other engines read this engine's host memory; empty if they do not.
    address: str = ""
    write_budget_left: float | None = None  # share that is left, 0 to 1; None without a write budget
    # Usage by the labels of tenants; empty if they do not share the storage by weight.
    tenants: Mapping[str, TenantUsage] = field(default_factory=dict)


class LateFetch(TransferError):
    """A fetch has not ended in time. It may write to its memory until `over` is True."""

    over = False


class KeySearch(Protocol):
    """A search for chunks, under way in other threads. The keys that it finds are added to the tier's."""

    @property
    def over(self) -> bool: ...


class StorageTier(Protocol):
    """A storage tier with the chunks of one namespace.

    Other processes may use the same storage. Any thread may call any method. If a disk, a network or another
    process fails, calls return an outcome and raise no exception. Failures are counted, and the first of each
    kind is logged with advice.

    Attributes:
        keys: keys of the chunks that this process believes to be in the tier. `refresh` adds chunks that
            other processes stored, and removes chunks that they evicted. Until then, `get` of an evicted
            chunk misses.
        read_only: True if nothing is stored in the tier.
        find_seconds: maximum time that a search of `find` takes.
    """

    keys: TierKeys
    read_only: ClassVar[bool] = False
    find_seconds: float = 0.0

    def use_tenants(self, tenants: Tenants) -> None:
        """Share the storage among tenants by weight, if the tier evicts. Called once, before any `put`."""
        del tenants

    @property
    def paused(self) -> bool:
        """Whether the tier refuses to fetch for a while, because earlier requests failed."""
        return False

    def contains(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Return a mask of the keys whose chunks the tier is believed to have: bool of shape (len(keys),).

        It comes from memory, without access to the storage. While the tier is paused, it is all False.
        """
        return np.zeros(len(keys), np.bool_) if self.paused else self.keys.contains(tags_of(keys))

    def find(self, keys: Sequence[bytes], hints: Sequence[tuple[str, int]]) -> KeySearch | None:
        """Begin to search for chunks that may be in the tier although `keys` lacks them.

        Args:
            hints: addresses of engines that a request names, unchecked.

        Returns:
            None if there is nothing to search.
        """
        del keys, hints
        return None

    def put(self, key: bytes, group: ChunkGroup, body: memoryview, cold: bool = False) -> PutOutcome:
        """Store a chunk. The call blocks. The caller may change `body` after it returns.

        Args:
            key: 16 to 32 bytes.
            body: writable memory with the sections of the chunk, each at a multiple of 4096 bytes. `put` sets
                the padding after each section to zero. The sections must not change during the call.
                Page-aligned memory avoids a copy.
            cold: True to evict the chunk before all chunks that are not cold, until it is used. Object stores
                evict nothing, and ignore this.

        Returns:
            STORED, PRESENT if the tier had the chunk already, or the reason why the chunk was not stored.

        Raises:
            ChunkError: `key` or `body` has a wrong length, or `group` has more units than fit into the header
                of a chunk; nothing was stored.
        """
        ...

    def get(self, key: bytes, group: ChunkGroup, into: memoryview) -> GetOutcome:
        """Fetch a whole chunk. The call blocks, and does not use `into` after it returns.

        After a miss, the chunk is removed from `keys`, unless the tier was only paused.

        Args:
            key: 16 to 32 bytes.
            group: description of the expected content. A stored chunk with another description is a miss.
            into: writable memory, as long as the chunk's body. The bytes are valid only if HIT is returned.
                Page-aligned memory avoids a copy.

        Returns:
            HIT, or the reason why the chunk was not fetched.

        Raises:
            ChunkError: the length of `into` is not that of the chunk's body; nothing was read.
            LateFetch: the chunk has not arrived in time. The caller must keep `into` until it is `over`. Only
                the fleet tier raises it.
        """
        ...

    def mark_used(self, keys: Sequence[bytes]) -> None:
        """Record that chunks were used now. The first is to be evicted first. The call blocks.

        Keys that the tier lacks are skipped.
        """
        del keys

    def usage(self) -> StoreUsage:
        """Return the usage of the storage. The call blocks, and only one thread may make it at a time."""
        return StoreUsage()

    def refresh(self) -> int:
        """Update `keys` with the chunks that other processes stored or evicted.

        The call blocks. A background thread makes it every few seconds.

        Returns:
            In a directory, the number of folders that were read because they may have changed. In object
            storage, 1 if a listing added or removed keys, else 0.
        """
        ...

    @property
    def stats(self) -> TierStats: ...

    def close(self) -> None:
        """Release open resources. Idempotent. No other method may run during this call or after it."""
        ...


WriteMode: TypeAlias = Literal["through", "back"]


@dataclass(frozen=True, slots=True)
class Location:
    """The location of a tier's chunks."""

    text: str  # description for messages
    key: tuple[str, ...]  # two tiers of one kind with equal keys use the same storage


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The result of `StorageSettings.try_out`, for the operator."""

    found: str  # a sentence without a full stop
    advice: str = ""  # empty if the storage can be used


class StorageSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of one storage tier: one object in the list ``tiers`` of a configuration.

    There is one subclass for each ``type`` of tier. It adds the configuration keys of this type, sets `kind`
    and `medium`, and implements the methods. It need not implement `trial_seconds` and `try_out` if
    `kvferry doctor` has a separate check for the type.

    Attributes:
        kind: value of the configuration key ``type``, and name of the tier in messages and metrics.
        medium: kind of storage that the engine reports for tokens loaded from this tier.
        write: write mode. ``through`` writes a chunk to the tier as soon as the chunk is in host memory.
            ``back`` writes it only when host memory fills up or the engine shuts down.
        load_weight: factor by which the source policy ``weight`` multiplies the number of tokens that this
            tier offers, to compare the offers of sources. Other source policies ignore it.
        min_uses: number of prompts that must have had a chunk before the chunk is written to the tier; 1 to
            write every chunk. With 2 or more, a disk wears less, and the tier has less of what is read once
            more.
        min_prompt_tokens: length in tokens below which the chunks of a prompt are not written to the tier,
            because computing them again takes little.
    """

    kind: ClassVar[str]
    medium: ClassVar[Medium]

    write: WriteMode = "through"
    load_weight: float = 1.0
    min_uses: Annotated[int, msgspec.Meta(ge=1, le=100)] = 1
    min_prompt_tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 30)] = 0

    def check(self, where: str) -> None:
        """Raise ConfigError if a value is out of range. `where` names these settings: ``tiers[1]``.

        The storage is not accessed.
        """
        raise NotImplementedError

    def check_storage(self) -> None:
        """Raise ConfigError if `open` would refuse the storage. Leave nothing behind, and use no network."""
        raise NotImplementedError

    @property
    def location(self) -> Location:
        """The configured location of the chunks, determined without access to the storage."""
        raise NotImplementedError

    def open(self, namespace: Namespace, table: KeyTable, earlier: Sequence[StorageSettings]) -> StorageTier:
        """Open the storage, and return its tier. This may block for a minute or more.

        Args:
            table: hash table of the chunk keys of all tiers of a cache.
            earlier: settings of the storage tiers before this one in the configuration. Their `location` keys
                differ from this one's, but links or mounts can lead to the same storage.

        Raises:
            ConfigError: the settings are invalid, the storage cannot be opened, or one of the `earlier` tiers
                uses the same storage. The engine continues without this tier.
        """
        raise NotImplementedError

    @property
    def trial_seconds(self) -> float:
        raise NotImplementedError

    def try_out(self) -> TrialResult:
        """Write a small object to the storage and remove it, for `kvferry doctor`.

        Raise ConfigError if the settings are invalid, so that nothing was tried.
        """
        raise NotImplementedError
