"""The settings of the object tier."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import msgspec

from kvferry.errors import ConfigError
from kvferry.keys.namespace import Namespace
from kvferry.tiers.index.key_table import KeyTable
from kvferry.tiers.names import Medium
from kvferry.tiers.storage_settings import Location, StorageSettings, TrialResult

if TYPE_CHECKING:
    from kvferry.tiers.objects.tier import ObjectTier


class ObjectSettings(StorageSettings, frozen=True):
    """Settings of an object tier, which keeps chunks in object storage that several engines may share.

    Attributes:
        url: URL under which all objects of the tier are stored, such as ``s3://bucket/prefix``.
        options: settings of the client, by option name of the obstore library. Credentials usually come from
            the environment.
        timeout_seconds: time limit for fetching one chunk. Storing a chunk may take twice as long.
    """

    kind: ClassVar[str] = "object"
    medium: ClassVar[Medium] = Medium.NETWORK

    url: str
    options: dict[str, str] = msgspec.field(default_factory=dict)
    timeout_seconds: float = 20.0

    def check(self, where: str) -> None:
        if not 0 < self.timeout_seconds < 3600:
            raise ConfigError(
                f"{where}: timeout_seconds is {self.timeout_seconds}, it must be above 0 and below an hour"
            )

    def check_storage(self) -> None:
        from kvferry.tiers.objects.client import BucketClient  # noqa: PLC0415

        BucketClient(self.url, self.options, self.timeout_seconds)

    @property
    def location(self) -> Location:
        # With all options, because one such as the endpoint can select another store.
        url = self.url.rstrip("/")
        return Location(url, (url, *(f"{name}={value}" for name, value in sorted(self.options.items()))))

    def open(self, namespace: Namespace, table: KeyTable, earlier: Sequence[StorageSettings]) -> ObjectTier:
        # obstore is loaded only where object storage is used.
        from kvferry.tiers.objects.tier import ObjectTier  # noqa: PLC0415

        del earlier
        return ObjectTier(
            self.url, namespace, self.options, timeout_seconds=self.timeout_seconds, table=table
        )

    @property
    def trial_seconds(self) -> float:
        # To connect, and three requests.
        return 4 * self.timeout_seconds

    def try_out(self) -> TrialResult:
        from kvferry.tiers.objects.client import BucketClient  # noqa: PLC0415
        from kvferry.tiers.objects.faults import Unavailable  # noqa: PLC0415

        name = f".kvferry-doctor.{secrets.token_hex(8)}"
        try:
            bucket = BucketClient(self.url, self.options, self.timeout_seconds)
            next(iter(bucket.list()), None)
            bucket.put(name, [b"kvferry doctor"])
            bucket.remove([name])
        except Unavailable as error:
            return TrialResult(f"{self.url}: {error}", error.fault.advice)
        return TrialResult(f"{self.url} can be listed, written to and cleared")
