"""The URL of object storage, and the settings of the client (*options*).

Options have obstore's names (https://developmentseed.org/obstore: `S3Config`, `GCSConfig`, `AzureConfig`,
`ClientConfig`), and all values are strings. There is no option for the bucket or container, because the URL
names it. There are none for timeouts, because all follow from one timeout. obstore reads settings that are
not given, such as credentials, from the environment variables that the provider's own tools use.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from kvferry.errors import ConfigError
from kvferry.tiers.objects.endpoint import VARIABLES, StoreEndpoint, endpoint_of, restrict_to_endpoint

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


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """The URL of object storage, and the settings of its client, by option name of obstore."""

    scheme: str  # s3, gs, az or file
    url: str  # URL without a slash at its end. It has no secrets.
    store: dict[str, str]  # settings that only this kind of store has
    client: dict[str, str]  # settings of the connections to the store
    endpoint: StoreEndpoint | None  # configured server; None for the provider's own


def is_url(where: str) -> bool:
    """Return whether a location is a URL, and not the path of a directory."""
    return "://" in where


def store_settings(url: str, options: Mapping[str, str]) -> StoreSettings:
    """Check a URL and the options of its client, and return the settings of the client.

    Raises:
        ConfigError: the URL has an unknown form or contains credentials, an option is unknown (the message
            names the most similar one), or connections are not encrypted and `options` does not allow that.
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
    for name in options:
        _check_known(name, parts.scheme, known)
    store = {name: value for name, value in options.items() if name in known}
    # obstore reads client settings from the environment only if none is given, and timeouts are always given.
    variables = {name: os.environ.get(f"{VARIABLES[parts.scheme]}_{name.upper()}") for name in CLIENT}
    client = {name: value for name, value in variables.items() if value is not None}
    client |= {name: value for name, value in options.items() if name not in known}
    if endpoint := endpoint_of(parts.scheme, options):
        client |= restrict_to_endpoint(endpoint, parts.scheme, options)
    return StoreSettings(parts.scheme, url.rstrip("/"), store, client, endpoint)


def _check_known(name: str, scheme: str, known: frozenset[str]) -> None:
    """Check that obstore has an option for a scheme, which alone has the `known` ones."""
    names = sorted(known | CLIENT) if known else []
    if name in names:
        return
    near = difflib.get_close_matches(name, names, 1, 0.6)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names) or 'none'}"
    raise ConfigError(f"object tier: {scheme}:// has no option {name!r}; {hint}")
