"""The settings of the object tier, and the checks of its URL and of its client's options."""

from __future__ import annotations

import difflib
import ipaddress
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import unquote, urlsplit

import msgspec

from kvferry.common.errors import ConfigError
from kvferry.keys.namespace import Namespace
from kvferry.tiers.format.encryption import EncryptionKeys
from kvferry.tiers.index import KeyTable
from kvferry.tiers.key_file import read_key_file
from kvferry.tiers.names import Medium
from kvferry.tiers.storage_tier import Location, StorageSettings, TrialResult

if TYPE_CHECKING:
    from kvferry.tiers.objects.tier import ObjectTier

# Only root may listen at this port.
BLACKHOLE_PROXY = "127.255.255.254:1"
# Prefix of the environment variables of each scheme.
_VARIABLES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE", "file": "FILE"}

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

# Options have the names of obstore. The URL names the bucket, and all timeouts follow from one.
CLIENT = frozenset(
    (
        *("allow_http", "allow_invalid_certificates", "default_content_type", "http1_only"),
        *("http2_keep_alive_interval", "http2_keep_alive_timeout", "http2_keep_alive_while_idle"),
        *("http2_only", "pool_idle_timeout", "pool_max_idle_per_host", "proxy_ca_certificate"),
        *("proxy_excludes", "proxy_url", "randomize_addresses", "root_certificate", "user_agent"),
    )
)

S3 = frozenset(
    (
        *("access_key_id", "aws_endpoint_url_s3", "checksum_algorithm", "conditional_put"),
        *("container_authorization_token_file", "container_credentials_full_uri"),
        *("container_credentials_relative_uri", "copy_if_not_exists", "default_region"),
        *("disable_bulk_delete", "disable_tagging", "endpoint", "imdsv1_fallback", "metadata_endpoint"),
        *("region", "request_payer", "role_arn", "role_session_name", "s3_express", "secret_access_key"),
        *("server_side_encryption", "session_token", "skip_signature", "sse_bucket_key_enabled"),
        *("sse_customer_key_base64", "sse_kms_key_id", "sts_endpoint", "unsigned_payload"),
        *("virtual_hosted_style_request", "web_identity_token_file"),
    )
)

GCS = frozenset(
    (
        *("application_credentials", "base_url", "bearer_token", "service_account", "service_account_key"),
        "skip_signature",
    )
)

AZURE = frozenset(
    (
        *("account_key", "account_name", "authority_host", "client_id", "client_secret", "credential_type"),
        *("disable_tagging", "encryption_key", "endpoint", "fabric_cluster_identifier"),
        *("fabric_session_token", "fabric_token_service_url", "fabric_workload_host"),
        *("federated_token_file", "msi_endpoint", "msi_resource_id", "object_id", "sas_key"),
        *("skip_signature", "tenant_id", "token", "use_azure_cli", "use_emulator", "use_fabric_endpoint"),
    )
)

_SCHEMES = {"s3": S3, "gs": GCS, "az": AZURE, "file": frozenset[str]()}
_FORMS = "s3://bucket/path, gs://bucket/path, az://container/path, file:///path"


class ObjectSettings(StorageSettings, frozen=True):
    """Settings of an object tier, which keeps chunks in object storage that several engines may share.

    Attributes:
        url: URL under which all objects of the tier are stored, such as ``s3://bucket/prefix``.
        options: settings of the client, by option name of the obstore library. Credentials usually come from
            the environment.
        timeout_seconds: time limit for fetching one chunk. Storing a chunk may take twice as long.
        key_file: path of a file with the keys that encrypt the chunks under the URL, one per line, the newest
            first. If None, chunks are not encrypted.
    """

    kind: ClassVar[str] = "object"
    medium: ClassVar[Medium] = Medium.NETWORK

    url: str
    options: dict[str, str] = msgspec.field(default_factory=dict)
    timeout_seconds: float = 20.0
    key_file: str | None = None

    def check(self, where: str) -> None:
        if not 0 < self.timeout_seconds < 3600:
            raise ConfigError(
                f"{where}: timeout_seconds is {self.timeout_seconds}, it must be above 0 and below an hour"
            )

    def check_storage(self) -> None:
        from kvferry.tiers.objects.client import BucketClient  # noqa: PLC0415

        self.read_keys()
        BucketClient(self.url, self.options, self.timeout_seconds)

    def read_keys(self) -> EncryptionKeys | None:
        """Return the keys in `key_file`, None without the setting, or raise ConfigError."""
        return None if self.key_file is None else read_key_file(self.key_file)

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
            self.url,
            namespace,
            self.options,
            timeout_seconds=self.timeout_seconds,
            encryption=self.read_keys(),
            table=table,
        )

    @property
    def trial_seconds(self) -> float:
        # To connect, and four requests.
        return 5 * self.timeout_seconds

    def try_out(self) -> TrialResult:
        from kvferry.tiers.objects.client import BucketClient  # noqa: PLC0415
        from kvferry.tiers.objects.faults import Unavailable  # noqa: PLC0415
        from kvferry.tiers.objects.marker import find_conflict  # noqa: PLC0415

        encrypted = self.read_keys() is not None
        name = f".kvferry-doctor.{secrets.token_hex(8)}"
        try:
            bucket = BucketClient(self.url, self.options, self.timeout_seconds)
            if conflict := find_conflict(bucket, encrypted=encrypted):
                return TrialResult(f"{self.url}: {conflict}", conflict.advice)
            next(iter(bucket.list()), None)
            bucket.put(name, [b"kvferry doctor"])
            bucket.remove([name])
        except Unavailable as error:
            return TrialResult(f"{self.url}: {error}", error.fault.advice)
        return TrialResult(f"{self.url} can be listed, written to and cleared")


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """The URL of object storage, and the settings of its client, by option name of obstore."""

    scheme: str  # s3, gs, az or file
    url: str  # URL without a slash at its end. It has no secrets.
    store: dict[str, str]  # settings that only this kind of store has
    client: dict[str, str]  # settings of the connections to the store
    endpoint: _StoreEndpoint | None  # configured server; None for the provider's own


