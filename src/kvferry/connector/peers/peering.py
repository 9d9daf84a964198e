"""The exchange of KV with other engines: the control channel, the offers, and the source of the peers' KV."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence, Sized

from msgspec import structs

from kvferry.common.errors import Incompatible
from kvferry.common.units import counted
from kvferry.connector.config import ConnectorConfig
from kvferry.connector.content import Adapters, TurnNames
from kvferry.connector.engine import BlockIds, BlockPool, EngineFacts, Request, Step
from kvferry.connector.events import EventStream
from kvferry.connector.messages import StepOrders, WorkerInfo
from kvferry.connector.peers.producer import Producer
from kvferry.connector.peers.source import PeerSource
from kvferry.connector.peers.turns import TurnFinder
from kvferry.connector.source import RunningLoads
from kvferry.planning.template import absent_layer_names, window_mismatches
from kvferry.transport.addresses import parse_port_range
from kvferry.transport.control_client import ControlClient
from kvferry.transport.control_server import ControlServer
from kvferry.transport.lease import new_incarnation
from kvferry.transport.messages import Facts, PeerInfo, RankCard
from kvferry.transport.security import Keys

logger = logging.getLogger(__name__)

# Leases without a step after which an engine keeps none alive. A step of a slow engine can outlast one.
_STUCK_LEASES = 4

# A look takes time in proportion to the number of requests, so it is not taken in every step.
LAPSE_SECONDS = 1.0
"""Seconds between two looks at the engine, and between two claims given up during one standstill."""


class Peering:
    """Offers this engine's KV to other engines, and reads theirs. Only the engine's thread calls it.

    Attributes:
        server, client: both ends of the control channel.
        producer: offers the KV of computed prompts.
        source: loads the KV that peers offer.
        stepped_at: time of the engine's last step or new request, monotonic seconds. An engine that runs no
            steps keeps no lease alive.
    """

    def __init__(
        self,
        engine: EngineFacts,
        config: ConnectorConfig,
        keys: Keys,
        ranks: tuple[RankCard, ...],
        *,
        pool: BlockPool,
        loads: RunningLoads,
        adapters: Adapters,
        events: EventStream,
        idle: Callable[[], bool],
        facts: Callable[[int], Facts],
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start both ends of the control channel.

        Args:
            keys: secret keys of the channel.
            ranks: descriptions of all ranks of this engine, for peers.
            loads: loads that may still write to their blocks, with those from tiers.
            idle: returns True if the engine computes no request, so that a step may wait for an answer.
            facts: function that takes the engine's incarnation, and returns the facts that peers compare.
            wake: function that makes the engine run a step soon.

        Raises:
            ConfigError: the channel cannot listen at its address, or the setting ``peers`` is malformed.
        """
        peers = config.allowed_peers()
        self._names = TurnNames(adapters, prompts_only=engine.reuses_prompts_only)
        incarnation = new_incarnation()
        ours = facts(incarnation)
        port = config.port + engine.port_offset if config.port else parse_port_range(config.ports) or 0
        self.server = server = ControlServer(
            config.host, port, PeerInfo(ours, ranks), keys, peers, on_event=wake
        )
        self.producer = Producer(
            engine,
            config,
            incarnation=incarnation,
            events=events,
            names=self._names,
            adapters=adapters,
            channel=server,
            pool=pool,
            workers=len(ranks),
            clock=clock,
        )
        own = config.advertise_host or config.host, server.port
        meets = [address for address in peers.engines if address != own]
        self.stepped_at = clock()
        self.client = ControlClient(
            structs.replace(ours, keeps_turns=self.producer.keeps_turns),
            lambda theirs: _check_readable(theirs, ranks),
            keys=keys,
            peers=peers,
            handshake_seconds=config.handshake_seconds,
            heartbeat_seconds=config.lease_seconds / 4,
            meets=meets,
            on_news=wake,
            runs=lambda: clock() - self.stepped_at < _STUCK_LEASES * config.lease_seconds,
        )
        self.source = PeerSource(
            self.client,
            ranks=[card.geometry for card in ranks],
            loads=loads,
            events=events,
            timeout_seconds=config.load_timeout_seconds,
            most_held=int(config.late_blocks * engine.num_blocks),
            turns=TurnFinder(self.client, lambda: server.keepers, self._names),
            adapters=adapters,
            idle=idle,
            meets=meets,
            clock=clock,
        )
        self._standstill, self._clock = _Standstill(config.patience_seconds, clock), clock
        self._copies_prompts, self._tables = config.host_buffer, engine.tables

    @property
    def busy(self) -> bool:
        """Whether peers need engine steps even if the engine has no requests."""
        return bool(self.client.unsent) or self.producer.turns.busy or self.source.busy

    @property
    def rest_seconds(self) -> float:
        """Time in which a step without requests can do nothing, unless peers send a message."""
        return 0.0 if self.busy else self.producer.rest_seconds

    @property
    def holds_blocks(self) -> bool:
        """Whether blocks of ended leases will soon be free."""
        return self.producer.turns.holds_blocks

    @property
    def agenda(self) -> tuple[Sized, ...]:
        """Containers that are all empty if a step needs `schedule` for nothing but what time changes."""
        return self.server.events, self.client.unsent, *self.producer.agenda, *self.source.agenda

    def on_new_request(self, request: Request) -> None:
        """Prepare to offer the KV of a new request."""
        self.stepped_at = self._clock()
        self.producer.on_new_request(request)

    def schedule(
        self, number: int, step: Step, block_ids: Callable[[str], BlockIds], admitted: int, orders: StepOrders
    ) -> None:
        """Add to `orders` which leases end, which peers the workers connect to, and which prompts they copy.

        Args:
            number: number of the coming step, ascending.
            block_ids: returns the block table of a request, for each KV cache group.
            admitted: number of times that the engine has allocated blocks to a waiting request.
        """
        self.producer.take_events(self.server.events, orders)
        self.producer.scheduled(number, step, block_ids)
        if self._standstill.claim_lapses(admitted, self.producer.leases_block):
            self.source.give_up_oldest_claim(self._standstill.reason)
        self.source.hand_over(orders)
        if self._copies_prompts:
            # Peers read a prompt from the host buffer, so it is copied in the step that completes it.
            for request in self.producer.completed_by(step.tokens):
                tokens, whole = request.num_prompt_tokens, block_ids(request.request_id)
                orders.saves.append((self._tables(whole, tokens), tokens))

    def drain(self, why: str) -> None:
        """Offer no KV and read none from now on. Leases and loads under way go on."""
        self.producer.drain()
        self.source.drain(why)

    def stop(self, why: str) -> None:
        """Withdraw all offers, and read no KV any more."""
        self.producer.stop_offering()
        self.source.stop_reading(why)

    def reset(self) -> None:
        """Withdraw all offers and turns, and forget those of peers: their KV is no longer valid."""
        self.producer.reset()
        self.source.start_anew()

    def begin_epoch(self) -> None:
        """Name turns anew, because the weights may have changed under the same name."""
        self._names.start_anew()

    def wake(self, workers: Sequence[WorkerInfo]) -> None:
        """Let peers read again under another incarnation, if workers have registered their memory anew."""
        ranks = tuple(worker.card for worker in workers if worker.card is not None)
        if _runs(ranks) == _runs(self.server.ranks):
            return
        incarnation = new_incarnation()
        self.server.renew(ranks, incarnation)
        self.producer.renew(incarnation)
        self.source.reconnect()

    def close(self) -> None:
        """Close the control channel, and end its threads."""
        self.client.close()
        self.server.close()


