"""The transfers of a worker: lanes that read from peers, and the memory that peers read.

Each order is split over the lanes. Every lane plans and reads its own share, so several cores post
descriptors and scatter images. An order has exactly one result, delivered when no lane has a READ of it in
flight.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from kvferry.geometry import RankGeometry
from kvferry.memory.huge_pages import request_huge_pages
from kvferry.transport.agent import Agent
from kvferry.transport.exported_memory import ExportedMemory
from kvferry.transport.lane import Lane, MakeAgent, ReadResult
from kvferry.transport.lease import LeaseWords
from kvferry.transport.messages import RankCard
from kvferry.transport.metadata_sandbox import MetadataSandbox
from kvferry.transport.metadata_validation import MetadataValidator, SandboxValidator
from kvferry.transport.network_devices import restrict_ucx_to
from kvferry.transport.read_order import ReadOrder, Share
from kvferry.transport.read_plan import join_plans
from kvferry.transport.settings import TransferSettings
from kvferry.transport.staging import StagingArea

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT = 256


class Transfers:
    """Reads from peers and serves their reads.

    Only the engine's thread uses it; no call blocks on a transfer.

    Attributes:
        words: this worker's lease words.
        card: the description of this worker that is sent to peers.
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
    ) -> None:
        """Start the lanes and register the memory; return when both are done.

        Args:
            name: name of the agent that peers read from, unique among all engines' ranks.
            geometry: geometry of this worker.
            words: this worker's lease words; words for the staging area are added to them.
            settings: strategies, costs, staging memory, lanes.
            make_agent: creates the agent that peers read from, and the reading agent of each lane.
            in_flight: maximum number of reads that a lane has in flight; more are queued.
            validator: decides whether a peer's metadata may be loaded; by default a child process tries it.

        Raises:
            ConfigError: NIXL cannot be used, or the memory cannot be registered.
        """
        settings = settings or TransferSettings()
        self.words = words
        self._least_bytes = settings.lane_bytes
        self._turns = itertools.count()
        self._parts: dict[str, list[ReadResult]] = {}
        landing = StagingArea(settings.staging_bytes, geometry.regions[0])
        if landing.units:
            request_huge_pages(landing.region, touched=False)
        with ExitStack() as started, restrict_ucx_to(settings.host):
            self._exposed = ExportedMemory(geometry, words, settings, make_agent(name, progress=True))
            started.callback(self._exposed.close)
            self._validator = validator or SandboxValidator(partial(MetadataSandbox, settings.host))
            started.callback(self._validator.close)
            self._lanes = [
                Lane(
                    f"{name}/reads-{number}",
                    geometry=geometry,
                    landing=landing,
                    settings=settings,
                    make_agent=make_agent,
                    validator=self._validator,
                    in_flight=in_flight,
                )
                for number in range(settings.lanes)
            ]
            for lane in self._lanes:
                started.callback(lane.stop)
            for lane in self._lanes:
                lane.wait_ready()
            started.pop_all()
        self.card: RankCard = self._exposed.card

    def warm_up(self) -> None:
        """Start the validator's child process, so that the first peer does not wait for it."""
        self._validator.warm_up()

    def connect(self, peer: str, cards: Sequence[RankCard]) -> None:
        """Connect a peer; orders for it may be submitted at once."""
        for lane in self._lanes:
            lane.connect(peer, cards)

    def disconnect(self, peer: str) -> None:
        """Remove a peer after its reads have ended; later orders for it fail."""
        for lane in self._lanes:
            lane.disconnect(peer)

    def submit(self, order: ReadOrder) -> None:
        """Queue an order on all lanes. The first share goes to another lane with every order."""
        turn, lanes = next(self._turns), len(self._lanes)
        self._parts[order.key] = []
        for number, lane in enumerate(self._lanes):
            lane.submit(replace(order, share=Share((number + turn) % lanes, lanes, self._least_bytes)))

    def results(self) -> list[ReadResult]:
        """Return the results of orders that have ended since the last call."""
        done = []
        for result in itertools.chain.from_iterable(lane.results() for lane in self._lanes):
            parts = self._parts[result.key]
            parts.append(result)
            if len(parts) == len(self._lanes):
                done.append(_joined(self._parts.pop(result.key)))
        return done

    def close(self, patience_seconds: float = 2.0) -> None:
        """End the lanes after their READs have ended.

        Leave them running if that takes longer than `patience_seconds`.
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


def _joined(parts: list[ReadResult]) -> ReadResult:
    plans = [part.plan for part in parts if part.plan is not None]
    return ReadResult(
        key=parts[0].key,
        failure=next((part.failure for part in parts if part.failure is not None), None),
        plan=join_plans(plans) if plans else None,
        transfer_seconds=max(part.transfer_seconds for part in parts),
        check_seconds=max(part.check_seconds for part in parts),
        peer_lost=any(part.peer_lost for part in parts),
    )
