"""Construction of the sources and the admission of an engine's scheduler half."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import lcm

from kvferry.cache.chunk_cache import ChunkCache
from kvferry.common.errors import ConfigError
from kvferry.connector.admission import Admission
from kvferry.connector.blocks import Headroom, PartBlocks
from kvferry.connector.choosing import BidChooser
from kvferry.connector.config import ConnectorConfig
from kvferry.connector.content import Adapters, TurnNames
from kvferry.connector.engine import BlockPool, DescribeBlocks, EngineFacts, PrefixCache
from kvferry.connector.events import EventStream, Refusals
from kvferry.connector.messages import WorkerInfo
from kvferry.connector.peers.source import PeerSource
from kvferry.connector.peers.turns import TurnFinder
from kvferry.connector.source import RunningLoads, Source
from kvferry.connector.speeds import Speeds
from kvferry.connector.tiers.events import BlockEvents
from kvferry.connector.tiers.prompts import Prompts
from kvferry.connector.tiers.source import TierSource
from kvferry.geometry import Group, GroupKind, RankGeometry
from kvferry.geometry.canonical import CanonicalForm
from kvferry.tiers.index import KeyTable
from kvferry.tiers.names import PEER
from kvferry.tiers.paths import boot_id
from kvferry.transport.addresses import AllowedPeers, is_loopback, parse_allowed_peers
from kvferry.transport.control_client import ControlClient
from kvferry.transport.handshake import Address
from kvferry.transport.security import Keys, key_location, read_keys


class Composition:
    """Builds an engine's sources of KV, and its admission.

    Attributes:
        workers: number of workers, each of which reports every load.
        loads: loads that may still write to their blocks.
        parts: record of the KV blocks that loads fill only in part.
    """

    def __init__(
        self,
        engine: EngineFacts,
        config: ConnectorConfig,
        *,
        pool: BlockPool,
        groups: Sequence[Group],
        workers: int,
        events: EventStream,
        adapters: Adapters,
        refusals: Refusals,
        speeds: Speeds | None = None,
        idle: Callable[[], bool] = lambda: False,
        prefix_cache: PrefixCache | None = None,
        describe_blocks: DescribeBlocks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the records of blocks and speeds that the sources of KV and the admission share.

        Args:
            speeds: speeds measured so far; None for an empty record.
            prefix_cache: the engine's prefix cache, if it shares attention blocks where it lacks recurrent
                state; else None.
            describe_blocks: function that returns the engine's blocks that end in a range of a request's
                tokens, if the engine publishes events about its blocks; else None.
            clock: function that returns monotonic seconds.
        """
        self._clock = clock
        self._prefix_cache, self._describe_blocks = prefix_cache, describe_blocks
        self.engine, self.config, self.pool, self.workers = engine, config, pool, workers
        self._groups, self.events, self.adapters, self._refusals = tuple(groups), events, adapters, refusals
        self.speeds, self._idle = Speeds(clock) if speeds is None else speeds, idle
        self.loads = RunningLoads(
            engine.groups,
            workers=workers,
            pool=pool,
            timeout_seconds=config.load_timeout_seconds,
            clock=clock,
        )
        self.parts = PartBlocks(self._groups, pool, config.whole_blocks)

    def peer_source(
        self,
        client: ControlClient,
        ranks: Sequence[RankGeometry],
        keepers: Callable[[], Mapping[Address, int]],
        names: TurnNames,
        meets: Sequence[Address] = (),
    ) -> PeerSource:
        """Create the source that loads KV from peers.

        Args:
            keepers: function that returns the peers that keep turns: addresses and incarnations.
            names: names of turns by which peers find them.
            meets: control channels of peers that the workers connect to before the first load.
        """
        config = self.config
        return PeerSource(
            client,
            ranks=ranks,
            loads=self.loads,
            refusals=self._refusals,
            timeout_seconds=config.load_timeout_seconds,
            most_held=int(config.late_blocks * self.engine.num_blocks),
            turns=TurnFinder(client, keepers, names),
            adapters=self.adapters,
            idle=self._idle,
            meets=meets,
            clock=self._clock,
        )

    def tier_source(self, cache: ChunkCache, prompts: Prompts, canonical: CanonicalForm) -> TierSource:
        # Only a policy that estimates times can prefer a shorter prefix from faster tiers.
        bid_per_tier = self.config.source_policy == "cost"
        return TierSource(
            cache,
            prompts,
            self._groups,
            canonical,
            self._refusals,
            workers=self.workers,
            most_loads=self.config.tier_loads,
            bid_per_tier=bid_per_tier,
        )

    def block_events(self, table: KeyTable, tiers: Mapping[int, str]) -> BlockEvents | None:
        """Create the source of events about blocks in tiers; None if the engine publishes no such events.

        Args:
            tiers: names of the tiers, by their bits in `table`.
        """
        if self._describe_blocks is None:
            return None
        blocks = lcm(*(one.block_tokens for one in self.engine.groups if one.kind is not GroupKind.STATE))
        return BlockEvents(self._describe_blocks, table, tiers, self.events, blocks)

    def admission(
        self, sources: Sequence[Source], tier_weights: Mapping[str, float] | None = None
    ) -> Admission:
        """Create the admission. Of equally good offers, that of the first source is taken.

        Args:
            tier_weights: factor by which the policy ``weight`` multiplies the tokens of a tier; 1 for a
            missing tier.
        """
        engine, config = self.engine, self.config
        weights = {PEER: config.load_weight, **(tier_weights or {})}
        return Admission(
            engine.groups,
            loads=self.loads,
            parts=self.parts,
            headroom=Headroom.of(engine.groups, engine.step_tokens, self.pool),
            attempts=config.attempts,
            sources=sources,
            chooser=BidChooser(config.source_policy, self.speeds, config.patience_seconds, weights),
            events=self.events,
            prefix_cache=self._prefix_cache,
            clock=self._clock,
        )


