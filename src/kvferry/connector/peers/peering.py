"""The exchange of KV with other engines: the control channel, the offers, and the source of the peers' KV."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from msgspec import structs

from kvferry.common.errors import Incompatible
from kvferry.common.units import counted
from kvferry.connector.compose import Composition, peers_allowed
from kvferry.connector.content import TurnNames
from kvferry.connector.engine import BlockIds, Request, Step
from kvferry.connector.messages import StepOrders, WorkerInfo
from kvferry.connector.peers.producer import Producer
from kvferry.planning.template import absent_layer_names, window_mismatches
from kvferry.transport.addresses import parse_port_range
from kvferry.transport.control_client import ControlClient
from kvferry.transport.control_server import ControlServer
from kvferry.transport.handshake import PeerInfo
from kvferry.transport.lease import new_incarnation
from kvferry.transport.messages import Facts, RankCard
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
        composition: Composition,
        keys: Keys,
        ranks: tuple[RankCard, ...],
        *,
        facts: Callable[[int], Facts],
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start both ends of the control channel.

        Args:
            facts: function that takes the engine's incarnation, and returns the facts that peers compare.
            wake: function that makes the engine run a step soon.

        Raises:
            ConfigError: the channel cannot listen at its address, or the setting ``peers`` is malformed.
        """
        engine, config, peers = composition.engine, composition.config, peers_allowed(composition.config)
        self._names = TurnNames(composition.adapters, prompts_only=engine.reuses_prompts_only)
        incarnation = new_incarnation()
        ours = facts(incarnation)
        port = config.port + engine.port_offset if config.port else parse_port_range(config.ports) or 0
        self.server = server = ControlServer(config.host, port, PeerInfo(ours, ranks), keys, peers)
        self.producer = Producer(
            engine,
            config,
            incarnation=incarnation,
            events=composition.events,
            names=self._names,
            adapters=composition.adapters,
            channel=server,
            pool=composition.pool,
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
            on_met=wake,
            runs=lambda: clock() - self.stepped_at < _STUCK_LEASES * config.lease_seconds,
        )
        geometries = [card.geometry for card in ranks]
        self.source = composition.peer_source(
            self.client, geometries, lambda: server.keepers, self._names, meets
        )
        self._standstill, self._clock = _Standstill(config.patience_seconds, clock), clock
        self._copies_prompts, self._tables = config.host_buffer, engine.tables

    @property
    def busy(self) -> bool:
        """Whether peers need engine steps even if the engine has no requests."""
        return self.producer.turns.busy or self.source.busy

    @property
    def holds_blocks(self) -> bool:
        """Whether blocks of ended leases will soon be free."""
        return self.producer.turns.holds_blocks

    @property
    def has_work(self) -> bool:
        """Whether a step needs a call of `schedule`, except for what depends on time alone."""
        return (
            self._copies_prompts
            or len(self.server.events) > 0
            or self.producer.has_work
            or self.source.has_work
        )

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
