"""The connector's settings: one JSON object, validated strictly."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta

from kvferry.common.errors import ConfigError
from kvferry.common.parse import check_text, parse_settings
from kvferry.common.text import shown
from kvferry.connector.choosing import PolicyName
from kvferry.keys.tenant import TENANT_BYTES, tenant_of
from kvferry.tiers.files.tier import FileSettings
from kvferry.tiers.host.settings import HostSettings
from kvferry.tiers.index import MAX_TIERS
from kvferry.tiers.names import FLEET
from kvferry.tiers.registry import settings_class, storage_kinds
from kvferry.tiers.storage_tier import StorageSettings
from kvferry.tiers.tenants import OTHERS, Tenant, Tenants
from kvferry.transport.addresses import (
    AllowedPeers,
    check_host,
    is_every_address,
    parse_allowed_peers,
    parse_port_range,
)

TierSettings: TypeAlias = HostSettings | StorageSettings

# The tiers for ``"tiers": "default"``.
DEFAULT: tuple[TierSettings, ...] = (HostSettings(), FileSettings())

# Stands for the address of each rank's own machine as `host`.
NODE = "node"

# vLLM's names for the memory orders of layer (L), block (B), token (N), head (H) and content (C).
Layout = Literal["LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]

# `kvferry.common.parse` turns these bounds into messages. NaN is outside of all of them.
_Port = Annotated[int, Meta(ge=0, le=65_535)]
_UpTo16 = Annotated[int, Meta(ge=1, le=16)]
_Seconds = Annotated[float, Meta(gt=0, lt=86_400)]
_Share = Annotated[float, Meta(gt=0, le=1)]
_Tokens = Annotated[int, Meta(ge=1, le=1 << 20)]

# Names are labels of metrics.
_TENANT_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_SALT_DIGEST = re.compile(f"[0-9a-f]{{{2 * TENANT_BYTES}}}")


class Tiers(msgspec.Struct, frozen=True):
    """The settings of all tiers that keep chunks. `slow` lists those below host memory, the fastest first."""

    # Size of host memory in bytes if no host memory tier is configured: every chunk passes through it.
    STAGING: ClassVar[int] = 256 << 20

    host: HostSettings
    slow: tuple[StorageSettings, ...]


def read_tiers(value: Any) -> Tiers | None:
    """Parse and check the setting ``tiers``: a list of objects, ``"default"``, or None for no tiers.

    Raises:
        ConfigError: a kind or key is unknown, or a value is wrong.
    """
    if value is None or value == []:
        return None
    if value == "default":
        return _checked(DEFAULT)
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConfigError(f'tiers is {value!r}; it must be "default" or a list of objects with a "type"')
    return _checked([tier_settings(one, f"tiers[{number}]") for number, one in enumerate(value)])


def tier_settings(value: Any, where: str = "tier") -> TierSettings:
    """Parse the settings of one tier, or raise ConfigError. A package's kind is loaded for it."""
    kinds = (HostSettings.kind, *storage_kinds())
    name = value.get("type") if isinstance(value, Mapping) else None
    if name not in kinds:
        known = ", ".join(kinds)
        raise ConfigError(f'{where} is {value!r}; it must be an object whose "type" is one of {known}')
    kind: type[TierSettings] = HostSettings if name == HostSettings.kind else settings_class(name)
    for key, one in value.items():
        if key != "path":  # a directory may have a name that is not valid UTF-8
            check_text(f"{where}: {key}", one)
    return parse_settings(f"{where} ({kind.kind})", value, kind, beside=("type",))


def _checked(tiers: Sequence[TierSettings]) -> Tiers:
    hosts = [one for one in tiers if isinstance(one, HostSettings)]
    slow = tuple(one for one in tiers if not isinstance(one, HostSettings))
    if len(hosts) > 1:
        raise ConfigError("tiers names host memory twice; give it once, with the capacity of both")
    if hosts and tiers[0] is not hosts[0]:
        raise ConfigError(
            "tiers: host memory must come first, because every chunk passes through it; move it to the front"
        )
    if len(slow) >= MAX_TIERS:
        raise ConfigError(
            f"tiers names {len(slow)} tiers besides host memory, at most {MAX_TIERS - 1}; leave some out"
        )
    for number, one in enumerate(tiers):
        check_weight(f"tiers[{number}]: load_weight", one.load_weight)
        one.check(f"tiers[{number}]")
    _check_locations_differ(tiers)
    return Tiers(hosts[0] if hosts else HostSettings(Tiers.STAGING), slow)


