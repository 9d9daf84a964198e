"""The one place that puts the parts of a scheduler half together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvferry.cache.chunk_cache import ChunkCache
from kvferry.connector.adapters import Adapters
from kvferry.connector.admission import Admission
from kvferry.connector.config import ConnectorConfig
from kvferry.connector.engine import Block, BlockPool, EngineFacts
from kvferry.connector.headroom import Headroom
from kvferry.connector.part_blocks import PartBlocks
from kvferry.connector.peers.source import PeerSource
from kvferry.connector.peers.turn_finder import TurnFinder
from kvferry.connector.peers.turn_names import TurnNames
from kvferry.connector.pins import Pins
from kvferry.connector.policies import Choice, policy_named
from kvferry.connector.refusals import Refusals
from kvferry.connector.source import Source
from kvferry.connector.speeds import Speeds
from kvferry.connector.stream import EventStream
from kvferry.connector.tiers.prompts import Prompts
from kvferry.connector.tiers.source import TierSource
from kvferry.geometry import Group, RankGeometry
from kvferry.geometry.canonical import CanonicalForm
from kvferry.tiers.names import PEER
from kvferry.transport.control_client import ControlClient
from kvferry.transport.handshake import Address


class Composition:
    """Makes the sources and the admission of one engine, which share pins, part blocks and measured speeds.

    Attributes:
        pins: blocks that loads may write.
        parts: blocks that loads fill in part.
        speeds: what loads and steps took.
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
    ) -> None:
        """Make what the parts share.

        Args:
            engine: facts of the engine.
            config: the connector's settings.
            pool: the engine's block pool.
            groups: the engine's KV cache groups, as a rank has them.
            workers: number of workers that report a load.
            events: receives events.
            adapters: the engine's LoRA adapters.
            refusals: logs requests that are not served.
            speeds: what loads and steps took so far.
        """
        self._engine, self._config, self._pool, self._workers = engine, config, pool, workers
        self._groups, self._events, self._adapters, self._refusals = tuple(groups), events, adapters, refusals
        self.speeds = Speeds() if speeds is None else speeds
        self.pins: Pins[Block] = Pins(workers)
        self.parts = PartBlocks(self._groups, pool, config.whole_blocks)

    def peer_source(
        self,
        client: ControlClient,
        ranks: Sequence[RankGeometry],
        keepers: Callable[[], Mapping[Address, int]],
        names: TurnNames,
    ) -> PeerSource:
        """Make the source of peers' KV.

        Args:
            client: control channel to the producers.
            ranks: this engine's ranks.
            keepers: returns the peers that keep earlier turns, each with its incarnation.
            names: names of turns.
        """
        config = self._config
        return PeerSource(
            client,
            ranks=ranks,
            pins=self.pins,
            refusals=self._refusals,
            timeout_seconds=config.load_timeout_seconds,
            most_held=int(config.late_blocks * self._engine.num_blocks),
            turns=TurnFinder(client, keepers, names),
            adapters=self._adapters,
        )

    def tier_source(self, cache: ChunkCache, prompts: Prompts, canonical: CanonicalForm) -> TierSource:
        """Make the source of stored chunks.

        Args:
            cache: the engine's chunks.
            prompts: names of requests' chunks.
            canonical: the form of chunks.
        """
        # Only a policy that estimates times can prefer a shorter prefix from faster tiers.
        apart = self._config.source_policy == "cost"
        return TierSource(cache, prompts, self._groups, canonical, self._refusals, apart=apart)

    def admission(
        self, sources: Sequence[Source], tier_weights: Mapping[str, float] | None = None
    ) -> Admission:
        """Make the admission that chooses between sources.

        Args:
            sources: in the order in which they are asked.
            tier_weights: weight of each tier, by its name; 1 where none is given.
        """
        engine, config = self._engine, self._config
        weights = {PEER: config.load_weight, **(tier_weights or {})}
        policy = policy_named(config.source_policy, weights, self.speeds)
        return Admission(
            engine.groups,
            pins=self.pins,
            parts=self.parts,
            headroom=Headroom.of(engine.groups, engine.step_tokens, self._pool),
            pool=self._pool,
            workers=self._workers,
            attempts=config.attempts,
            timeout_seconds=config.load_timeout_seconds,
            sources=sources,
            choice=Choice(policy, self.speeds, config.patience_seconds),
            events=self._events,
        )
