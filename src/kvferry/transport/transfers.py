"""The transfers of a worker: lanes (threads) that read from peers, and the memory that peers read.

A large order is split over the lanes. Every lane plans and reads its own share, so several cores post
descriptors and unpack cells. An order that is too small to be split, and small orders that are queued
together, are read whole, each by one lane: no other lane wakes up for them. An order has exactly one report,
which is delivered when no lane has a READ of the order in flight.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from kvferry.common.errors import ConfigError
from kvferry.geometry import RankGeometry, Region
from kvferry.memory.device_stream import on_device
from kvferry.memory.pages import HugePageCollapser, request_huge_pages
from kvferry.planning.select import LoadSpan, count_blocks_needed
from kvferry.transport.agent import Agent, restrict_ucx_to
from kvferry.transport.costs import TransferSettings
from kvferry.transport.gather_server import GatherServer
from kvferry.transport.lane import Lane, MakeAgent
from kvferry.transport.lease import LeaseWords
from kvferry.transport.messages import Outgoing, RankCard
from kvferry.transport.metadata_sandbox import MetadataSandbox
from kvferry.transport.metadata_validation import MetadataValidator
from kvferry.transport.read_plan import ReadOrder, Report
from kvferry.transport.staging import UNIT_BYTES, StagingArea, make_outgoing_file

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT = 256

# So long that several lanes read as soon as one, whose thread need not be woken: 5 ms on a processor of 2023.
READ_NOW_BYTES = 16 << 20


class _ExportedMemory:
    """The memory of a worker that peers can read, its `card`, and the server that gathers for peers."""

    def __init__(
        self, geometry: RankGeometry, words: LeaseWords, settings: TransferSettings, agent: Agent
    ) -> None:
        """Register KV cache, staging area and lease words with NIXL, and start the server that gathers.

        Words that protect the staging area are appended to `words`. `close` closes the agent, which nothing
        else may use.
        """
        self._agent = agent
        outgoing = StagingArea(settings.staging_bytes, geometry.regions[0])
        size = outgoing.units * UNIT_BYTES
        self._shared = shared = make_outgoing_file(size, geometry.regions[0]) if size else None
        # Before registration, because the words move to a new array.
        first_word = words.add(outgoing.units)
        if shared is not None:
            words.add(shared.units)
        areas = [outgoing.region] if size else []
        for region in areas:
            request_huge_pages(region)
        agent.register([*geometry.regions, *areas, Region(words.address, words.array.nbytes)])
        self._gatherer: GatherServer | None = None
        offered = None
        if size:
            self._gatherer = GatherServer(geometry, outgoing, words, first_word, settings, shared=shared)
            host, port, region = settings.advertise_host, self._gatherer.port, outgoing.region
            own_words = len(words.array) - first_word
            offered = Outgoing(
                host, port, region.address, region.length, own_words, shared.file if shared else None
            )
        self.card = RankCard(
            geometry, agent.metadata(), words.address, len(words.array), words.incarnation, offered
        )
        # The engine has written to its cache before it handed it over. To move 1 GiB takes seconds.
        self._collapser = HugePageCollapser(geometry.regions)

    def close(self) -> None:
        self._collapser.stop()
        if self._gatherer is not None:
            self._gatherer.close()
            self._gatherer = None
        if self._shared is not None:
            self._shared.close()
            self._shared = None
        self._agent.close()


class Transfers:
    """All KV transfers of one worker: it reads from peers, and makes its own memory readable for them.

    Only the engine's thread may use it. Except for `close`, no method waits for a transfer. `submit` may do a
    small one itself, for an idle engine.

    Attributes:
        words: lease words of this worker.
        card: description of this worker, which the scheduler sends to peers.
        landing: staging area that all lanes read images into.
    """

    def __init__(
        self,
        name: str,
        geometry: RankGeometry,
        words: LeaseWords,
        settings: TransferSettings | None = None,
        make_agent: MakeAgent = Agent,
        in_flight: int = MAX_IN_FLIGHT,
        validator: MetadataValidator | None = None,
        on_result: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the lanes, and register this worker's memory. Block until both are done.

        Args:
            name: name of the NIXL agent that peers read from, unique among all ranks of all engines.
            words: lease words of this worker. Words that protect the staging area are appended.
            in_flight: maximum number of orders that a lane executes at the same time; further orders wait.
            on_result: function that a lane's thread calls when it has done its share of an order.

        Raises:
            ConfigError: NIXL cannot be used here, `settings.host` cannot be bound, or `settings.verify` is
                set for GPU memory. If NIXL cannot register the memory, its own exception is raised.
        """
        settings = settings or TransferSettings()
        if settings.verify and any(region.memory != "DRAM" for region in geometry.regions):
            raise ConfigError(
                "verify_transfers is set, and this engine's KV cache is in GPU memory, which kvferry cannot "
                "digest; set host_buffer too, or leave verify_transfers out"
            )
        self.words = words
        self._lane_bytes = settings.lane_bytes
        # Of each KV cache group: the group, and the bytes that all its layers have in one block.
        self._groups = [
            (group, sum(layer.page.content_bytes for layer in group.layers)) for group in geometry.groups
        ]
        # Kernels that fill blocks with zeros would have to wait for those of the engine's thread.
        self._on_host = all(region.memory == "DRAM" for region in geometry.regions)
        self._turns = itertools.count()
        # Of each order: how many lanes have not done their share of it, and the report of those that have.
        self._orders: dict[str, tuple[int, Report | None]] = {}
        self.landing = landing = StagingArea(settings.staging_bytes, geometry.regions[0])
        if landing.units:
            request_huge_pages(landing.region)
        # UCX reads its settings when an agent is created.
        with (
            ExitStack() as started,
            restrict_ucx_to(settings.host, settings.ports),
            on_device(geometry.regions[0]),
        ):
            self._exposed = _ExportedMemory(geometry, words, settings, make_agent(name, progress=True))
            started.callback(self._exposed.close)
            self._validator = validator or MetadataValidator(
                partial(MetadataSandbox, settings.host, settings.ports)
            )
            started.callback(self._validator.close)
            shared = geometry, landing, settings, make_agent
            self._lanes = [
                Lane(f"{name}/reads-{number}", *shared, self._validator, in_flight, on_result, clock)
                for number in range(settings.lanes)
            ]
            for lane in self._lanes:
                started.callback(lane.stop)
            # All have been started before the first is waited for, so that they start concurrently.
            for lane in self._lanes:
                lane.ready.result()
            started.pop_all()
        self.card: RankCard = self._exposed.card

    def warm_up(self) -> None:
        self._validator.warm_up()

    def connect(self, peer: str, cards: Sequence[RankCard]) -> None:
        """Start to connect a peer on all lanes. Orders to read from it may be submitted at once."""
        for lane in self._lanes:
            lane.connect(peer, tuple(cards))

    def disconnect(self, peer: str) -> None:
        """Disconnect a peer when the reads from it have ended. Later orders to read from the peer fail."""
        for lane in self._lanes:
            lane.connect(peer, None)

    def submit(self, *orders: ReadOrder, idle: bool = False) -> None:
        """Queue all orders of a step. Each is for the whole of its span.

        If the engine is `idle`, a single small order is read in this call: nothing else waits for its thread.
        """
        if idle and self._on_host and len(orders) == 1 and self._bytes_of(orders[0].span) <= READ_NOW_BYTES:
            self._orders[orders[0].key] = 1, None
            self._lanes[0].read_now(orders[0])
            return
        lanes = len(self._lanes)
        total = sum(order.span.ends - order.span.begins for order in orders)
        given = [0] * lanes
        for order in orders:
            size = order.span.ends - order.span.begins
            # The first share changes its lane from order to order, because small routes are in it alone.
            turn = next(self._turns)
            if size * lanes <= total or not self._is_divisible(order.span):
                # A small order goes as a whole to the lane that has the fewest tokens so far.
                *_, lane = min((given[n], (n + turn) % lanes, n) for n in range(lanes))
                given[lane] += size
                self._orders[order.key] = 1, None
                self._lanes[lane].submit(order)
            else:
                self._orders[order.key] = lanes, None
                for number, one in enumerate(self._lanes):
                    one.submit(replace(order, share=(number + turn) % lanes, shares=lanes))

    def _is_divisible(self, span: LoadSpan) -> bool:
        """Return False if `ReadOrder.take_share` gives all routes to one share: they have too few bytes."""
        # A route has no more bytes than its KV cache group.
        return any(
            block_bytes * count_blocks_needed(group, span) >= self._lane_bytes
            for group, block_bytes in self._groups
        )

    def _bytes_of(self, span: LoadSpan) -> int:
        """Return about how many bytes of this rank's KV cache a span has: whole blocks of all layers."""
        return sum(block_bytes * count_blocks_needed(group, span) for group, block_bytes in self._groups)

    def results(self) -> list[tuple[str, Report]]:
        """Return the reports of the orders that have ended since the last call, each with its order's key."""
        done = []
        for lane in self._lanes:
            while lane.results:
                key, report = lane.results.popleft()
                lanes, before = self._orders.pop(key)
                if before is not None:
                    report = before.with_lane(report)
                if lanes > 1:
                    self._orders[key] = lanes - 1, report
                else:
                    done.append((key, report))
        return done

    def close(self, patience_seconds: float = 2.0) -> None:
        """End the lanes, and release the memory that peers read. Leave a lane that takes longer running.

        Afterwards peers may be connected and words raised, without any effect.
        """
        for lane in self._lanes:
            lane.stop()
        ended = [lane.join(patience_seconds) for lane in self._lanes]
        if not all(ended):
            logger.warning(
                "transfers: reads have not ended %g s after the engine began to stop, and are abandoned; see "
                "whether a peer hangs",
                patience_seconds,
            )
        self._validator.close()
        self._exposed.close()
