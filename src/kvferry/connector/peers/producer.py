"""The producer: offers the KV of computed prompts to other engines, and pins the blocks under leases.

A consumer claims a lease with a ticket, which travels with the request. The lease ends when all consumers
that have claimed it release it or stay silent for too long. A lease that no consumer has claimed may end
early: if requests wait for blocks, if the router no longer wants it, or if the engine is paused. When a lease
ends, each worker raises its lease word, so that a consumer that is still reading notices. Then the worker
reports the request as sent. The engine frees the blocks only after all workers have reported.

    COMPUTING ─request ends──────────────────────────▶ OFFERED ─lease ends─▶ (free, once workers confirm)
        └─first tokens computed─▶ READABLE ─request ends─▲
                                      └─preempted, aborted, released, or the cache was reset─▶ OVER

A router may ask a prefill and a decode engine at once, and give both the same ticket. Then consumers read the
prompt while this engine computes it: the ticket is published with the first computed tokens, and each step
adds its own. Only the blocks of groups that attend to all tokens are added: those of sliding windows and
recurrent state change until the prompt's last token. While a prompt is readable, a lease word covers its
blocks, but the engine may take them at any time. So when the lease ends, each worker raises the word before
the forward pass of the next step, which is the first that can write the blocks for another request.

Consumers may also read finished requests that continue their conversation (`turns`).
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvferry.common.errors import TransferError, Unnameable
from kvferry.common.limited_log import LimitedLog
from kvferry.common.text import shown
from kvferry.connector.config import ConnectorConfig
from kvferry.connector.content import Adapters, TurnNames, content_of
from kvferry.connector.engine import BlockIds, BlockPool, EngineFacts, Request, Step
from kvferry.connector.events import EventStream, LeaseEnded, LeaseExtended, LeaseGranted
from kvferry.connector.messages import LEASE_SLOTS, StepOrders
from kvferry.connector.peers.turns import BlocksWanted, TurnKeeper, choose_leases_to_end
from kvferry.planning.select import NULL_BLOCK, attends_to_all
from kvferry.transport.control_server import ControlServer, FairQueue
from kvferry.transport.handshake import Address
from kvferry.transport.lease import LeaseBook, LeaseWord
from kvferry.transport.offer import (
    MAX_UNWANTED,
    Offer,
    read_wanted,
    ticket_of,
    wants_prefill,
    write_nothing,
    write_offer,
)
from kvferry.transport.redeem import Grant, new_ticket
from kvferry.transport.seal import SealBinding, seal_grant

logger = logging.getLogger(__name__)

_PAUSED_SECONDS = 1.0
"""Minimum age of an unclaimed lease that ends because of a pause: its ticket may be on its way."""


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt whose KV this engine offers, from the arrival of its request to the end of its lease."""

    request: Request
    ticket: bytes  # the router's if the prompt may be read while it is computed, else a new one
    streamed: bool  # True if it may be read while it is computed
    router_name: str | None  # the router's name for the KV; None without one
    parent: str | None  # id that the samples of the prompt share (``n`` above 1); None if there is only one
    preemptions: int = 0  # number of the request's preemptions when its last step was scheduled
    # Number of prompt tokens that the engine's caches had; None before the first step, and if it is not
    # streamed: then the engine adds the number to the offer.
    cached_tokens: int | None = None
    word: LeaseWord | None = None  # lease word of the blocks; None before the first tokens were published
    over: bool = False  # True once a lease has ended that it had while it was computed
    blocks: int = 0  # number of leased blocks; 0 until the request has ended
    # Offer, as the response carries it; empty until the request has ended.
    params: dict[str, Any] = field(default_factory=dict)


class _Computed(NamedTuple):
    """The tokens of a prompt that will have been computed when a step is done."""

    prompt: _Prompt
    preemptions: int  # number of the request's preemptions when the step was scheduled
    tokens: int  # number of computed tokens, from the start of the prompt
    tables: BlockIds  # block table of the request for each KV cache group


def _readable_step_tokens(engine: EngineFacts) -> int:
    """Return how many prompt tokens a step computes, if their KV is final after the step; else 0."""
    # Without a group that attends to all tokens, nothing is final before the prompt's end.
    final = any(attends_to_all(group.kind) for group in engine.groups)
    # Draft layers may complete their KV later. An engine that writes to blocks before its workers raise lease
    # words could write while a reader still trusts the word.
    unsafe = engine.speculates or engine.writes_before_hooks
    return engine.step_tokens if final and not unsafe else 0