logger = logging.getLogger(__name__)


def scheduler_keys(config: ConnectorConfig) -> Keys | None:
    """Return the secret keys that protect the control channels between this engine and other engines.

    Return None if the engine exchanges no KV and has no admin API, whose token derives from the keys. Log the
    location and the fingerprint of the keys. Log a warning if engines on other machines may connect but the
    setting ``secret_file`` is not set: such engines are refused until the user gives them the same secret.

    Raises:
        ConfigError: the key file cannot be read, or a missing one cannot be created.
    """
    if not config.transfers and config.admin is None:
        return None
    keys, place = read_keys(config.secret_file), key_location(config.secret_file)
    logger.info("channels between engines use %s (fingerprint %s)", place, keys.fingerprint)
    if config.transfers and not place.configured and not is_loopback(config.host):
        logger.warning(
            "host is %s and secret_file is not set, so only this user's engines on this machine have "
            "the key: others are refused until they have it too; copy %s to their machines, or make a file "
            "with kvferry keygen FILE, and set secret_file everywhere",
            config.host, place.path,
        )  # fmt: skip
    return keys


def peers_allowed(config: ConnectorConfig) -> AllowedPeers:
    """Return the machines whose engines may exchange KV with this engine.

    Raises:
        ConfigError: the setting ``peers`` has a malformed entry, no entry, or too many entries.
    """
    return parse_allowed_peers(config.peers, config.host, config.advertise_host)


def check_rank_keys(keys: Keys, workers: Iterable[WorkerInfo]) -> None:
    """Check that all ranks of the engine have the same key as its scheduler.

    Raises:
        ConfigError: the key of a rank differs. This happens if the rank runs on another machine, which has a
        key of
            its own.
    """
    for worker in workers:
        if worker.key not in (None, keys.fingerprint):
            geometry = worker.geometry
            raise ConfigError(
                f"rank TP{geometry.tp_rank} PP{geometry.pp_rank} has a key with fingerprint {worker.key}, "
                f"the engine's scheduler one with {keys.fingerprint}: its machine has a key of its own; set "
                "secret_file to the same secret on all machines of the engine (kvferry keygen FILE makes one)"
            )


def check_one_machine(workers: Iterable[WorkerInfo]) -> None:
    """Check that all ranks of an engine with tiers run on the machine of its scheduler.

    Raises:
        ConfigError: a rank runs on another machine, where it cannot use the scheduler's host memory.
    """
    for worker in workers:
        if worker.machine != boot_id():
            geometry = worker.geometry
            raise ConfigError(
                f"rank TP{geometry.tp_rank} PP{geometry.pp_rank} runs on another machine than the engine's "
                "scheduler, but the ranks of an engine with tiers share host memory; leave tiers out, or "
                "start the engine on one machine"
            )
