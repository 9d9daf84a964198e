"""The base class of a storage tier's settings, which also open the tier.

Other code uses a kind of storage tier only through its subclass, which `tiers.registry` finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import msgspec

from kvferry.keys.namespace import Namespace
from kvferry.tiers.index.key_table import KeyTable
from kvferry.tiers.names import Medium
from kvferry.tiers.storage_tier import StorageTier

WriteMode: TypeAlias = Literal["through", "back"]


@dataclass(frozen=True, slots=True)
class Location:
    """The location of a tier's chunks.

    Attributes:
        text: description for messages.
        key: two tiers of one kind with equal keys use the same storage.
    """

    text: str
    key: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The result of `StorageSettings.try_out`.

    Attributes:
        found: the result for the operator, as a sentence without a full stop.
        advice: advice for the operator; empty if the storage can be used.
    """

    found: str
    advice: str = ""


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
    """

    kind: ClassVar[str]
    medium: ClassVar[Medium]

    write: WriteMode = "through"
    load_weight: float = 1.0

    def check(self, where: str) -> None:
        """Check the values without access to the storage.

        Args:
            where: name of these settings in the configuration, for messages, such as ``tiers[1]``.

        Raises:
            ConfigError: a value is out of range.
        """
        raise NotImplementedError

    def check_storage(self) -> None:
        """Check that the engine can use the storage, and leave nothing behind. Do not use the network.

        Raises:
            ConfigError: `open` would refuse the settings or the storage.
        """
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
        """Time limit for `try_out`, in seconds."""
        raise NotImplementedError

    def try_out(self) -> TrialResult:
        """Write a small object to the storage and remove it, for `kvferry doctor`.

        Raises:
            ConfigError: the settings are invalid, so nothing was tried.
        """
        raise NotImplementedError
