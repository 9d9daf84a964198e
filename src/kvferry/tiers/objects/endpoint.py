"""The configured server of object storage, and the restriction of requests to it.

obstore follows redirects to any server and has no setting against it. Such a server would get
`x-amz-security-token` and the names of chunks, and could send chunks. So requests to other hosts go to a
proxy that does not exist. This works if all requests are for one host: an endpoint is given, and the
credentials need no other server. Redirects of a provider's own servers, and requests that a proxy forwards,
are not restricted.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvferry.errors import ConfigError

BLACKHOLE_PROXY = "127.255.255.254:1"
"""An address at which no process listens, since users may not."""

_ENDPOINTS = {
    "s3": ("aws_endpoint_url_s3", "endpoint", "endpoint_url"),
    "gs": ("base_url",),
    "az": ("endpoint",),
}
_CREDENTIALS = {
    "s3": ("secret_access_key", "skip_signature"),
    "gs": ("bearer_token", "skip_signature"),
    "az": ("account_key", "sas_key", "skip_signature"),
}
"""Options for credentials that need no other server."""
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


@dataclass(frozen=True, slots=True)
class StoreEndpoint:
    """A configured server.

    Attributes:
        host: name or address of the server.
        shown: scheme, host and port, for messages.
        encrypted: whether connections use TLS.
    """

    host: str
    shown: str
    encrypted: bool

    @property
    def is_here(self) -> bool:
        """Return whether the server is this machine."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def endpoint_of(scheme: str, variables: str, options: Mapping[str, str]) -> StoreEndpoint | None:
    """Return the configured server; None for the provider's own.

    Args:
        scheme: s3, gs, az or file.
        variables: prefix of the scheme's environment variables.
        options: client settings.

    Raises:
        ConfigError: connections to the server are not encrypted, and that is not allowed.
    """
    url = _given(_ENDPOINTS.get(scheme, ()), variables, options)
    parts = urlsplit(url)
    if not parts.hostname:
        return None
    found = StoreEndpoint(
        parts.hostname, f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}", parts.scheme != "http"
    )
    if not found.encrypted and not _is_true(_given(("allow_http",), variables, options)):
        raise ConfigError(
            f"object tier: traffic to {found.shown} is not encrypted; use https, or, on a network that "
            "only engines "
            'use, set the option allow_http to "true"'
        )
    return found


def restrict_to_endpoint(
    endpoint: StoreEndpoint, scheme: str, variables: str, options: Mapping[str, str]
) -> Mapping[str, str]:
    """Return connection settings that allow requests to this server only; empty if that is impossible."""
    needs_others = not any(
        value and (name != "skip_signature" or _is_true(value))
        for name in _CREDENTIALS[scheme]
        if (value := _given((name,), variables, options))
    )
    proxied = any(os.environ.get(name) or os.environ.get(name.upper()) for name in _PROXIES)
    if needs_others or proxied or _given(("proxy_url", "proxy_excludes"), variables, options):
        return {}
    return {"proxy_url": f"http://{BLACKHOLE_PROXY}", "proxy_excludes": endpoint.host}


def _given(names: tuple[str, ...], variables: str, options: Mapping[str, str]) -> str:
    """Return the first value of these options, from `options` or else the environment; empty if none."""
    found = [options.get(name) for name in names]
    found += [os.environ.get(f"{variables}_{name.removeprefix('aws_').upper()}") for name in names]
    return next((value for value in found if value), "")


def _is_true(value: str) -> bool:
    """Return whether obstore reads a value as true."""
    return value.lower() in ("1", "true", "on", "yes", "y")