def is_url(where: str) -> bool:
    """Return whether a location is a URL, and not the path of a directory."""
    return "://" in where


def store_settings(url: str, options: Mapping[str, str]) -> StoreSettings:
    """Check a URL and the options of its client, and return the settings of the client.

    Raise ConfigError if the URL has an unknown form or contains credentials, an option is unknown, or
    connections are not encrypted and `options` does not allow that.
    """
    parts = urlsplit(url)
    known = _SCHEMES.get(parts.scheme)
    if known is None:
        raise ConfigError(f"object tier: the URL begins with {url[:8]!r}; it must be one of {_FORMS}")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError(
            f"object tier: the {parts.scheme}:// URL has more than a bucket and a path; it must be one "
            f"of {_FORMS}; put credentials into the environment or into options"
        )
    if {".", ".."} & {unquote(name) for name in parts.path.split("/")}:
        raise ConfigError(f"object tier: {url} has a folder called . or ..; write the path out")
    if bool(parts.netloc) is (parts.scheme == "file"):
        raise ConfigError(f"object tier: {url} names no bucket; it must be one of {_FORMS}")
    names = sorted(known | CLIENT) if known else []
    for name in options:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1, 0.6)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names) or 'none'}"
            raise ConfigError(f"object tier: {parts.scheme}:// has no option {name!r}; {hint}")
    store = {name: value for name, value in options.items() if name in known}
    # obstore reads client settings from the environment only if none is given, and timeouts are always given.
    variables = {name: os.environ.get(f"{_VARIABLES[parts.scheme]}_{name.upper()}") for name in CLIENT}
    client = {name: value for name, value in variables.items() if value is not None}
    client |= {name: value for name, value in options.items() if name not in known}
    if endpoint := _endpoint_of(parts.scheme, options):
        client |= _restrict_to_endpoint(endpoint, parts.scheme, options)
    return StoreSettings(parts.scheme, url.rstrip("/"), store, client, endpoint)


@dataclass(frozen=True, slots=True)
class _StoreEndpoint:
    host: str  # host name or IP address of the server
    shown: str  # URL of scheme, host and port, for messages
    encrypted: bool  # whether connections use TLS

    @property
    def is_here(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def _endpoint_of(scheme: str, options: Mapping[str, str]) -> _StoreEndpoint | None:
    """Return the configured server; None for the provider's own. Raise ConfigError without encryption."""
    url = _option_value(_ENDPOINTS.get(scheme, ()), scheme, options)
    parts = urlsplit(url)
    if not parts.hostname:
        return None
    found = _StoreEndpoint(
        parts.hostname, f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}", parts.scheme != "http"
    )
    if not found.encrypted and not _is_true(_option_value(("allow_http",), scheme, options)):
        raise ConfigError(
            f"object tier: traffic to {found.shown} is not encrypted; use https, or, on a network that "
            'only engines use, set the option allow_http to "true"'
        )
    return found


def _restrict_to_endpoint(
    endpoint: _StoreEndpoint, scheme: str, options: Mapping[str, str]
) -> Mapping[str, str]:
    """Return connection settings that keep the client from other servers than the configured one.

    They are empty if a proxy is configured, or if the client needs another server to get credentials.
    """
    # obstore follows redirects to any server, and has no setting against that. Another server would get the
    # session token and the names of chunks, and could send forged chunks.
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
    found += [os.environ.get(f"{_VARIABLES[scheme]}_{name.removeprefix('aws_').upper()}") for name in names]
    return next((value for value in found if value), "")


def _is_true(value: str) -> bool:
    return value.lower() in ("1", "true", "on", "yes", "y")
