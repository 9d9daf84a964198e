"""The opening of an engine's tiers: the format of their chunks, host memory, and the storage behind it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from kvferry.cache.chunk_cache import ChunkCache
from kvferry.cache.tier_queue import TierQueue
from kvferry.common.errors import ConfigError, GeometryError, Incompatible, Unnameable
from kvferry.common.units import parse_size
from kvferry.connector.config import ConnectorConfig, Tiers
from kvferry.connector.engine import EngineFacts
from kvferry.connector.tiers.arenas import Arenas
from kvferry.geometry import RankGeometry
from kvferry.geometry.canonical import CanonicalForm, canonical_form_of, share_of
from kvferry.geometry.canonical.derive import (
    check_blocks,
    check_prompt_length,
    chunk_length,
    late_prefix,
    snapshot_interval,
    whole_block_tokens,
)
from kvferry.keys.namespace import Namespace
from kvferry.planning.chunk_cells import check_storable
from kvferry.planning.shares import share_copies
from kvferry.tiers.eviction import EVICTION_POLICIES, EvictionPolicy
from kvferry.tiers.eviction.fair import FairEviction
from kvferry.tiers.fleet.settings import FleetSettings
from kvferry.tiers.fleet.tier import FleetPlace, FleetTier
from kvferry.tiers.format.chunk import ChunkGroup
from kvferry.tiers.host.settings import available_bytes
from kvferry.tiers.host.tier import HostTier
from kvferry.tiers.index import KeyTable
from kvferry.tiers.names import HOST, tier_name
from kvferry.tiers.shares.exchange import ShareExchange
from kvferry.tiers.shares.tier import READERS, WRITERS, ShareTier
from kvferry.tiers.storage_tier import StorageSettings, StorageTier
from kvferry.tiers.tenants import Tenants
from kvferry.tiers.write_filter import WriteFilter
from kvferry.transport.addresses import parse_port_range
from kvferry.transport.security import Keys

logger = logging.getLogger(__name__)

_DEFAULT_SHARE = 10
"""Divisor of the available memory that gives the default size of the host memory tier."""


NamespaceOf: TypeAlias = Callable[[CanonicalForm], Namespace]


def canonical_forms(
    config: ConnectorConfig, engine: EngineFacts, machines: Sequence[Sequence[RankGeometry]]
) -> tuple[CanonicalForm, list[CanonicalForm]]:
    """Return the format in which this engine stores chunks, and those of each machine's share.

    Raise ConfigError if no chunk can be stored.
    """
    ranks = [rank for machine in machines for rank in machine]
    blocks = [group.snapshot_tokens for group in engine.groups]
    if engine.has_rings:
        raise ConfigError(
            "tiers: layers of this model keep a ring buffer per request, which is valid at one position "
            "only, so none of their chunks can ever be stored; configure no tiers (transfers between engines "
            "work)"
        )
    if 0 in blocks:
        raise ConfigError(
            "tiers: this engine keeps a running state per request and no snapshots, so no chunk of its "
            "recurrent layers can ever be stored; enable prefix caching (--enable-prefix-caching "
            "--mamba-cache-mode align), or configure no tiers"
        )
    interval = snapshot_interval(*(block for block in blocks if block))
    block = whole_block_tokens(ranks)
    tokens = chunk_length(config.chunk_tokens, interval, block)
    check_blocks(tokens, block)
    check_prompt_length(tokens, interval, engine.longest_request)
    if late := late_prefix(tokens, interval):
        logger.warning("tiers: %s", late)
    try:
        canonical = canonical_form_of(ranks, tokens)
        shares = [share_of(canonical, machine) for machine in machines]
        if len(machines) == 1:
            check_storable(canonical, ranks)
    except (GeometryError, Incompatible) as error:
        raise ConfigError(
            f"tiers: {error}; choose another attention backend, layout or KV cache dtype (docs/backends.md), "
            "or configure no tiers"
        ) from error
    if len(machines) > 1:
        _check_shares(canonical, shares, machines)
    return canonical, shares


def _check_shares(
    canonical: CanonicalForm, shares: Sequence[CanonicalForm], machines: Sequence[Sequence[RankGeometry]]
) -> None:
    """Raise ConfigError unless the ranks of each machine hold its whole share, and all a whole chunk."""
    try:
        for share, machine in zip(shares, machines, strict=True):
            check_storable(share, machine)
        share_copies(canonical, shares)
    except Incompatible as error:
        raise ConfigError(
            "tiers: the ranks of a machine must hold neighbouring heads or whole layers of all tokens, and "
            f"those of this engine do not ({error}); give each machine neighbouring tensor-parallel ranks or "
            "pipeline stages, and divide tokens (context parallelism) inside a machine only, or configure no "
            "tiers"
        ) from error


def host_bytes(tiers: Tiers) -> int:
    """Return the configured or default size of host memory. Raise ConfigError if neither is known."""
    capacity = tiers.host.capacity
    return available_bytes() // _DEFAULT_SHARE if capacity is None else parse_size(capacity)


def open_cache(
    tiers: Tiers,
    engine: EngineFacts,
    config: ConnectorConfig,
    machines: Sequence[Sequence[RankGeometry]],
    shares: Sequence[CanonicalForm],
    *,
    canonical: CanonicalForm,
    tenants: Tenants | None,
    namespace: NamespaceOf,
    keys: Keys | None,
    wake: Callable[[], None],
) -> tuple[Arenas, ChunkCache, dict[str, float]]:
    """Open host memory and the storage behind it. Return them, and the setting ``load_weight`` by tier."""
    table, ports = KeyTable(), parse_port_range(config.ports)
    arenas = Arenas(
        host_bytes(tiers),
        machines,
        canonical,
        shares,
        buffers=len(tiers.slow) * (READERS + WRITERS),
        host=config.host,
        ports=ports,
        wake=wake,
    )
    arena = arenas.own
    # A slot has room for the largest share.
    sizes = [
        max(group.chunk_bytes for group in groups) for groups in zip(*(s.groups for s in shares), strict=True)
    ]
    policy: Callable[[int], EvictionPolicy] = EVICTION_POLICIES[tiers.host.eviction_policy]
    if tenants is not None:
        tenants.check_limits(HOST, arena.region.length, max(sizes))
        policy = partial(FairEviction, policy=policy, tenants=tenants, evicted=Counter())
    host = HostTier(arena.region.length, sizes, policy, table, arenas.ready_bytes)
    place = None
    if keys is not None:
        place = FleetPlace(
            host_tier=host,
            arena=arena,
            groups=canonical.groups,
            keys=keys,
            peers=config.allowed_peers(),
            host=config.host,
            advertise_host=config.advertise_host or config.host,
            ports=ports,
            port_offset=engine.port_offset,
            wake=wake,
        )
    opened = open_tiers(tiers.slow, lambda: namespace(canonical), table, place, arenas.exchange, tenants)
    behind = [one for one, _ in opened]
    logger.info(
        "tiers: chunks of %d tokens; host memory of %.2f GiB%s%s",
        canonical.chunk_tokens, arena.region.length / 2**30,
        f" on each of {len(machines)} machines" if len(machines) > 1 else "",
        "".join(f", {one.name}" for one in behind),
    )  # fmt: skip
    weights = {HOST: tiers.host.load_weight, **{one.name: weight for one, weight in opened}}
    return arenas, ChunkCache(host, arena.bytes_at, canonical.groups, behind), weights


def open_tiers(
    tiers: Sequence[StorageSettings],
    get_namespace: Callable[[], Namespace],
    table: KeyTable,
    place: FleetPlace | None = None,
    exchange: ShareExchange | None = None,
    tenants: Tenants | None = None,
) -> list[tuple[TierQueue, float]]:
    """Open the storage tiers, the fastest first. Log each one that cannot be opened, and leave it out.

    Args:
        get_namespace: returns the namespace of the keys. Called only if there is a tier, and not again after
            it has succeeded.
        place: what the fleet tier needs of the engine; None if the engine cannot have one.
        exchange: of an engine on several machines; None for one machine.
        tenants: share the tiers by weight; None if chunks are evicted whoever stored them.

    Returns:
        (tier, setting ``load_weight``) for each opened tier.
    """
    found: list[tuple[TierQueue, float]] = []
    kinds = Counter[str]()
    namespace = None
    for number, settings in enumerate(tiers):
        try:
            namespace = namespace or get_namespace()
            if isinstance(settings, FleetSettings) and exchange is not None:
                raise ConfigError(
                    "fleet tier: the ranks of this engine run on several machines, and none has whole chunks "
                    "in host memory that other engines could read; leave the fleet tier out"
                )
            if isinstance(settings, FleetSettings) and place is not None:
                tier: StorageTier = FleetTier(settings, namespace, place)
            else:
                tier = settings.open(namespace, table, tiers[:number])
        except (ConfigError, Unnameable) as error:
            logger.error("%s; this engine serves on without that tier", error)  # noqa: TRY400 - said in full
            continue
        if tenants is not None:
            tier.use_tenants(tenants)
        name = tier_name(settings.kind, kinds[settings.kind])
        write_back = settings.write == "back"
        admission = WriteFilter[ChunkGroup](settings.min_uses, settings.min_prompt_tokens)
        if exchange is None:
            queue = TierQueue(tier, name, write_back=write_back, write_filter=admission, tenants=tenants)
        else:
            shares = ShareTier(tier, exchange)
            queue = TierQueue(
                *(shares, name, READERS, WRITERS),
                write_back=write_back,
                write_filter=admission,
                tenants=tenants,
            )
        kinds[settings.kind] += 1
        found.append((queue, settings.load_weight))
    return found
