"""Construction of the sources and the admission of an engine's scheduler half."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import lcm

from kvferry.cache.chunk_cache import ChunkCache
from kvferry.connector.adapters import Adapters
from kvferry.connector.admission import Admission
from kvferry.connector.answer_times import AnswerTimes
from kvferry.connector.block_runs import DescribeBlocks
from kvferry.connector.choosing import BidChooser
from kvferry.connector.config import ConnectorConfig
from kvferry.connector.engine import BlockPool, EngineFacts, PrefixCache
from kvferry.connector.headroom import Headroom
from kvferry.connector.part_blocks import PartBlocks
from kvferry.connector.peers.source import PeerSource
from kvferry.connector.peers.turn_finder import TurnFinder
from kvferry.connector.peers.turn_names import TurnNames
from kvferry.connector.policies import policy_named
from kvferry.connector.running_loads import RunningLoad
from kvferry.connector.source import Source
from kvferry.connector.speeds import Speeds
from kvferry.connector.stream import EventStream, Refusals
from kvferry.connector.tiers.block_events import BlockEvents
from kvferry.connector.tiers.prompts import Prompts
from kvferry.connector.tiers.source import TierSource
from kvferry.connector.transfer import TransferBook
from kvferry.geometry import Group, GroupKind, RankGeometry
from kvferry.geometry.canonical import CanonicalForm
from kvferry.tiers.index.key_table import KeyTable
from kvferry.tiers.names import PEER
from kvferry.transport.control_client import ControlClient
from kvferry.transport.handshake import Address


class Composition:
    """Builds an engine's sources of KV, and its admission (object that chooses a source for each request).

    Attributes:
        engine: facts about the engine.
        config: settings of the connector.
        pool: the engine's block pool.
        workers: number of workers.
        events: stream that receives the events.
        adapters: the engine's LoRA adapters.
        loads: loads that may still write to their blocks.
        parts: record of the KV blocks that loads fill only in part.
        speeds: measured speeds of loads and of prompt computation.
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
            engine: facts about the engine.
            config: settings of the connector.
            pool: the engine's block pool.
            groups: the engine's KV cache groups, from the description of one rank.
            workers: number of workers, each of which reports every load.
            events: stream that receives the events.
            adapters: the engine's LoRA adapters.
            refusals: log of the requests that a source refuses.
            speeds: speeds measured so far; None for an empty record.
            idle: function that returns whether the engine computes no request at present.
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
        self.speeds, self._idle = Speeds() if speeds is None else speeds, idle
        self.loads = TransferBook[RunningLoad](workers, pool)
        self.parts = PartBlocks(self._groups, pool, config.whole_blocks)

    def peer_source(
        self,
        client: ControlClient,
        ranks: Sequence[RankGeometry],
        keepers: Callable[[], Mapping[Address, int]],
        names: TurnNames,
        meets: Sequence[Address] = (),
    ) -> PeerSource:
        """Create the source that loads KV from peers (other engines).

        A *turn* is the KV of a finished request that an engine keeps for the next turn of the conversation.

        Args:
            client: control channel to the peers that offer KV.
            ranks: geometry of this engine's ranks.
            keepers: function that returns the peers that keep turns. The result maps each peer's address to
                its incarnation, a random number that identifies the peer's present run.
            names: object that computes the names of turns, which are digests of their tokens and of all else
                that determines their KV. Peers find turns by these names.
            meets: (host, port) of the control channels of peers that the workers connect to before the first
                load.
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
        """Create the source that loads KV chunks from this engine's tiers (host memory and slower storage).

        Args:
            cache: cache of the chunks in host memory and in the slower tiers.
            prompts: record of the engine's requests and of the keys of their chunks.
            canonical: format in which chunks are stored.
        """
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
            table: table of the tiers' chunks.
            tiers: names of the tiers, by their bits in `table`.
        """
        if self._describe_blocks is None:
            return None
        blocks = lcm(*(one.block_tokens for one in self.engine.groups if one.kind is not GroupKind.STATE))
        return BlockEvents(self._describe_blocks, table, tiers, self.events, blocks)

    def admission(
        self, sources: Sequence[Source], tier_weights: Mapping[str, float] | None = None
    ) -> Admission:
        """Create the admission: the object that chooses a source of KV for each request.

        Args:
            sources: all sources, in the order in which the admission asks them.
            tier_weights: maps a tier's name to the factor by which the policy ``weight`` multiplies the
                number of tokens from this tier. The factor is 1 for a missing tier, and for all if None.
        """
        engine, config = self.engine, self.config
        weights = {PEER: config.load_weight, **(tier_weights or {})}
        policy = policy_named(config.source_policy, weights, self.speeds)
        return Admission(
            engine.groups,
            loads=self.loads,
            parts=self.parts,
            headroom=Headroom.of(engine.groups, engine.step_tokens, self.pool),
            attempts=config.attempts,
            timeout_seconds=config.load_timeout_seconds,
            sources=sources,
            chooser=BidChooser(policy, self.speeds, config.patience_seconds, AnswerTimes(self._clock)),
            events=self.events,
            prefix_cache=self._prefix_cache,
            clock=self._clock,
        )
