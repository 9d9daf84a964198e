"""The producer: offers the KV of computed prompts to other engines, and pins the blocks under leases.

A consumer claims a lease with a ticket, which travels with the request. The lease ends when all consumers
that have claimed it release it or stay silent for too long. A lease that no consumer has claimed may end
early if requests wait for blocks (`unclaimed`). When a lease ends, each worker raises its lease word, so that
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

from kvferry.common.errors import TransferError, Unnameable
from kvferry.common.limited_log import LimitedLog
from kvferry.common.text import shown
from kvferry.connector.config import ConnectorConfig
from kvferry.connector.content import Adapters, TurnNames, content_of
from kvferry.connector.engine import BlockIds, BlockPool, EngineFacts, Request, Step
from kvferry.connector.events import EventStream, LeaseEnded, LeaseExtended, LeaseGranted
from kvferry.connector.messages import StepOrders
from kvferry.connector.peers.kept import TurnKeeper, UnclaimedLeases
from kvferry.connector.peers.offer import (
    Offer,
    Siblings,
    read_wanted,
    wants_prefill,
    write_nothing,
    write_offer,
)
from kvferry.connector.peers.streams import Streams, steps_readable
from kvferry.connector.room import BlocksWanted
from kvferry.transport.control_server import ControlServer, FairQueue, LeasesClaimed, LeasesReleased
from kvferry.transport.handshake import Address
from kvferry.transport.lease import LeaseBook
from kvferry.transport.redeem import Grant, TicketBook, new_ticket

logger = logging.getLogger(__name__)

LEASE_SLOTS = 8192
"""Maximum number of leases at a time. Each has a lease word in the registered memory of every worker."""


class Producer:
    """Offers the KV of finished prompts, and pins their blocks under leases.

    Only the engine's thread calls it.
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
            engine: properties of the engine.
            config: the connector's settings.
            incarnation: random number that identifies this run of the engine.
            events: receives the events of each lease.
            names: computes the digests by which peers look up turns.
            adapters: the engine's LoRA adapters.
            clock: returns monotonic seconds.
            lease_slots: maximum number of leases at a time.
        """
        self._engine, self._adapters, self._clock = engine, adapters, clock
        # Draft layers combine the KV of a token with later tokens that only the consumer has. So the last
        # tokens are not offered, except with recurrent state, of which there is no earlier snapshot.
        self._unsettled = 0 if engine.has_state else max(engine.draft_lookahead - 1, 0)
        self._book = LeaseBook(incarnation, lease_slots, config.lease_seconds, clock)
        # With a host buffer, peers read a copy of the cache, which is made when the prompt is complete.
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
        # Replaced by the server's book in `start`: methods need no check for None.
        self._tickets = TicketBook(incarnation)
        self.port = 0

    def start(self, server: ControlServer, pool: BlockPool, workers: int) -> None:
        """Begin to grant leases.

        Args:
            server: control channel that answers other engines.
            pool: the engine's block pool.
            workers: number of workers. All must confirm the end of a lease.
        """
        self.port, self._tickets = server.port, server.tickets
        self._unclaimed.start(pool)
        self._streams.start(server.tickets, workers)
        if self._turns is not None:
            self._turns.start(server.turns, pool, workers)

    @property
    def busy(self) -> bool:
        """True if the engine must run steps without requests, to publish turns and to free their blocks."""
        return self._turns is not None and self._turns.busy

    @property
    def holds_blocks(self) -> bool:
        """True if blocks of turns will soon be free, so that the engine should wait and not preempt."""
        return self._turns is not None and self._turns.holds_blocks

    def leases_block(self) -> bool:
        """Return whether requests wait for blocks while leases on finished prompts pin some."""
        return self._unclaimed.leases_block()

    @property
    def keeps_turns(self) -> Address | None:
        """Address (host, port) at which peers ask for turns; None if this engine keeps none."""
        return None if self._turns is None else (self._host, self.port)

    def on_new_request(self, request: Request) -> None:
        """Register a request. If its KV will be offered, drop the last prompt token.

        The consumer computes that token.

        Mutates `request`.
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

        It may be left out for steps that are scheduled while `has_work` is false.

        Args:
            number: number of the step, ascending in the order of scheduling.
            step: the coming step.
            block_ids: returns the block table of a request, for each KV cache group.
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
        """Offer the KV of a finished request's prompt to another engine, or keep the request as a turn.

        Args:
            request: request that has ended.
            block_ids: its block table for each KV cache group, up to the last computed token.

        Returns:
            (hold, params). `hold` is True if the engine must keep the blocks until all workers report the
            request as sent. `params` is the ``kv_transfer_params`` of the response; None if no offer was
            asked for.
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
            # While the prompt was computed, the lease had no end (`Streams`). From here on it can expire.
            self._book.restart(request.request_id)
            grant = Grant.of(stream.word.slot, stream.word.generation, tables)
            self._tickets.advance(request.request_id, grant, tokens)
        else:
            # The decode engine may have the router's ticket already. One in use belongs to another request.
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
            ticket: ticket of the lease.
            tokens: number of offered tokens, from the start of the prompt.
            tables: blocks to transfer, for each KV cache group.
            cached_tokens: number of prompt tokens that the engine's caches had; None if the engine adds it to
                the offer.

        Raises:
            TransferError: all lease slots are in use.
            Unnameable: the content of the prompt has no digest.
        """
        # The content is computed before the lease is granted, so that a prompt without a name leaves no lease
        # behind.
        content = content_of(request, tokens, self._adapters)
        word = self._book.grant(request.request_id)
        self._events.emit(LeaseGranted(request.request_id, self._clock(), tokens, self._book.seconds))
        grant = Grant.of(word.slot, word.generation, tables)
        self._tickets.publish(ticket, request.request_id, tokens, content, grant, cached_tokens=cached_tokens)

    @property
    def has_work(self) -> bool:
        """Whether a step without messages of other engines needs calls of this object."""
        return bool(self._withdrawn or len(self._book) or len(self._streams) or self._turns is not None)

    def take_events(self, events: FairQueue[LeasesClaimed | LeasesReleased], orders: StepOrders) -> None:
        """Process the messages of other engines, and tell the workers which leases to end.

        Empties `events` and adds to `orders`.
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
            # No consumer was silent if the time of a turn is over, so that is neither logged nor counted as
            # expired.
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
        """Have the workers raise the words of ended leases with the coming step. Return the leases' names.

        Args:
            leases: lease slot of each ended lease, by name.
            expired, withdrawn: values of the event that is emitted for each lease.
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
        """While the engine is paused, keep no turns, and end unclaimed leases soon."""
        # A paused engine can reset its cache only when no lease pins blocks.
        self._unclaimed.paused = paused
        if not paused:
            self._sleeps = False
        elif self._turns is not None:
            self._turns.give_up()

    def on_sleep(self) -> None:
        """End all leases, and offer nothing until the engine is resumed."""
        self.reset()
        self._sleeps = True

    def renew(self, incarnation: int) -> None:
        """Grant leases under another incarnation, because the workers have registered their memory anew."""
        self._book.renew(incarnation)

    def reset(self) -> None:
        """Withdraw all offers and turns, because their KV is no longer valid.

        The leases end with the coming step.
        """
        self._withdrawn = [name for name in self._book.held if self._turns is None or name not in self._turns]
        self._tickets.withdraw(self._withdrawn)
        if self._turns is not None:
            self._turns.give_up()

    def stop_offering(self) -> None:
        """Withdraw all offers and turns, and make no more."""
        self.reset()
        self.drain()

    def drain(self) -> None:
        """Make no more offers and keep no more turns.

        Leases that are held go on until they end by themselves.
        """
        if self._turns is not None:
            self._turns.give_up()
        self._streams.stop()
        self._stopped = True

    @property
    def leases(self) -> int:
        """Number of leases whose blocks are still pinned."""
        return len(self._book)

    def sent(self, request_ids: set[str]) -> None:
        """Record that all workers have raised the lease words of these requests.

        The engine can free the blocks now.
        """
        for name in request_ids:
            self._book.ended(name)
            self._unclaimed.on_blocks_freed(name)

    def on_workers_confirmed(self, raised: Mapping[str, int]) -> None:
        """Count the workers that have raised lease words, so that the words can be used for other leases.

        The blocks of a turn are freed when all workers have raised its word.

        Args:
            raised: number of workers that have raised each lease's word since the last call, by lease.
        """
        for name, workers in raised.items():
            turn = self._turns is not None and self._turns.on_workers_confirmed(name, workers)
            if self._streams.on_workers_confirmed(name, workers) or turn:
                self._book.ended(name)