def _check_locations_differ(tiers: Sequence[TierSettings]) -> None:
    # In a shared location each chunk would be looked up twice.
    taken: dict[tuple[str, tuple[str, ...]], int] = {}
    for number, one in enumerate(tiers):
        if isinstance(one, HostSettings):
            continue
        location = one.location
        key = one.kind, location.key
        if key in taken:
            raise ConfigError(
                f"tiers[{taken[key]}] and tiers[{number}] are both {location.text}; name another "
                "place, or leave out one of them"
            )
        taken[key] = number


def check_weight(name: str, weight: float) -> None:
    """Raise ConfigError unless a weight is from 0 to 1000000."""
    if not 0 <= weight <= 1e6:  # also refuses NaN
        raise ConfigError(f"{name} is {weight}, it must be 0 to 1000000")


def read_tenants(value: Any) -> Tenants | None:
    """Parse and check the setting ``tenants``: objects by name, or None.

    Raises:
        ConfigError: a key is unknown, a value is wrong, or two objects are for the same tenant.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ConfigError(f"tenants is {shown(repr(value))}; it must be an object with a key for each tenant")
    named, others = dict[bytes, Tenant](), Tenant()
    for name, settings in value.items():
        if not isinstance(settings, Mapping):
            raise ConfigError(f'tenants: {shown(str(name))} must be an object, such as {{"weight": 2}}')
        config = parse_settings(f"tenants ({shown(str(name))})", settings, TenantConfig)
        _check_tenant(name, config)
        tenant = Tenant(name, config.weight, config.limit)
        if name == OTHERS:
            others = tenant
            continue
        digest = bytes.fromhex(config.salt_digest or "") or tenant_of(None, config.adapter)
        if (same := named.get(digest)) is not None:
            raise ConfigError(
                f"tenants: {same.name} and {name} are the same tenant; give each a salt_digest or an adapter "
                "of its own, or leave out one of them"
            )
        named[digest] = tenant
    return Tenants(named, others)


def _check_tenant(name: str, config: TenantConfig) -> None:
    if not _TENANT_NAME.fullmatch(name):
        raise ConfigError(
            f"tenants: a tenant's name is {shown(name)!r}; it must be 1 to 64 letters, digits or any of . _ "
            "and -"
        )
    if config.salt_digest is not None and not _SALT_DIGEST.fullmatch(config.salt_digest):
        # It may be a salt, which no message shows.
        raise ConfigError(
            f"tenants: the salt_digest of {name} must be {2 * TENANT_BYTES} hex digits; kvferry cache tenant "
            "prints that of a salt"
        )
    if name == OTHERS and (config.salt_digest or config.adapter):
        raise ConfigError(
            f"tenants: {OTHERS} stands for all tenants that are not named; leave out its salt_digest and "
            "adapter, or give it another name"
        )
    if config.salt_digest and config.adapter:
        raise ConfigError(
            f"tenants: {name} has a salt_digest and an adapter; requests with a salt belong to the tenant of "
            "the salt, whatever their adapter, so leave out one of them"
        )


class AdminConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the admin API listens.

    Attributes:
        port: port of the HTTP server, to which the engine's data-parallel index is added; 0 for any free
            port.
        host: address on which the HTTP server listens.
    """

    port: _Port
    host: str = "127.0.0.1"


class TenantConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a tenant may use of host memory, directories and loads. Its name is the key in ``tenants``.

    Attributes:
        salt_digest: digest of the tenant's ``cache_salt``, 12 hex digits, as ``kvferry cache tenant`` prints
            it. The salt itself is a secret, and stands in no settings.
        adapter: name of the tenant's LoRA adapter, for requests without a salt. Without `salt_digest` and
            `adapter`, these are the settings of all requests with neither.
        weight: the tenant's fair share is its weight, divided by the sum of the weights of all tenants that
            use a tier.
        limit: maximum part of each tier's capacity, and of `tier_loads`, that the tenant may use, even if the
            rest is free; above 0 and at most 1.
    """

    salt_digest: str | None = None
    adapter: str | None = None
    weight: Annotated[int, Meta(ge=1, le=10_000)] = 1
    limit: _Share = 1.0


class ConnectorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings in ``kv_connector_extra_config`` of a `KVFerryConnector`.

    Attributes:
        host: address on which this engine listens for peers. The control channel uses it, and so does each
            worker's gather channel, over which peers ask the worker to pack KV. ``node`` stands for the
            address of each rank's own machine, for an engine that spans several machines.
        port: port of the control channel, to which the engine's data-parallel index is added; 0 for any free
            port.
        ports: TCP ports that this engine listens on for peers, such as ``20000-20999``. Each worker's gather
            channel and NIXL agents take free ports of the range, and so does the control channel if `port`
            is 0. None for any ports.
        advertise_host: host name or address to advertise to peers; None for `host`.
        secret_file: path of the file with the secret that engines share. The keys of their channels derive
            from this secret. None for a file of this user on this machine, which is created on first use and
            which all engines of the user share.
        peers: host names, addresses and networks of the machines that may be peers. This engine connects only
            to these machines and accepts connections only from them. None for this machine if `host` is
            loopback, else for all machines. Of peers' host names, the engine resolves only those in this
            list; without a list, only `advertise_host`. A host may have the port of an engine's control
            channel, such as ``10.0.0.1:5600``: this engine then connects to it at its start, instead of with
            the first ticket.
        lease_seconds: seconds for which blocks are kept for a consumer that sends no heartbeat. While other
            requests wait for blocks, a lease that no consumer has claimed ends after a quarter of this time.
        load_timeout_seconds: seconds after its start at which an unfinished load counts as failed.
        handshake_seconds: seconds to wait for a peer's answer in the handshake.
        attempts: maximum number of attempts to load one request's KV before this engine computes it.
        late_blocks: maximum share of the block pool, above 0 and at most 1, that all loads from peers
            together hold, including loads past their deadline. One peer's loads hold at most half of the part
            of this share that other peers' loads leave free. If no load holds blocks, the next load may
            exceed both limits.
        transfer_log: path of a file that gets one JSON line per finished load; None for no log.
        record: path of a file that gets one JSON line per ended request: lengths, times and keys of the
            content, as a trace for ``kvferry replay``; None to record nothing.
        layout: memory layout to request from the engine. ``auto`` requests a layout with blocks outermost if
            the attention backend declares one. ``engine`` leaves the choice to vLLM. Any other value requires
            exactly that layout.
        strategy: transfer strategy: ``auto`` for the fastest, or ``direct``, ``over-read``, ``staged`` or
            ``shared`` to use that strategy wherever possible.
        staging_mib: memory for packing short runs of bytes, in MiB per direction and worker; 0 for none.
        lanes: number of threads per worker that read from peers. Several threads share a large read.
        verify_transfers: True to verify what is read from peers: this engine compares digests of its blocks
            with digests that the peer computes of its own. If they differ, the load fails and the prompt is
            computed. Not for KV caches in GPU memory.
        costs: path of the file with measured costs of transfers that ``kvferry doctor --calibrate`` wrote.
            None for the user's file on this machine, or for built-in costs if that file does not exist.
        host_buffer: True to transfer through host memory with the engine's copy operation; None to do so only
            if the engine is configured for it (``kv_buffer_device``).
        tiers: list of the tiers that keep chunks, the fastest first. Each tier is an object with its ``type``
            (``host``, ``file`` or ``object``) and the settings of that type. ``default`` for host memory and
            a directory in the user's cache directory; None for no tiers.
        tenants: tenants by name, which share the tiers by weight, each an object with its settings. Those of
            ``others`` are for each tenant that is not named. None to let all tenants use all of the tiers.
        transfer: True to exchange KV with other engines. None means True if there are no tiers, or if vLLM's
            ``kv_role`` is one side of an exchange (``kv_producer``, ``kv_consumer``), else False.
        chunk_tokens: number of tokens per chunk; None for 256, or the nearest number that suits the engine's
            blocks and snapshots of recurrent state.
        snapshot_tokens: distance in tokens between positions at which attention windows and snapshots of
            recurrent state are kept, a multiple of `chunk_tokens`; None for the end of every chunk.
        first_snapshot_tokens: position in a prompt at which tiers keep a snapshot of recurrent state for
            prompts that share its beginning, rounded up to blocks and chunks. More are kept at the doubles of
            this position, and where a prompt departs from those in the tiers. None for 1024, or more if
            snapshots are large; 0 for only the snapshots that the engine takes by itself.
        hint_share: maximum share of host memory, at most 0.25, for chunks that hints of requests retain or
            prefetch. Tenants divide it by weight. 0 to ignore such hints.
        hint_seconds: maximum time for which a request may retain chunks. A longer one is shortened.
        tier_loads: maximum number of loads from tiers at a time. While so many are under way, the tiers offer
            nothing to further requests, which are loaded from another source or computed. With `tenants`, a
            tenant below its fair share of them may still begin one.
        source_policy: name of the policy that chooses between sources: ``weight`` for the most tokens, each
            times the weight of its place; ``cost`` for the least expected time to the first token; ``first``
            for the first source that has any.
        load_weight: factor by which the policy ``weight`` multiplies the number of tokens that a peer offers.
            The factors of tiers are in `tiers`.
        turn_seconds: seconds for which a finished request's blocks are kept for the next turn of its
            conversation; 0 to keep none.
        turn_share: maximum share of the block pool, above 0 and at most 1, that these kept blocks may take.
        patience_seconds: maximum seconds that a request waits for free blocks, or for a source that is still
            looking up its KV. If no request gets blocks for as long, while leases for other engines keep
            some, requests begin to give up their claims on other engines' blocks.
        whole_blocks: True to refuse loads that fill a block only in part. Required if the engine has another
            connector, because that connector cannot recognize such a block and would store it.
        name: name of this connector in ``kvferry explain``, if an engine has several connectors.
        explain_requests: number of requests to remember for ``kvferry explain``; 0 for none.
        admin: address of the admin API, through which an operator looks up, pins and drops KV, and drains the
            engine; None for no such API.
    """

    host: str = "127.0.0.1"
    port: _Port = 0
    ports: str | None = None
    advertise_host: str | None = None
    secret_file: str | None = None
    peers: tuple[str, ...] | None = None
    lease_seconds: _Seconds = 30.0
    load_timeout_seconds: _Seconds = 30.0
    handshake_seconds: _Seconds = 10.0
    attempts: _UpTo16 = 2
    late_blocks: _Share = 0.5
    transfer_log: str | None = None
    record: str | None = None
    layout: Literal["auto", "engine"] | Layout = "auto"
    strategy: Literal["auto", "direct", "over-read", "staged", "shared"] = "auto"
    staging_mib: Annotated[int, Meta(ge=0, le=65_536)] = 64
    lanes: _UpTo16 = 2
    verify_transfers: bool = False
    costs: str | None = None
    host_buffer: bool | None = None
    tiers: Any = None
    tenants: Any = None
    transfer: bool | None = None
    chunk_tokens: _Tokens | None = None
    snapshot_tokens: _Tokens | None = None
    first_snapshot_tokens: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None
    hint_share: Annotated[float, Meta(ge=0, le=0.25)] = 0.1
    hint_seconds: _Seconds = 3600.0
    tier_loads: Annotated[int, Meta(ge=1, le=10_000)] = 32
    source_policy: PolicyName = "weight"
    load_weight: Annotated[float, Meta(ge=0, le=1_000_000)] = 1.0
    turn_seconds: Annotated[float, Meta(ge=0, lt=86_400)] = 0.0
    turn_share: _Share = 0.25
    patience_seconds: _Seconds = 10.0
    whole_blocks: bool = False
    name: str = ""
    explain_requests: Annotated[int, Meta(ge=0, le=100_000)] = 512
    admin: AdminConfig | None = None

    @property
    def without_host(self) -> ConnectorConfig:
        """Copy of the settings with an empty `host`, the only setting that may differ between machines."""
        return msgspec.structs.replace(self, host="")

    @property
    def transfers(self) -> bool:
        """True if this engine exchanges KV with other engines."""
        return not self.tiers if self.transfer is None else self.transfer

    @property
    def shares_host_memory(self) -> bool:
        """True if this engine has a fleet tier, over which engines read each other's host memory."""
        tiers = read_tiers(self.tiers)
        return tiers is not None and any(one.kind == FLEET for one in tiers.slow)

    def weighted_tenants(self) -> Tenants | None:
        """Return the tenants that share the tiers by weight; None without the setting, or ConfigError."""
        return read_tenants(self.tenants)

    def allowed_peers(self) -> AllowedPeers:
        """Return the machines whose engines may exchange KV with this one, or raise ConfigError."""
        return parse_allowed_peers(self.peers, self.host, self.advertise_host)


