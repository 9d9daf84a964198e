"""The configured server of object storage, and a restriction of requests to this server.

obstore follows redirects to any server, and has no setting to prevent that. The other server would get
`x-amz-security-token` and the names of chunks, and could send forged chunks. So requests to other hosts are
directed to a proxy that does not exist. This works only if all requests are for one host: if an endpoint is
configured, and the credentials need no other server. Redirects by a provider's own servers, and requests
through a configured proxy, are not restricted.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvferry.errors import ConfigError

# Only root may listen at this port.
BLACKHOLE_PROXY = "127.255.255.254:1"
# Prefix of the environment variables of each scheme.
VARIABLES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE", "file": "FILE"}

_ENDPOINTS = {
    "s3": ("aws_endpoint_url_s3", "endpoint", "endpoint_url"),
    "gs": ("base_url",),
    "az": ("endpoint",),
}
# Options for credentials that are used without requests to another server.
_CREDENTIALS = {
    "s3": ("secret_access_key", "skip_signature"),
    "gs": ("bearer_token", "skip_signature"),
    "az": ("account_key", "sas_key", "skip_signature"),
}
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


@dataclass(frozen=True, slots=True)
class StoreEndpoint:
    """A server of object storage, as configured."""

    host: str  # host name or IP address of the server
    shown: str  # URL of scheme, host and port, for messages
    encrypted: bool  # whether connections use TLS

    @property
    def is_here(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def endpoint_of(scheme: str, options: Mapping[str, str]) -> StoreEndpoint | None:
    """Return the configured server of object storage; None for the provider's own server.

    Args:
        scheme: scheme of the URL: s3, gs, az or file.
        options: settings of the client, by option name of the obstore library.

    Raises:
        ConfigError: connections to the server are not encrypted, and the options do not allow that.
    """
    url = _option_value(_ENDPOINTS.get(scheme, ()), scheme, options)
    parts = urlsplit(url)
    if not parts.hostname:
        return None
    found = StoreEndpoint(
        parts.hostname, f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}", parts.scheme != "http"
    )
    if not found.encrypted and not _is_true(_option_value(("allow_http",), scheme, options)):
        raise ConfigError(
            f"object tier: traffic to {found.shown} is not encrypted; use https, or, on a network that "
            'only engines use, set the option allow_http to "true"'
        )
    return found


def restrict_to_endpoint(
    endpoint: StoreEndpoint, scheme: str, options: Mapping[str, str]
) -> Mapping[str, str]:
    """Return connection settings that keep the client from other servers than the configured one.

    They are empty if a proxy is configured, or if the client needs another server to get credentials. Then it
    can reach all servers.
    """
    needs_others = not any(
        value and (name != "skip_signature" or _is_true(value))
        for name in _CREDENTIALS[scheme]
        if (value := _option_value((name,), scheme, options))
    )
    proxied = any(os.environ.get(name) or os.environ.get(name.upper()) for name in _PROXIES)
    if needs_others or proxied or _option_value(("proxy_url", "proxy_excludes"), scheme, options):
        return {}
    return {"proxy_url": f"http://{BLACKHOLE_PROXY}", "proxy_excludes": endpoint.host}


def _option_value(names: tuple[str, ...], scheme: str, options: Mapping[str, str]) -> str:
    """Return the first option in `names` that is set here or in the environment, else an empty string."""
    found = [options.get(name) for name in names]
    found += [os.environ.get(f"{VARIABLES[scheme]}_{name.removeprefix('aws_').upper()}") for name in names]
    return next((value for value in found if value), "")


def _is_true(value: str) -> bool:
    """Return whether obstore reads the value of an option as true."""
    return value.lower() in ("1", "true", "on", "yes", "y")
