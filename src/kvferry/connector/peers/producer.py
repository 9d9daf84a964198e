"""The producer: offers the KV of computed prompts to other engines, and keeps the blocks under leases.

The blocks of a finished prompt stay allocated under a lease. A consumer claims the lease with a ticket, a
random id that travels with the request. The lease ends when all consumers that have claimed it release it or
stay silent for too long. A lease that no consumer has claimed may end early if requests wait for blocks
(`unclaimed`). When a lease ends, each worker raises its lease word, an integer in registered memory, so that
a consumer that is still reading notices. Then the worker reports the request as sent. The engine frees the
blocks only after all workers have reported.

Consumers may also read the KV of a prompt while this engine computes it (`streams`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from kvferry.connector.adapters import Adapters
from kvferry.connector.blocks_wanted import BlocksWanted
from kvferry.connector.config import ConnectorConfig
from kvferry.connector.engine import BlockIds, BlockPool, EngineFacts, Request, Step
from kvferry.connector.events import LeaseEnded, LeaseExtended, LeaseGranted
from kvferry.connector.messages import StepOrders
from kvferry.connector.peers.offer import (
    Offer,
    Siblings,
    read_wanted,
    wants_prefill,
    write_nothing,
    write_offer,
)
from kvferry.connector.peers.streams import Streams, steps_readable
from kvferry.connector.peers.turn_keeper import TurnKeeper
from kvferry.connector.peers.turn_names import TurnNames
from kvferry.connector.peers.unclaimed import UnclaimedLeases
from kvferry.connector.prompt_content import content_of
from kvferry.connector.stream import EventStream
from kvferry.errors import TransferError, Unnameable
from kvferry.limited_log import LimitedLog
from kvferry.terminal import shown
from kvferry.transport.control_server import ControlServer, LeasesClaimed, LeasesReleased
from kvferry.transport.fair_queue import FairQueue
from kvferry.transport.handshake import Address
from kvferry.transport.lease import LeaseBook
from kvferry.transport.redeem import Grant, new_ticket
from kvferry.transport.tickets import TicketBook

logger = logging.getLogger(__name__)

LEASE_SLOTS = 8192
"""Maximum number of leases at a time. Each has a lease word in the registered memory of every worker."""


class Producer:
    """Offers the KV of finished prompts to other engines (consumers), and keeps the blocks under leases.

    A lease keeps blocks allocated until the consumers have read them or have been silent for too long. Only
    the engine's thread calls the methods.
    """

    def __init__(
        self,
        engine: EngineFacts,
        config: ConnectorConfig,
        *,
        incarnation: int,
        events: EventStream,
        names: TurnNames,
        adapters: Adapters,
        clock: Callable[[], float] = time.monotonic,
        lease_slots: int = LEASE_SLOTS,
    ) -> None:
        """Create a producer without leases. Call `start` before the first lease is granted.

        Args:
            engine: properties of the engine, such as its KV cache groups and the size of its block pool.
            config: the connector's settings.
            incarnation: random number that identifies this run of the engine.
            events: stream that receives the events of each lease.
            names: object that computes digests of token content. Peers look up the KV of finished requests
                by these digests.
            adapters: the engine's LoRA adapters.
            clock: function that returns monotonic seconds.
            lease_slots: maximum number of leases at a time.
        """
        self._engine, self._adapters, self._clock = engine, adapters, clock
        # Draft layers combine the KV of a token with later tokens that only the consumer has. So the last
        # tokens are not offered, except with recurrent state, of which there is no earlier snapshot.
        self._unsettled = 0 if engine.has_state else max(engine.draft_lookahead - 1, 0)
        self._book = LeaseBook(incarnation, lease_slots, config.lease_seconds, clock)
        self._step_tokens = 0 if config.host_buffer else steps_readable(engine)
        self._streams = Streams(engine, self._book, adapters)
        self._host = config.advertise_host or config.host
        self._events = events
        self._prompts: dict[str, Request] = {}
        self._withdrawn: list[str] = []
        self._ended: dict[str, int] = {}
        self._raised: dict[str, int] = {}
        self._log = LimitedLog(logger)
        self._siblings = Siblings(engine.parent_of)
        self._wanted = BlocksWanted(engine.groups, engine.tokens_in_flight)
        self._unclaimed = UnclaimedLeases(self._book, self._wanted)
        self._stopped = self._sleeps = False
        self._turns: TurnKeeper | None = None
        if config.turn_seconds:
            self._turns = TurnKeeper(
                engine,
                book=self._book,
                names=names,
                wanted=self._wanted,
                events=events,
                seconds=config.turn_seconds,
                share=config.turn_share,
                clock=clock,
            )
        self._tickets = TicketBook(incarnation)
        self.port = 0

    def start(self, server: ControlServer, pool: BlockPool, workers: int) -> None:
        """Begin to grant leases (promises to keep KV blocks until other engines have read them).

        Args:
            server: control channel that answers other engines.
            pool: the engine's block pool.
            workers: number of workers. Each keeps lease words (integers in registered memory that show
                whether a lease is valid).
        """
        self.port, self._tickets = server.port, server.tickets
        self._unclaimed.start(pool)
        self._streams.start(server.tickets, workers)
        if self._turns is not None:
            self._turns.start(server.turns, pool, workers)

    @property
    def busy(self) -> bool:
        """Whether the engine must run steps although it has no requests.

        Steps make new retained turns (KV of finished requests) visible to peers, and free the blocks of
        withdrawn turns.
        """
        return self._turns is not None and self._turns.busy

    @property
    def holds_blocks(self) -> bool:
        """Whether blocks of retained turns will soon be free, so that the engine should wait and not preempt.

        True if the lease of a retained turn (KV of a finished request) has ended, but not all workers have
        confirmed the end yet.
        """
        return self._turns is not None and self._turns.holds_blocks

    def leases_block(self) -> bool:
        """Return whether requests wait for blocks, while leases on finished prompts keep some."""
        return self._unclaimed.leases_block()

    @property
    def keeps_turns(self) -> Address | None:
        """Address (host, port) at which peers ask for KV of earlier turns of conversations.

        None if the setting ``turn_seconds`` is 0: the engine then keeps no KV of finished requests.
        """
        return None if self._turns is None else (self._host, self.port)

    def on_new_request(self, request: Request) -> None:
        """Register a new request. If another engine will read the request's KV, drop the last prompt token.

        The other engine computes the last token itself. Mutates `request`.
        """
        self._wanted.add(request)
        self._unclaimed.on_new_request(request)
        if wants_prefill(request.kv_transfer_params) and request.trim_prompt():
            self._prompts[request.request_id] = request
            if self._step_tokens and not self._stopped:
                self._streams.on_new_request(request)
            with suppress(Unnameable):
                self._adapters.name(request.adapter)  # starts to read it while the prompt is computed

    def completed_by(self, scheduled: Mapping[str, int]) -> list[Request]:
        """Return the requests whose prompt the coming step completes and whose KV will be offered to a peer.

        Args:
            scheduled: number of tokens that the coming step computes, by request id.
        """
        return [
            request
            for name, request in self._prompts.items()
            if name in scheduled
            and 0 < request.num_prompt_tokens - request.num_computed_tokens <= scheduled[name]
        ]

    def scheduled(self, number: int, step: Step, block_ids: Callable[[str], BlockIds]) -> None:
        """Remember the tokens that the coming step computes. Call this after `take_events`.

        It may be left out for steps that are scheduled while `calm` is true.

        Args:
            number: number of the step; steps are numbered in the order in which they are scheduled.
            step: the coming step.
            block_ids: function that takes a request id and returns the request's block table for each KV
                cache group.
        """
        self._streams.scheduled(number, step, block_ids)

    def step_done(self, number: int) -> None:
        """Let other engines read the tokens that steps have computed.

        Args:
            number: number of the last step whose output the engine has taken.
        """
        for stream in self._streams.step_done(number):
            request, now = stream.request, self._clock()
            self._events.emit(
                LeaseGranted(request.request_id, now, request.num_prompt_tokens, self._book.seconds)
            )

    def finished(self, request: Request, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        """Handle the end of a request: offer its prompt's KV to another engine, or keep it for the next turn.

        Args:
            request: request that has ended.
            block_ids: block table of the request for each KV cache group, up to the last computed token.

        Returns:
            (hold, params). `hold` is True if the engine must keep the blocks until `sent` is called with the
            request's id. `params` is the ``kv_transfer_params`` of the response; None if the request did not
            ask for an offer.
        """
        self._wanted.remove(request)
        if not wants_prefill(request.kv_transfer_params):
            if self._turns is not None and not (self._stopped or self._unclaimed.paused):
                self._turns.finished(request, block_ids)
            return False, None
        readable = request.request_id in self._streams
        if readable and not request.is_complete:
            # Its blocks are free from now on. The workers raise the word before a step writes them.
            self._end(self._book.end([request.request_id]), expired=False, withdrawn=True)
        stream = self._streams.finished(request.request_id)
        if self._prompts.pop(request.request_id, None) is None or not request.is_complete:
            if (lease := self._siblings.lease_of(request.request_id)) is not None:
                self._withdrawn.append(lease)  # without this sample no response carries the offer
            return False, write_nothing()
        if (made := self._siblings.offer_of(request.request_id)) is not None:
            return False, made
        tokens = request.num_prompt_tokens - self._unsettled
        over = stream is not None and stream.over  # its readers have failed or left, and no other has a claim
        stopped = self._stopped or self._sleeps
        if tokens < 1 or stopped or over:
            return False, write_nothing(stopped=stopped)
        tables = self._engine.tables(block_ids, tokens)
        if stream is not None and stream.word is not None:
            ticket = stream.ticket
            self._book.restart(request.request_id)
            grant = Grant.of(stream.word.slot, stream.word.generation, tables)
            self._tickets.advance(request.request_id, grant, tokens)
        else:
            drawn = stream is not None and stream.ticket not in self._tickets
            ticket = stream.ticket if stream is not None and drawn else new_ticket()
            try:
                self._grant(request, ticket, tokens, tables, None if stream is None else stream.cached_tokens)
            except (TransferError, Unnameable) as error:
                self._log.say(str(error), f"request {shown(request.request_id)}: not offered: {error}")
                return False, write_nothing()
        params = write_offer(
            Offer(
                remote_engine_id=self._engine.engine_id,
                remote_host=self._host,
                remote_port=self.port,
                remote_request_id=ticket.hex(),
                remote_num_tokens=tokens,
                remote_step_tokens=self._step_tokens,
            )
        )
        self._siblings.offered(request.request_id, params)
        name = read_wanted(request.kv_transfer_params).remote_name
        self._unclaimed.granted(request.request_id, block_ids, name)
        return True, params

    def _grant(
        self, request: Request, ticket: bytes, tokens: int, tables: BlockIds, cached_tokens: int | None
    ) -> None:
        """Grant a lease on the blocks of a finished request, and publish its ticket.

        Args:
            request: request that has ended.
            ticket: random id that claims the lease.
            tokens: number of offered tokens, from the start of the prompt.
            tables: block ids to transfer for each KV cache group.
            cached_tokens: number of prompt tokens that the engine's caches had; None if the engine adds it
                to the offer.

        Raises:
            TransferError: all lease slots are in use.
            Unnameable: the content of the prompt has no digest.
        """
        content = content_of(request, tokens, self._adapters)
        word = self._book.grant(request.request_id)
        self._events.emit(LeaseGranted(request.request_id, self._clock(), tokens, self._book.seconds))
        grant = Grant.of(word.slot, word.generation, tables)
        self._tickets.publish(ticket, request.request_id, tokens, content, grant, cached_tokens=cached_tokens)

    @property
    def calm(self) -> bool:
        """True if steps need no call of this object until another method is called or a message arrives.

        No lease is held, so none can expire, and no prompt is read while it is computed.
        """
        return not (self._withdrawn or len(self._book) or len(self._streams) or self._turns is not None)

    def take_events(self, events: FairQueue[LeasesClaimed | LeasesReleased], orders: StepOrders) -> None:
        """Process the messages of other engines, and tell the workers which leases to end.

        A lease ends if its readers have released it, or if it has expired or was withdrawn. A lease that no
        engine has claimed may end early (`unclaimed`). Mutates `events` and `orders`.

        Args:
            events: queue of messages from engines that read from this engine. The queue is emptied.
            orders: message to the workers for the coming step. The leases to end are added to it.
        """
        if not (events or self._withdrawn or len(self._book) or self._turns is not None):
            return
        while events:
            event = events.popleft()
            if isinstance(event, LeasesClaimed):
                for name in self._book.extend(event.leases):
                    self._events.emit(LeaseExtended(name, self._clock()))
            else:
                self._end(self._book.end(event.leases), expired=False)
        withdrawn, self._withdrawn = self._withdrawn, []
        withdrawn += self._streams.preempted()
        withdrawn += self._unclaimed.leases_given_up()
        self._end(self._book.end(withdrawn), expired=False, withdrawn=True)
        for name in self._end(self._book.end(self._unclaimed.leases_to_end()), expired=True):
            self._log.say(
                "unclaimed",
                f"request {shown(name)}: no consumer has claimed its blocks in "
                f"{self._unclaimed.seconds:g} s, and other requests wait for blocks, so they are given back",
            )
        over = self._book.end_expired()
        if self._turns is not None:
            turns = {name: over.pop(name) for name in list(over) if name in self._turns}
            turns.update(self._book.end(self._turns.step()))
            self._end(turns, expired=False)
        for name in self._end(over, expired=True):
            self._log.say(
                "silent",
                f"request {shown(name)}: its consumer was silent for {self._book.seconds:g} s "
                "(lease_seconds), its blocks are given back",
            )
        orders.ended, self._ended = self._ended, {}
        orders.raised, self._raised = self._raised, {}

    def _end(self, leases: Mapping[str, int], *, expired: bool, withdrawn: bool = False) -> list[str]:
        """Handle the end of leases, and order the workers to raise their words with the coming step.

        Args:
            leases: lease slot of each ended lease, by name.
            expired, withdrawn: values of the event that is emitted for each lease.

        Returns:
            The names of the leases.
        """
        if not leases:
            return []
        for name, slot in leases.items():
            # The engine keeps the blocks of finished requests until the workers have reported them as sent.
            kept = name not in self._streams and (self._turns is None or name not in self._turns)
            (self._ended if kept else self._raised)[name] = slot
        self._tickets.withdraw(leases)
        self._streams.ended(leases)
        self._siblings.ended(leases)
        self._unclaimed.ended(leases)
        for name in leases:
            if self._turns is not None:
                self._turns.ended(name)
            self._events.emit(LeaseEnded(name, self._clock(), expired, withdrawn))
        return list(leases)

    def on_pause(self, *, paused: bool) -> None:
        """Record that the engine was paused or resumed.

        While it is paused, no turns are kept and unclaimed leases end soon, because a paused engine can reset
        its cache only when no lease keeps blocks.
        """
        self._unclaimed.paused = paused
        if not paused:
            self._sleeps = False
        elif self._turns is not None:
            self._turns.give_up()

    def on_sleep(self) -> None:
        """End all leases, and offer nothing until the engine is resumed, because it is about to sleep."""
        self.reset()
        self._sleeps = True

    def renew(self, incarnation: int) -> None:
        """Grant leases under another incarnation, because the workers have registered their memory anew.

        Args:
            incarnation: new random number for this run of the engine.
        """
        self._book.renew(incarnation)

    def reset(self) -> None:
        """Withdraw all offers of KV, and all KV kept for next turns, because this KV is no longer valid.

        The leases end with the coming step.
        """
        self._withdrawn = [name for name in self._book.held if self._turns is None or name not in self._turns]
        self._tickets.withdraw(self._withdrawn)
        if self._turns is not None:
            self._turns.give_up()

    def stop_offering(self) -> None:
        """Withdraw all offers of KV, and all KV kept for next turns. Offer and keep no KV from now on."""
        self.reset()
        self.drain()

    def drain(self) -> None:
        """Offer and keep no KV from now on. Leases that are held go on until they end by themselves."""
        if self._turns is not None:
            self._turns.give_up()
        self._streams.stop()
        self._stopped = True

    @property
    def leases(self) -> int:
        """Number of leases whose blocks are still kept."""
        return len(self._book)

    def sent(self, request_ids: set[str]) -> None:
        """Record that all workers have ended the leases of these requests.

        The workers have changed the lease words (integers in registered memory that show whether a lease is
        valid). The engine can free the blocks now.
        """
        for name in request_ids:
            self._book.ended(name)
            self._unclaimed.on_blocks_freed(name)

    def on_workers_confirmed(self, raised: Mapping[str, int]) -> None:
        """Count the workers that have raised lease words, so that the words can be used for other leases.

        A lease word is an integer in registered memory that readers check. When all workers have raised the
        word of a retained turn (KV of a finished request), its blocks are freed.

        Args:
            raised: number of workers that have raised the word of each lease since the last call, by name of
                the lease.
        """
        for name, workers in raised.items():
            turn = self._turns is not None and self._turns.on_workers_confirmed(name, workers)
            if self._streams.on_workers_confirmed(name, workers) or turn:
                self._book.ended(name)
