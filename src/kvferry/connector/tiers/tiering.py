"""The tiers of one engine: host memory, files and object stores. They run in the scheduler's process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence, Sized
from math import lcm

import numpy as np

from kvferry.cache.pinned import PinnedChunks
from kvferry.cache.sessions import SessionName
from kvferry.connector.bids import Speeds
from kvferry.connector.blocks import PartBlocks
from kvferry.connector.config import ConnectorConfig, Tiers, check_snapshot_tokens
from kvferry.connector.content import Adapters, Prompts
from kvferry.connector.engine import BlockIds, BlockPool, DescribeBlocks, EngineFacts, Request, Step
from kvferry.connector.events import EventStream
from kvferry.connector.messages import StepOrders, StepReports
from kvferry.connector.tiers.events import BlockEvents, TierEvents
from kvferry.connector.tiers.hinting import Hinting
from kvferry.connector.tiers.milestones import SnapshotPlaces, snapshot_rule
from kvferry.connector.tiers.opening import NamespaceOf, canonical_forms, open_cache
from kvferry.connector.tiers.source import TierSource
from kvferry.connector.tiers.storing import StoreOrders, Storing
from kvferry.geometry import GroupKind, RankGeometry
from kvferry.planning.coverage import NO_TIER, TierNumbers
from kvferry.tiers.index import Tags
from kvferry.tiers.names import FLEET, tier_kind
from kvferry.transport.security import Keys

logger = logging.getLogger(__name__)

_CLOSING_SECONDS = 10.0


class Tiering:
    """Opens the tiers of one engine, stores and loads chunks in every step, and closes the tiers.

    Attributes:
        weights: setting ``load_weight`` of each tier, by name.
        chunking: number of tokens per chunk, distance in tokens between positions at which windows and
            snapshots are kept, and the first position of a snapshot for shared prefixes in tokens (0 for
            none; None for a model without recurrent state).
    """

    def __init__(
        self,
        tiers: Tiers,
        engine: EngineFacts,
        config: ConnectorConfig,
        machines: Sequence[Sequence[RankGeometry]],
        *,
        pool: BlockPool,
        parts: PartBlocks,
        adapters: Adapters,
        events: EventStream,
        speeds: Speeds,
        namespace: NamespaceOf,
        keys: Keys | None = None,
        describe_blocks: DescribeBlocks | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the tiers, and begin to allocate the arena. Create this object after all workers have started.

        Args:
            machines: ranks of each machine, those of this process's machine first.
            wake: makes the engine run a step soon.

        Raises:
            ConfigError: no chunk could ever be stored, or the memory cannot be allocated.
        """
        ranks = [rank for machine in machines for rank in machine]
        canonical, shares = canonical_forms(config, engine, machines)
        tenants = config.weighted_tenants()
        self._arenas, self._cache, self.weights = open_cache(
            tiers,
            engine,
            config,
            machines,
            shares,
            canonical=canonical,
            tenants=tenants,
            namespace=namespace,
            keys=keys,
            wake=wake,
        )
        self._pinned = PinnedChunks(self._cache.host)
        # Other engines publish the blocks in their host memory themselves.
        self._bits = {
            bit: name
            for bit, name in zip(self._cache.bits, self._cache.tiers, strict=True)
            if tier_kind(name) != FLEET
        }
        self._block_events: BlockEvents | None = None
        if describe_blocks is not None:
            blocks = lcm(*(one.block_tokens for one in engine.groups if one.kind is not GroupKind.STATE))
            self._block_events = BlockEvents(
                describe_blocks, self._cache.host.keys.table, self._bits, events, blocks
            )
        self._prompts = Prompts(
            canonical,
            adapters,
            None if self._block_events is None else self._block_events.beginnings,
            prompts_only=engine.reuses_prompts_only,
        )
        self.source = TierSource(
            self._cache,
            self._prompts,
            ranks[0].groups,
            canonical,
            events,
            workers=len(ranks),
            most_loads=config.tier_loads,
            tenants=tenants,
            speeds=speeds if config.source_policy == "cost" else None,
        )
        self._stores = StoreOrders(self._cache, pool, len(ranks), canonical.labels, events)
        chunk_tokens = canonical.chunk_tokens
        snapshot_tokens = config.snapshot_tokens or chunk_tokens
        check_snapshot_tokens(snapshot_tokens, chunk_tokens)
        rule = snapshot_rule(config.first_snapshot_tokens, engine, canonical, snapshot_tokens)
        self.chunking = (chunk_tokens, snapshot_tokens, rule.first if rule.usual else None)
        self._places = SnapshotPlaces(rule.first, rule.interval)
        self._storing = Storing(
            self._cache,
            self._prompts,
            canonical,
            ranks[0].groups,
            parts,
            self._stores,
            snapshot_tokens,
            self._block_events,
        )
        self._hinting = Hinting(self._cache, self._prompts, ranks[0].groups, canonical, config, events)
        self._events = TierEvents(self._cache, self._stores.dropped, events)
        self._lost = ""  # why the arenas are not used any more
        rule.announce(events)

    @property
    def busy(self) -> bool:
        """True if the engine must run steps without requests, for stores, loads and writes under way."""
        return (
            self._stores.busy
            or self.source.busy
            or self._cache.busy
            or self._arenas.busy
            or self._hinting.busy
        )

    @property
    def holds_blocks(self) -> bool:
        """True if stores pin blocks, which will soon be free: the engine should wait and not preempt."""
        return self._stores.busy

    def on_new_request(self, request: Request) -> None:
        """Read the hints of a new request, and prepare to store its chunks."""
        self._storing.on_new_request(request, self._hinting.on_new_request(request))

    def place_snapshots(self, request: Request, start: int) -> None:
        """Have the engine take snapshots of a request that it is about to admit, for other prompts.

        `start` is the position in tokens at which the engine begins to compute.
        """
        if (chunks := self._prompts.get(request)) is not None:
            self._places.admit(request, start, chunks.shared_tokens)

    @property
    def agenda(self) -> tuple[Sized, ...]:
        """Containers that are all empty if a step needs neither `poll` nor `schedule`, after `counters`."""
        return (
            self._arenas.cards,
            *self._storing.agenda,
            *self._places.agenda,
            *self._stores.agenda,
            *self._cache.agenda,
            *self._hinting.agenda,
        )

    @property
    def counters(self) -> tuple[Callable[[Step], None], ...]:
        """Functions that find what the coming step has to do for the tiers. Call each once per step."""
        return self._storing.count, self._places.count

    def poll(self, *, idle: bool) -> None:
        """Collect finished reads and writes, and start more. A step of an `idle` engine waits for reads."""
        if idle:
            self._cache.await_reads()
        self._cache.poll()
        self._hinting.poll()
        # Before new orders: slots that have just become free may still be written to.
        self._check_arenas()

    def schedule(self, step: Step, started: Iterable[str], orders: StepOrders) -> None:
        """Add to `orders` which chunks the ranks store.

        `started` are the requests of the step that the engine has admitted since their last step.
        """
        # If ranks can attach the arena before the first request, they do.
        if self._arenas.can_attach:
            orders.arena = self._arenas.cards.pop()
        self._storing.schedule(step, started)
        self._places.schedule(step, started)
        orders.stores = self._stores.take()

    def take_reports(self, reports: StepReports) -> None:
        self._arenas.take_reports(reports)
        self._stores.take_reports(reports)
        self.source.take_reports(reports)
        self._check_arenas()

    def step_done(self) -> None:
        """Emit events about the chunks that tiers have read, stored or evicted since the last step."""
        self._events.emit_changes()
        self._hinting.step_done()
        if self._block_events is not None:
            self._block_events.emit_changes()

    def finished(self, request: Request, block_ids: BlockIds) -> None:
        """Order the ranks to store the last chunks of a request that has ended, and forget the request."""
        used = self._storing.finished(request, block_ids)
        if (apply := self._hinting.finished(request, used)) is not None:
            self._stores.when_ended(request.request_id, apply)
        self._places.forget(request.request_id)
        self._prompts.remove(request.request_id)

    def start_anew(self) -> None:
        """Invalidate all chunks stored so far, because the engine's cache is reset."""
        self._prompts.start_anew()
        self._stop()
        self.drop_host_memory()
        if self._lost:
            self.suspend(self._lost)

    def suspend(self, why: str) -> None:
        """Stop storing and loading until `start_anew`. Stored chunks stay valid for other engines."""
        self._prompts.suspend(why)
        self._stop()

    def _check_arenas(self) -> None:
        """Use no tier any more if the arena of another machine is lost."""
        if self._arenas.lost and not self._lost:
            self._lost = self._arenas.lost
            logger.error("tiers: %s; this engine uses no tier from now on: start it anew", self._lost)
            self.suspend(self._lost)

    def _stop(self) -> None:
        self._storing.start_anew()
        self.source.start_anew()
        self._forget_blocks()

    def _forget_blocks(self) -> None:
        if self._block_events is not None:
            self._block_events.start_anew()

    def look_up(self, request: Request) -> dict[str, int]:
        """Return how many of a prompt's tokens each tier could load by itself. Raise Unnameable."""
        chunks, table = self._prompts.chunks_of(request), self._cache.host.keys.table
        found = {}
        for bit, name in self._bits.items():

            def numbers(tags: Tags, bit: int = bit) -> TierNumbers:
                return np.where(table.tier_bits(tags) & bit, 0, NO_TIER)

            found[name] = chunks.look_up(request.num_tokens, 0, numbers).tokens
        return found

    def pin(self, name: str, request: Request) -> tuple[int, int, int]:
        """Pin the chunks of a prompt in host memory, in place of an earlier pin. Raise Unnameable.

        Return (number of chunks of the prompt, how many are in host memory, how many of those are pinned).
        """
        keys = self._prompts.chunks_of(request).all_keys(request.num_prompt_tokens)
        in_host = int(self._cache.host.contains(keys).sum())
        return len(keys), in_host, self._pinned.pin(name, keys, request.cache_salt or "")

    def unpin(self, name: str) -> int:
        """Remove a pin. Return the number of chunks that it held; 0 if there is no pin of this name."""
        return self._pinned.unpin(name)

    def prefetch(self, request: Request) -> tuple[int, int]:
        """Bring the chunks of a prompt to host memory. Raise Unnameable.

        Return (number of chunks that tiers have, how many of them are in host memory already).
        """
        return self._hinting.prefetch(request)

    def prefetch_session(self, session: SessionName) -> tuple[int, int]:
        """Bring the chunks of a session's last request to host memory, as `prefetch` does."""
        return self._hinting.prefetch_session(session)

    def end_session(self, session: SessionName) -> int:
        """Make the chunks cold that only this session has used. Return their number."""
        return self._hinting.end_session(session)

    def drop_host_memory(self) -> int:
        """Drop all chunks in host memory, and all pins. Return the number of dropped chunks."""
        dropped = len(self._cache.host)
        self._pinned.clear()
        self._hinting.clear()
        self._cache.clear()
        return dropped

    def forget_salt(self, salt: str) -> None:
        """Make requests with a cache salt find none of the chunks that were stored so far, in any tier.

        Pins of prompts with this salt are removed. The chunks stay until they are evicted. Other engines that
        share a slow tier still find them. The salt is empty for requests without one.
        """
        self._pinned.unpin_salt(salt)
        self._hinting.forget_salt(salt)
        self._prompts.forget_salt(salt)
        self._forget_blocks()  # nothing tells which of them have this salt

    @property
    def owed_chunks(self) -> int:
        """Number of chunks that are still to be copied to host memory, or to be written to slow tiers."""
        return self._stores.chunks + sum(map(len, self._cache.slow_tiers))

    def shutdown(self) -> None:
        """Write queued chunks to storage for at most `_CLOSING_SECONDS`, then free the arena."""
        self._cache.shutdown(_CLOSING_SECONDS)
        self._arenas.close()
