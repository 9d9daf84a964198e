"""The connector's settings: one JSON object, validated strictly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from kvferry.connector.choices import check_keys, check_text, unusable
from kvferry.connector.policies import PolicyName
from kvferry.connector.tier_config import check_weight, read_tiers
from kvferry.errors import ConfigError
from kvferry.transport.allowed_peers import parse_allowed_peers

_EVERYWHERE = ("0.0.0.0", "::", "*")  # noqa: S104 - names what is refused

NODE = "node"

_ONE_SIDE = ("kv_producer", "kv_consumer")

Layout = Literal["LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
"""vLLM's names for the orders that layer, block, head, token and content can have in memory."""


class ConnectorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``kv_connector_extra_config`` of a `KVFerryConnector`.

    Attributes:
        host: address that the control channel and the workers' gather channels listen on; ``node`` for the
            address of each rank's own machine, in an engine that spans several.
        port: port of the control channel, plus the data-parallel index of the engine; 0 for any free one.
        advertise_host: address to advertise to peers; `host` if not set.
        secret_file: file with the secret that engines share, from which the keys of their channels derive; by
            default the key that this user's engines share on this machine, which is made on first use.
        peers: machines that engines are dialled on and may connect from: host names, addresses, networks. By
            default, this machine if `host` is loopback, else all machines. Only names listed here are
            resolved; by default, only `advertise_host`.
        lease_seconds: seconds that blocks are kept for a silent consumer; a quarter of that if it has never
            given a sign of life and other requests wait for blocks.
        load_timeout_seconds: deadline of a load.
        handshake_seconds: seconds after which a silent peer is given up.
        attempts: most loads of one request before it is computed here.
        late_blocks: largest share of the block pool that loads from peers hold, in flight and late, unless a
            single load takes more; one peer holds at most half of what the others leave.
        transfer_log: file that gets one JSON line per finished load.
        layout: memory layout to ask the engine for: ``auto`` for one with blocks outermost, if the attention
            backend declares it; ``engine`` to leave it to vLLM; or one of `Layout`, which the engine must
            then have.
        strategy: how bytes travel: ``auto`` for the fastest way, or ``direct``, ``over-read`` or ``staged``
            wherever that is possible.
        staging_mib: memory for packing short runs, MiB per direction and worker; 0 for none.
        lanes: reading threads per worker; they share large requests.
        costs: file that ``kvferry bench calibrate`` wrote; by default the user's on this machine, else costs
            measured elsewhere.
        host_buffer: move through host memory with the engine's copy operation; by default only where the
            engine was told to (``kv_buffer_device``).
        tiers: where chunks are kept, see `tier_config`: a list, or ``default`` for host memory and a
            directory in the user's cache directory; none if not set.
        transfer: exchange KV with other engines; by default without tiers, or if vLLM's ``kv_role`` is one
            side of an exchange (``kv_producer``, ``kv_consumer``).
        chunk_tokens: tokens of a chunk; by default 256, or less so that snapshots of recurrent state end one.
        snapshot_tokens: distance of positions at which windows and snapshots of recurrent state are kept, a
            multiple of `chunk_tokens`; by default wherever a chunk ends.
        source_policy: how to choose between sources, see `connector.policies`.
        load_weight: weight of tokens that peers offer, for source policy ``weight``; tiers have their own in
            `tiers`.
        turn_seconds: seconds that a finished request's blocks are kept for the next turn of its conversation;
            0 for none.
        turn_share: largest share of the block pool that they take.
        patience_seconds: seconds that a request waits for a source that is still looking.
        whole_blocks: take no load that fills a block in part, since another connector beside this one could
            not tell and would store it.
        name: name of this connector in ``kvferry explain``, if an engine has several.
        explain_requests: requests to remember for ``kvferry explain``; 0 for none.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertise_host: str | None = None
    secret_file: str | None = None
    peers: tuple[str, ...] | None = None
    lease_seconds: float = 30.0
    load_timeout_seconds: float = 30.0
    handshake_seconds: float = 10.0
    attempts: int = 2
    late_blocks: float = 0.5
    transfer_log: str | None = None
    layout: Literal["auto", "engine"] | Layout = "auto"
    strategy: Literal["auto", "direct", "over-read", "staged"] = "auto"
    staging_mib: int = 64
    lanes: int = 2
    costs: str | None = None
    host_buffer: bool | None = None
    tiers: Any = None
    transfer: bool | None = None
    chunk_tokens: int | None = None
    snapshot_tokens: int | None = None
    source_policy: PolicyName = "weight"
    load_weight: float = 1.0
    turn_seconds: float = 0.0
    turn_share: float = 0.25
    patience_seconds: float = 10.0
    whole_blocks: bool = False
    name: str = ""
    explain_requests: int = 512

    @property
    def anywhere(self) -> ConnectorConfig:
        """The settings without this machine's address, equal on all machines of an engine."""
        return msgspec.structs.replace(self, host="")

    @property
    def transfers(self) -> bool:
        """Whether KV is exchanged with other engines."""
        return not self.tiers if self.transfer is None else self.transfer


