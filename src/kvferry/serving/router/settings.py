"""What a router is told."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from kvferry.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Engines and limits of a router.

    Attributes:
        prefill: base URLs of the prefill engines, at least one.
        decode: base URLs of the decode engines, at least one.
        connect_seconds: when an engine that does not accept a connection counts as dead.
        prefill_seconds: when a prefill that has not answered is given up.
        decode_idle_seconds: when a decode engine that sends nothing is given up.
        probe_seconds: between two looks at an engine that is down.
        max_body_bytes: of a request.
        trust_kv_params: keep ``kv_transfer_params`` that callers send; they are dropped otherwise.
    """

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    connect_seconds: float = 3.0
    prefill_seconds: float = 120.0
    decode_idle_seconds: float = 600.0
    probe_seconds: float = 1.0
    max_body_bytes: int = 64 << 20
    trust_kv_params: bool = False

    def __post_init__(self) -> None:
        """Check what a router cannot work with.

        Raises:
            ConfigError: a role without an engine, or what is no URL.
        """
        for role, urls in (("prefill", self.prefill), ("decode", self.decode)):
            if not urls:
                raise ConfigError(f"the router has no {role} engine; give at least one --{role} URL")
            for url in urls:
                if not _is_address(url):
                    raise ConfigError(f"--{role} {url} is no URL; it must look like http://host:port")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # brackets that do not match, a port that is none
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0
