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
        """Check that the timeout is in range.

        Args:
            where: name of these settings in the configuration, for messages.

        Raises:
            ConfigError: the timeout is out of range.
        """
        if not 0 < self.timeout_seconds < 3600:
            raise ConfigError(
                f"{where}: timeout_seconds is {self.timeout_seconds}, it must be above 0 and below an hour"
            )

    def check_storage(self) -> None:
        """Check the URL and the options without access to the network.

        Raises:
            ConfigError: `BucketClient` refuses the URL or an option.
        """
        from kvferry.tiers.objects.client import BucketClient  # noqa: PLC0415

        BucketClient(self.url, self.options, self.timeout_seconds)

    @property
    def location(self) -> Location:
        """The location of the chunks: the URL with all options.

        Options belong to the location, because an option such as the endpoint can select another store.
        """
        url = self.url.rstrip("/")
        return Location(url, (url, *(f"{name}={value}" for name, value in sorted(self.options.items()))))

    def open(self, namespace: Namespace, table: KeyTable, earlier: Sequence[StorageSettings]) -> ObjectTier:
        """Connect to the store, and return the object tier.

        Args:
            namespace: namespace (scope of chunk keys) of the chunks.
            table: hash table of the chunk keys of all tiers of a cache.
            earlier: settings of the storage tiers before this one in the configuration; not used.

        Raises:
            ConfigError: `BucketClient` refuses the URL or an option.
        """
        # obstore is loaded only where object storage is used.
        from kvferry.tiers.objects.tier import ObjectTier  # noqa: PLC0415

        del earlier
        return ObjectTier(
            self.url, namespace, self.options, timeout_seconds=self.timeout_seconds, table=table
        )

    @property
    def trial_seconds(self) -> float:
        """Time limit for a trial write (`try_out`), in seconds.

        It allows for connecting and for three requests.
        """
        return 4 * self.timeout_seconds

    def try_out(self) -> TrialResult:
        """Try the store out: list objects, write a small object and remove it. Return the result.

        Raises:
            ConfigError: `BucketClient` refuses the URL or an option.
        """
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