def parse_config(extra: Mapping[str, Any], kv_role: str | None = None) -> ConnectorConfig:
    """Parse and check the settings of the connector.

    Args:
        kv_role: vLLM's ``kv_role``; None if it is unknown or belongs to several connectors together. For
            ``kv_producer`` and ``kv_consumer``, `transfer` is True in the result.

    Raises:
        ConfigError: a key is unknown or missing, a value is wrong, or the role contradicts `transfer`.
    """
    for key in extra:
        if key != "tiers":  # directories may have names that are not valid UTF-8
            check_text(key, extra[key])
    config = parse_settings("kv_connector_extra_config", extra, ConnectorConfig)
    if kv_role in ("kv_producer", "kv_consumer"):
        if config.transfer is False:
            raise ConfigError(
                f"kv_role is {kv_role}, one side of an exchange with other engines, but transfer is false; "
                "set kv_role to kv_both (kvferry config --role both), or leave transfer out"
            )
        config = msgspec.structs.replace(config, transfer=True)
    _check_hosts(config)
    _check_paths(config)
    _check_transfers(config)
    if config.chunk_tokens and config.snapshot_tokens:
        check_snapshot_tokens(config.snapshot_tokens, config.chunk_tokens)
    if config.host_buffer:
        check_host_buffer(config)
    config.allowed_peers()
    config.weighted_tenants()
    parse_port_range(config.ports)
    return config


