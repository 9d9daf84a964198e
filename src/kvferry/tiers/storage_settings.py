"""The protocol of a kind of storage tier: its settings, and how to open one.

A subclass of `StorageSettings` is all that other code knows of a kind. `tiers.registry` lists the subclasses.
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
        text: the location, for messages.
        key: a value that is equal for two tiers with the same chunks.
    """

    text: str
    key: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The result of `StorageSettings.try_out`.

    Attributes:
        found: a sentence without its full stop.
        advice: what to do; empty if the storage can be used.
    """

    found: str
    advice: str = ""


class StorageSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of one storage tier: an object with this ``type`` in the list ``tiers`` of a configuration.

    A subclass adds its keys, sets `kind` and `medium`, and implements all methods.

    Attributes:
        kind: value of ``type``, and name of the tier in messages and metrics.
        medium: medium under which the engine counts tokens from this tier.
        write: when chunks are written: ``through``, as soon as one is in host memory, or ``back``, when host
            memory fills up.
        load_weight: weight of tokens from here, for source policy ``weight``.
    """

    kind: ClassVar[str]
    medium: ClassVar[Medium]

    write: WriteMode = "through"
    load_weight: float = 1.0

    def check(self, where: str) -> None:
        """Check values without looking at the storage.

        Args:
            where: names the object in messages, such as ``tiers[1]``.

        Raises:
            ConfigError: a value is out of range.
        """
        raise NotImplementedError

    @property
    def location(self) -> Location:
        """The location of the chunks, without looking at the storage."""
        raise NotImplementedError

    def open(self, namespace: Namespace, table: KeyTable, earlier: Sequence[StorageSettings]) -> StorageTier:
        """Open the storage. May block for a few seconds.

        Args:
            namespace: namespace of the chunks.
            table: key table that the tiers of a cache share.
            earlier: tiers that come before this one. They have other locations, but it may turn out only now
                that two locations are the same storage.

        Raises:
            ConfigError: it cannot be used; the engine continues without this tier.
        """
        raise NotImplementedError

    @property
    def trial_seconds(self) -> float:
        """The longest time that `try_out` may take."""
        raise NotImplementedError

    def try_out(self) -> TrialResult:
        """Write something small to the storage, remove it, and return what happened; for `kvferry doctor`.

        Raises:
            ConfigError: the storage cannot be used with these settings.
        """
        raise NotImplementedError
