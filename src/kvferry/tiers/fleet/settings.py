"""The settings of the fleet tier."""

from __future__ import annotations

from typing import ClassVar
from urllib.parse import urlsplit

from kvferry.common.errors import ConfigError
from kvferry.common.units import parse_size
from kvferry.tiers.names import FLEET, Medium
from kvferry.tiers.storage_tier import Location, StorageSettings, StorageTier, TrialResult
from kvferry.transport.addresses import parse_engine
from kvferry.transport.handshake import Address

_TRIAL_SECONDS = 5.0
MAX_ASKED = 64  # maximum number of engines that are asked for each prompt
_SCHEMES = ("valkey", "valkeys", "redis", "rediss", "unix")


class FleetSettings(StorageSettings, frozen=True):
    """Settings of the fleet tier: engines that read chunks in each other's host memory.

    Attributes:
        port: port on which this engine answers other engines, to which the engine's data-parallel index is
            added; 0 for a free port of the setting ``ports``, or any.
        engines: engines that are asked for the chunks of each prompt, such as ``10.0.0.1:5700``, with the
            port of their fleet tier.
        directory: URL of a Valkey or Redis server in which the engines of the fleet publish their chunks,
            such as ``valkey://10.0.0.9:6379``; None for none.
        find_seconds: maximum time that a request waits for the engines or the directory to answer.
        serve_per_second: maximum bytes per second that other engines read from this one: a number, or a text
            such as ``2GiB``; None for no limit.
    """

    kind: ClassVar[str] = FLEET
    medium: ClassVar[Medium] = Medium.PEER

    port: int = 0
    engines: tuple[str, ...] = ()
    directory: str | None = None
    find_seconds: float = 0.05
    serve_per_second: int | str | None = None

    def check(self, where: str) -> None:
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"{where}: port is {self.port}; it must be 0 to 65535")
        if len(self.engines) > MAX_ASKED:
            raise ConfigError(
                f"{where}: engines names {len(self.engines)} engines, and each prompt would ask all of them; "
                f"name at most {MAX_ASKED}, or set directory"
            )
        for number, text in enumerate(self.engines):
            if parse_engine(text) is None:
                raise ConfigError(
                    f"{where}: engines[{number}] is {text!r}; give host and port of an engine's fleet tier, "
                    "such as 10.0.0.1:5700"
                )
        if not 0 < self.find_seconds <= 10:
            raise ConfigError(
                f"{where}: find_seconds is {self.find_seconds}; it must be above 0 and at most 10"
            )
        if self.serve_per_second is not None and parse_size(self.serve_per_second) < 1 << 20:
            raise ConfigError(
                f"{where}: serve_per_second is {self.serve_per_second!r}; it must be 1MiB or more"
            )
        if self.directory is not None:
            url = urlsplit(self.directory)
            if url.scheme not in _SCHEMES or not (url.hostname or url.path):
                raise ConfigError(
                    f"{where}: directory is {self.directory!r}; give the URL of a Valkey or Redis server, "
                    "such as valkey://10.0.0.9:6379"
                )

    def check_storage(self) -> None:
        """Do nothing: other engines may start later."""

    @property
    def location(self) -> Location:
        return Location("the host memory of other engines", ())

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Addresses of `engines`."""
        return tuple(found for text in self.engines if (found := parse_engine(text)) is not None)

    @property
    def trial_seconds(self) -> float:
        return 2 * _TRIAL_SECONDS

    def try_out(self) -> TrialResult:
        if self.directory is None:
            return TrialResult("other engines are asked when they run")
        from kvferry.tiers.fleet.directory import ping, without_password  # noqa: PLC0415 - loads the client

        if failure := ping(self.directory, _TRIAL_SECONDS):
            return TrialResult(
                f"the directory {without_password(self.directory)} does not answer: {failure}",
                "start the server, or correct the URL; until then only the engines that are named are asked",
            )
        return TrialResult(f"the directory {without_password(self.directory)} answers")

    def open(self, *_: object) -> StorageTier:
        """Raise ConfigError: an engine opens this tier together with its host memory."""
        raise ConfigError("the fleet tier needs an engine with host memory; it cannot be opened by itself")