def _check_hosts(config: ConnectorConfig) -> None:
    admin = {} if config.admin is None else {"admin.host": config.admin.host}
    for name, host in {"host": config.host, **admin}.items():
        if not is_every_address(host):
            check_host(name, host)
    if config.advertise_host is not None:
        check_host("advertise_host", config.advertise_host)
        if is_every_address(config.advertise_host):
            raise ConfigError(
                f"advertise_host is {config.advertise_host}, every address of this machine; set it to the "
                "one that peers use"
            )
    elif is_every_address(config.host):
        raise ConfigError(
            f"host is {config.host}, every address of this machine; set advertise_host to the one that "
            "peers use"
        )


def _check_paths(config: ConnectorConfig) -> None:
    for name in ("secret_file", "transfer_log", "record", "costs"):
        if getattr(config, name) == "":
            raise ConfigError(f"{name} is '', which names no file; give the path of a file, or leave it out")


def _check_transfers(config: ConnectorConfig) -> None:
    if read_tiers(config.tiers) is None and not config.transfers:
        raise ConfigError(
            "transfer is false and there are no tiers, so kvferry has nothing to do; set one of them"
        )
    for name in ("turn_seconds", "verify_transfers"):
        if getattr(config, name) and not config.transfers:
            raise ConfigError(
                f"{name} is set, but no KV is exchanged with other engines; set transfer to true"
            )
    if config.verify_transfers and not config.staging_mib:
        raise ConfigError(
            "verify_transfers is set and staging_mib is 0, so peers cannot ask this engine's workers for "
            "digests; set staging_mib to 1 or more"
        )


def check_snapshot_tokens(snapshot_tokens: int, chunk_tokens: int) -> None:
    """Raise ConfigError unless snapshots are kept at ends of chunks."""
    if rest := snapshot_tokens % chunk_tokens:
        nearest = f", {snapshot_tokens - rest} for instance" if snapshot_tokens > chunk_tokens else ""
        raise ConfigError(
            f"snapshot_tokens is {snapshot_tokens}; it must be a multiple of a chunk's {chunk_tokens} tokens"
            f"{nearest}"
        )


def check_host_buffer(config: ConnectorConfig) -> None:
    """Raise ConfigError for a setting that does not work if KV moves through a host buffer."""
    if config.turn_seconds:
        raise ConfigError(
            "turn_seconds is set, and KV moves through a host buffer (host_buffer, or kv_buffer_device cpu), "
            "to which only prompts are copied and no answers; leave one of them out"
        )
    if config.tiers:
        raise ConfigError(
            "tiers are set, and KV moves through a host buffer (host_buffer, or kv_buffer_device cpu), so "
            "chunks would go to the buffer and not to the engine's cache; leave one of them out"
        )