class _Standstill:
    """Decides when a claim on another engine's lease must be given up.

    A request keeps its claim, and so blocks of the producer, while it waits for blocks of its own engine. So
    engines that offer KV to each other can wait for each other for ever, one for itself, or several in a
    circle. Each of them lets go: the request with the oldest claim gives it up and takes what is left.
    """

    def __init__(self, patience_seconds: float, clock: Callable[[], float]) -> None:
        """Begin to watch an engine, which gives up a claim if no request gets blocks for so long."""
        self._patience_seconds, self._clock = patience_seconds, clock
        self._admitted, self._look, self._due = 0, 0.0, 0.0
        self.reason = (
            f"no request has got blocks for {patience_seconds:g} s (patience_seconds), and this engine keeps "
            "blocks for others, so the claim is given up"
        )

    def claim_lapses(self, admitted: int, leases_block: Callable[[], bool]) -> bool:
        """Return whether one claim must be given up now. Call this once per engine step."""
        now = self._clock()
        if now < self._look:
            return False
        self._look = now + LAPSE_SECONDS
        # While requests still get blocks, the others only wait for their turn. An engine without leases waits
        # for its own running requests, which end.
        if admitted != self._admitted or not leases_block():
            self._admitted, self._due = admitted, now + self._patience_seconds
        return now >= self._due


def _check_readable(theirs: Sequence[RankCard], ours: Sequence[RankCard]) -> None:
    """Check that each rank of this engine can read all layers of its KV cache from the peer's ranks.

    Raises:
        Incompatible: a rank cannot read a layer, or the peer keeps fewer tokens of a layer than a rank needs
            (a shorter attention window). The message names every difference.
    """
    peer, here = ([card.geometry for card in cards] for cards in (theirs, ours))
    absent = absent_layer_names(peer, here)
    if found := [text for rank in here for text in window_mismatches(peer, rank)]:
        raise Incompatible(list(dict.fromkeys(found)))
    # Without the KV of draft layers answers stay right: only fewer drafts are accepted.
    if absent:
        logger.warning(
            "the peer does not keep %s of our draft model, %s for one: prompts from there are "
            "loaded without them, and fewer drafts are accepted; run both with the same draft model if that "
            "matters", counted(len(absent), "layer"), absent[0],
        )  # fmt: skip


def _runs(ranks: Sequence[RankCard]) -> list[int]:
    """Return the number by which peers recognise the present run of each worker."""
    return [rank.incarnation for rank in ranks]