def parse_config(extra: Mapping[str, Any], kv_role: str | None = None) -> ConnectorConfig:
    """Parse the settings that the engine was given.

    Args:
        extra: ``kv_connector_extra_config``.
        kv_role: vLLM's; None where it is not known, or is that of several connectors together. One side of an
            exchange has `transfer` set in the result.

    Raises:
        ConfigError: an unknown key (with the nearest known one), a wrong type, a value out of range, or a
            role that contradicts `transfer`.
    """
    known = [field.name for field in msgspec.structs.fields(ConnectorConfig)]
    check_keys("kv_connector_extra_config", extra, known)
    for key in extra:
        if key != "tiers":  # directories may have names that are no text
            check_text(key, extra[key])
    try:
        config = msgspec.convert(dict(extra), ConnectorConfig)
    except msgspec.ValidationError as error:
        raise unusable("kv_connector_extra_config", error, ConnectorConfig) from error
    if kv_role in _ONE_SIDE:
        if config.transfer is False:
            raise ConfigError(
                f"kv_role is {kv_role}, one side of an exchange with other engines, but transfer is false; "
                "set kv_role to kv_both (kvferry config --role both), or leave transfer out"
            )
        config = msgspec.structs.replace(config, transfer=True)
    _check_ranges(config)
    parse_allowed_peers(config.peers, config.host, config.advertise_host)
    _check_turns(config)
    return config


_RANGES = {
    "port": (0, 65_535),
    "attempts": (1, 16),
    "staging_mib": (0, 65_536),
    "lanes": (1, 16),
    "chunk_tokens": (1, 1 << 20),
    "snapshot_tokens": (1, 1 << 20),
    "explain_requests": (0, 100_000),
}


def _check_ranges(config: ConnectorConfig) -> None:
    for name in ("lease_seconds", "load_timeout_seconds", "handshake_seconds", "patience_seconds"):
        if not 0 < getattr(config, name) < 86_400:
            raise ConfigError(f"{name} is {getattr(config, name)}, it must be above 0 and below a day")
    for name, (low, high) in _RANGES.items():
        value = getattr(config, name)
        if value is not None and not low <= value <= high:
            raise ConfigError(f"{name} is {value}, it must be {low} to {high}")
    check_weight("load_weight", config.load_weight)
    for name in ("late_blocks", "turn_share"):
        if not 0 < getattr(config, name) <= 1:
            raise ConfigError(f"{name} is {getattr(config, name)}, it must be above 0 and at most 1")
    if config.host in _EVERYWHERE and not config.advertise_host:
        raise ConfigError(
            f"host is {config.host}, every address of this machine; set advertise_host to the one that "
            "peers use"
        )
    if read_tiers(config.tiers) is None and not config.transfers:
        raise ConfigError(
            "transfer is false and there are no tiers, so kvferry has nothing to do; set one of them"
        )


def _check_turns(config: ConnectorConfig) -> None:
    if not 0 <= config.turn_seconds < 86_400:
        raise ConfigError(f"turn_seconds is {config.turn_seconds}, it must be 0 or more and below a day")
    if config.turn_seconds and not config.transfers:
        raise ConfigError(
            "turn_seconds is set, but no KV is exchanged with other engines; set transfer to true"
        )