class Producer:
    """Offers the KV of prompts. Only the engine's thread calls it.

    Attributes:
        turns: keeps finished requests for their conversations' next turns, if configured.
        port: port of the control channel.
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
        channel: ControlServer,
        pool: BlockPool,
        workers: int,
        clock: Callable[[], float] = time.monotonic,
        lease_slots: int = LEASE_SLOTS,
    ) -> None:
        """Create a producer without leases. All `workers` must confirm the end of a lease."""
        self._engine, self._adapters, self._clock = engine, adapters, clock
        # Draft layers combine the KV of a token with later tokens that only the consumer has. So the last
        # tokens are not offered, except with recurrent state, of which there is no earlier snapshot.
        self._unsettled = 0 if engine.has_state else max(engine.draft_lookahead - 1, 0)
        # With a host buffer, peers read a copy of the cache, which is made when the prompt is complete.
        self._step_tokens = 0 if config.host_buffer else _readable_step_tokens(engine)
        self._book = LeaseBook(incarnation, lease_slots, config.lease_seconds, clock)
        self.port, self._tickets, self._seal_key = channel.port, channel.tickets, channel.seal_key
        self._events, self._log = events, LimitedLog(logger)
        self._wanted = BlocksWanted(engine.groups, engine.tokens_in_flight)
        self.turns = TurnKeeper(
            engine,
            book=self._book,
            names=names,
            wanted=self._wanted,
            seconds=config.turn_seconds,
            share=config.turn_share,
            index=channel.turns,
            pool=pool,
            workers=workers,
        )
        # Minimum age of an unclaimed lease that ends because requests wait for blocks.
        self._unclaimed_seconds = config.lease_seconds / 4
        self._pool, self._workers = pool, workers
        self._host, self._turn_seconds = config.advertise_host or config.host, config.turn_seconds
        self._stopped = self._sleeps = self._paused = False
        self._prompts: dict[str, _Prompt] = {}  # of requests that have not ended
        # Those of them with a lease on blocks that the engine may take: the prompt is not complete.
        self._readable: dict[str, _Prompt] = {}
        self._steps: deque[tuple[int, list[_Computed]]] = deque()  # with their numbers
        self._offered: dict[str, _Prompt] = {}  # of requests that have ended, by lease
        self._granted: dict[str, LeaseGranted] = {}  # by lease
        self._lease_of_sample: dict[str, str] = {}  # by the id that the samples share
        self._lease_named: dict[str, str] = {}  # by the router's name
        # The router's names of KV that it does not want any more, the latest last.
        self._unwanted: dict[str, None] = {}
        self._leaving: dict[str, int] = {}  # number of blocks of ended leases that will soon be free
        self._withdrawn: list[str] = []  # leases that end with the coming step
        # What the workers are told with the coming step: slots of leases whose request waits for the workers'
        # report, and of others. Of the others, the number of workers that have not raised the word yet.
        self._ended: dict[str, int] = {}
        self._raised: dict[str, int] = {}
        self._raising: dict[str, int] = {}

    @property
    def keeps_turns(self) -> Address | None:
        """Address (host, port) at which peers ask for turns; None if this engine keeps none."""
        return (self._host, self.port) if self._turn_seconds else None

    @property
    def leases(self) -> int:
        """Number of leases whose blocks are still pinned."""
        return len(self._book)

    @property
    def agenda(self) -> tuple[Sized, ...]:
        """Containers that are all empty if a step without messages of other engines needs no calls."""
        # A kept turn holds a lease too.
        return self._withdrawn, self._book, self._prompts

    @property
    def rest_seconds(self) -> float:
        """Time in which no lease of a finished request ends by itself; 0 while workers end leases."""
        # A pause ends leases when they are older than a second.
        if self._paused or self._withdrawn or self._leaving or self._raising or self._ended or self._raised:
            return 0.0
        return max(self._book.next_due - self._clock(), 0.0)

    def on_new_request(self, request: Request) -> None:
        """Register a request. If its KV will be offered, leave its last token to the consumer."""
        params, name = request.kv_transfer_params, request.request_id
        wanted = read_wanted(params)
        self._wanted.add(request)
        self._unwanted.update(dict.fromkeys(wanted.remote_unwanted))
        # A name may be that of a prompt that is still computed, whose lease then ends at once. Routers send
        # more names over time, so the oldest are forgotten.
        for old in list(self._unwanted)[:-MAX_UNWANTED]:
            del self._unwanted[old]
        if wants_prefill(params) and request.trim_prompt():
            parent, ticket = self._engine.parent_of(name), ticket_of(params)
            # Samples of a prompt have the same ticket, and only one of them may publish it.
            streamed = self._step_tokens > 0 and not self._stopped and parent is None and ticket is not None
            self._prompts[name] = _Prompt(
                request,
                ticket if streamed and ticket is not None else new_ticket(),
                streamed,
                wanted.remote_name,
                parent,
            )
            with suppress(Unnameable):
                self._adapters.name(request.adapter)  # starts to read it while the prompt is computed

    def completed_by(self, scheduled: Mapping[str, int]) -> list[Request]:
        """Return the requests to be offered whose prompts the coming step completes.

        `scheduled` has the number of tokens that the step computes, by request id.
        """
        found = []
        for name in sorted(self._prompts.keys() & scheduled.keys()):
            request = self._prompts[name].request
            if 0 < request.num_prompt_tokens - request.num_computed_tokens <= scheduled[name]:
                found.append(request)
        return found

    def scheduled(self, number: int, step: Step, block_ids: Callable[[str], BlockIds]) -> None:
        """Remember the tokens that the coming step computes. Call this after `take_events`.

        `number` is that of the step, ascending in the order of scheduling.
        """
        computed = []
        # Thousands may wait: an intersection takes the time of the smaller set.
        for name in sorted(self._prompts.keys() & step.tokens.keys()):
            if (one := self._prompts[name]).streamed and not one.over:
                one.preemptions = one.request.num_preemptions
                one.cached_tokens = one.request.cached_tokens
                tokens = one.request.num_computed_tokens + step.tokens[name]
                computed.append(_Computed(one, one.preemptions, tokens, block_ids(name)))
        if computed:
            self._steps.append((number, computed))

    def step_done(self, number: int) -> None:
        """Let other engines read the tokens of the steps up to `number`, whose output has been taken."""
        while self._steps and self._steps[0][0] <= number:
            for one in self._steps.popleft()[1]:
                prompt, request = one.prompt, one.prompt.request
                # After a preemption the step's blocks may belong to another request. The last tokens are
                # published when the request ends, with windows and state.
                if (
                    self._prompts.get(request.request_id) is prompt
                    and not prompt.over
                    and one.preemptions == request.num_preemptions
                    and one.tokens < request.num_prompt_tokens
                ):
                    self._publish(one)

    def _publish(self, one: _Computed) -> None:
        """Let other engines read a prompt up to the tokens that a step has computed."""
        prompt, request = one.prompt, one.prompt.request
        tables = [
            ids[: -(-one.tokens // group.block_tokens)] if attends_to_all(group.kind) else ()
            for group, ids in zip(self._engine.groups, one.tables, strict=True)
        ]
        # Null blocks stand for those that another connector fills (`PartBlocks.distrust_all`).
        if any(NULL_BLOCK in ids for ids in tables):
            return
        if prompt.word is not None:
            self._tickets.advance(request.request_id, Grant.of(prompt.word, one.tokens, tables))
            return
        if self._stopped or prompt.ticket in self._tickets:
            return  # another request was given the same ticket
        try:
            content = content_of(request, request.num_prompt_tokens, self._adapters)
            # It ends with the request, however long the prompt takes.
            prompt.word = word = self._book.grant(request.request_id, math.inf)
            self._readable[request.request_id] = prompt
        except (TransferError, Unnameable):
            return  # tried again after the next step
        self._say_granted(request.request_id, request.num_prompt_tokens, self._book.seconds)
        self._tickets.publish(
            prompt.ticket,
            request.request_id,
            request.num_prompt_tokens,
            content,
            Grant.of(word, one.tokens, tables),
            cached_tokens=prompt.cached_tokens,
        )

    def finished(self, request: Request, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        """Offer the KV of a finished request's prompt to another engine, or keep the request as a turn.

        Returns:
            (hold, params). `hold` is True if the engine must keep the blocks until all workers report the
            request as sent. `params` is the ``kv_transfer_params`` of the response; None if no offer was
            asked for.
        """
        name = request.request_id
        self._wanted.remove(request)
        if not wants_prefill(request.kv_transfer_params):
            keeps = not (self._stopped or self._paused)
            if keeps and (tokens := self.turns.finished(request, block_ids)):
                self._say_granted(name, tokens, self._turn_seconds, turn=True)
            return False, None
        tokens = request.num_prompt_tokens - self._unsettled
        stopped = self._stopped or self._sleeps
        if name in self._readable and (stopped or not request.is_complete):
            # Its blocks are free from now on. The workers raise the word before a step writes them.
            self._end(self._book.end([name]), withdrawn=True)
        one = self._prompts.pop(name, None)
        self._readable.pop(name, None)
        # A response carries the offer of only one sample of a prompt, so leases of the others would keep
        # blocks until they expire. The first sample that ends gets a lease, and the others repeat its offer.
        shared = self._lease_of_sample.get(self._engine.parent_of(name) or "")
        if one is None or not request.is_complete:
            if shared is not None:
                self._withdrawn.append(shared)  # without this sample no response carries the offer
            return False, write_nothing()
        if shared is not None:
            return False, self._offered[shared].params
        # The readers of a prompt that is over have failed or left, and no other has a claim.
        if tokens < 1 or stopped or one.over:
            return False, write_nothing(stopped=stopped)
        try:
            self._offer(one, block_ids, tokens)
        except (TransferError, Unnameable) as error:
            self._log.say(str(error), f"request {shown(name)}: not offered: {error}")
            return False, write_nothing()
        return True, one.params

    def _offer(self, one: _Prompt, block_ids: BlockIds, tokens: int) -> None:
        """Publish a finished prompt under a lease that can expire. Mutates `one`.

        Raises:
            TransferError: all lease slots are in use.
            Unnameable: the content of the prompt has no digest.
        """
        name = one.request.request_id
        tables = self._engine.tables(block_ids, tokens)
        sealed = ""
        if one.word is not None:
            # While the prompt was computed, the lease had no end. Its readers have redeemed the ticket.
            self._book.restart(name)
            self._tickets.advance(name, Grant.of(one.word, tokens, tables))
        else:
            if one.ticket in self._tickets:
                one.ticket = new_ticket()  # the router gave the same to another request
            # The content is computed first, so that a prompt without a name leaves no lease behind.
            content = content_of(one.request, tokens, self._adapters)
            one.word = self._book.grant(name)
            self._say_granted(name, tokens, self._book.seconds)
            grant = Grant.of(one.word, tokens, tables)
            self._tickets.publish(one.ticket, name, tokens, content, grant, cached_tokens=one.cached_tokens)
            binding = SealBinding((self._host, self.port), one.ticket, tokens, content)
            sealed = seal_grant(self._seal_key, grant, binding)
        offer = Offer(
            remote_engine_id=self._engine.engine_id,
            remote_host=self._host,
            remote_port=self.port,
            remote_request_id=one.ticket.hex(),
            remote_num_tokens=tokens,
            remote_step_tokens=self._step_tokens,
            remote_sealed_grant=sealed,
        )
        one.blocks = len({block for ids in block_ids for block in ids} - {NULL_BLOCK})
        one.params = write_offer(offer)
        self._offered[name] = one
        if one.router_name is not None:
            self._lease_named[one.router_name] = name
        if one.parent is not None:
            self._lease_of_sample[one.parent] = name

    def _say_granted(self, lease: str, tokens: int, seconds: float, *, turn: bool = False) -> None:
        granted = LeaseGranted(lease, self._clock(), tokens, seconds, turn=turn)
        self._granted[lease] = granted
        self._events.emit(granted)

    def take_events(self, events: FairQueue, orders: StepOrders) -> None:
        """Take the messages of other engines, and add to `orders` which leases the workers end."""
        if not (events or self._withdrawn or len(self._book)):
            return
        while events:
            event = events.popleft()
            if event.released:
                self._end(self._book.end(event.leases))
                continue
            for name in self._book.extend(event.leases):
                self._events.emit(LeaseExtended(name, self._clock()))
        withdrawn = self._withdrawn + self._preempted() + self._given_up()
        self._withdrawn.clear()
        self._end(self._book.end(withdrawn), withdrawn=True)
        for name in self._end(self._book.end(self._in_the_way()), expired=True):
            self._log.say(
                "unclaimed",
                f"request {shown(name)}: no consumer has claimed its blocks in "
                f"{self._unclaimed_seconds:g} s, and other requests wait for blocks, so they are given back",
            )
        over = self._book.end_expired()
        # No consumer was silent if the time of a turn is over, so that is neither logged nor counted as
        # expired.
        turns = {name: over.pop(name) for name in list(over) if name in self.turns}
        self._end({**turns, **self._book.end(self.turns.step())})
        for name in self._end(over, expired=True):
            self._log.say(
                "silent",
                f"request {shown(name)}: its consumer was silent for {self._book.seconds:g} s "
                "(lease_seconds), its blocks are given back",
            )
        orders.ended, self._ended = self._ended, {}
        orders.raised, self._raised = self._raised, {}

    def _preempted(self) -> list[str]:
        """Return the leases that must end because the blocks of their requests were taken."""
        return [
            name for name, one in self._readable.items() if one.request.num_preemptions != one.preemptions
        ]

    def _given_up(self) -> list[str]:
        """Return the unclaimed leases that must end because the router or a pause wants it."""
        named = [self._lease_named[name] for name in self._unwanted.keys() & self._lease_named.keys()]
        found = {lease for lease in named if self._book.is_unclaimed(lease)}
        if self._paused:
            found.update(self._book.unclaimed(_PAUSED_SECONDS))
        return [lease for lease in found if lease in self._offered]

    def _in_the_way(self) -> list[str]:
        """Return the unclaimed leases that must end because requests wait for blocks: the oldest, and few."""
        unclaimed = self._book.unclaimed(self._unclaimed_seconds)
        held = {name: self._offered[name].blocks for name in unclaimed if name in self._offered}
        return choose_leases_to_end(held, self._lacking_blocks()) if held else []

    def leases_block(self) -> bool:
        """Return whether requests wait for more blocks than will soon be free, while leases pin some."""
        # Without leases, requests wait only for running requests, which end by themselves.
        return bool(self._offered) and self._lacking_blocks() > 0

    def _lacking_blocks(self) -> int:
        """Return how many more blocks the largest waiting request needs than are free or will soon be."""
        return self._wanted.blocks() - self._pool.get_num_free_blocks() - sum(self._leaving.values())

    def _end(
        self, leases: Mapping[str, int], *, expired: bool = False, withdrawn: bool = False
    ) -> Mapping[str, int]:
        """Have the workers raise the words of ended leases with the coming step. Return the leases.

        `leases` has the slot of each lease, by name.
        """
        if leases:
            self._tickets.withdraw(leases)
        for name, slot in leases.items():
            readable = self._readable.pop(name, None)
            if readable is not None or name in self.turns:
                self._raised[name], self._raising[name] = slot, self._workers
            else:
                # The engine keeps the blocks of a finished request until the workers report it as sent.
                self._ended[name] = slot
            if readable is not None:
                readable.over = True
            self.turns.ended(name)
            if (one := self._offered.pop(name, None)) is not None:
                self._leaving[name] = one.blocks
                if one.router_name is not None:
                    self._lease_named.pop(one.router_name, None)
                    self._unwanted.pop(one.router_name, None)
                if one.parent is not None:
                    self._lease_of_sample.pop(one.parent, None)
            granted, now = self._granted.pop(name), self._clock()
            self._events.emit(LeaseEnded(name, now, granted=granted, expired=expired, withdrawn=withdrawn))
        return leases

    def sent(self, request_ids: set[str]) -> None:
        """Record that all workers have raised these requests' lease words: the blocks are free now."""
        for name in request_ids:
            self._book.ended(name)
            self._leaving.pop(name, None)

    def on_workers_confirmed(self, raised: Mapping[str, int]) -> None:
        """Count the workers that have raised each lease's word, so that other leases can use the word.

        The blocks of a turn are freed when all workers have raised its word.
        """
        for name in raised.keys() & self._raising.keys():
            self._raising[name] -= raised[name]
            if self._raising[name] <= 0:
                del self._raising[name]
                self._book.ended(name)
                self.turns.on_words_raised(name)

    def on_pause(self, *, paused: bool) -> None:
        """While the engine is paused, keep no turns, and end unclaimed leases soon."""
        # A paused engine can reset its cache only when no lease pins blocks.
        self._paused = paused
        if paused:
            self.turns.give_up()
        else:
            self._sleeps = False

    def on_sleep(self) -> None:
        """End all leases, and offer nothing until the engine is resumed."""
        self.reset()
        self._sleeps = True

    def renew(self, incarnation: int) -> None:
        """Grant leases under another incarnation, because the workers have registered their memory anew."""
        self._book.renew(incarnation)

    def reset(self) -> None:
        """Withdraw all offers and turns: their KV is no longer valid. The leases end with the coming step."""
        self._withdrawn[:] = [name for name in self._book.held if name not in self.turns]
        self._tickets.withdraw(self._withdrawn)
        self.turns.give_up()

    def stop_offering(self) -> None:
        """Withdraw all offers and turns, and make no more."""
        self.reset()
        self.drain()

    def drain(self) -> None:
        """Make no more offers and keep no more turns. Leases that are held end by themselves."""
        self.turns.give_up()
        self._stopped = True
