"""The scheduler half of an engine that computes prompts for others.

A finished prompt's blocks stay where they are, under a lease, until all consumers that have redeemed its
ticket release it, or stay silent for too long. A lease that no consumer has claimed gives way to requests
that wait for blocks (`unclaimed`). Ending a lease goes through the workers: each raises the lease word, then
says that the request is sent, and only then does the engine give the blocks back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from kvferry.engines.vllm.adapters import Adapters
from kvferry.engines.vllm.compat.drafts import reads_ahead
from kvferry.engines.vllm.compat.models import vocabulary_size
from kvferry.engines.vllm.compat.requests import finished_whole, trim_prompt
from kvferry.engines.vllm.compat.specs import state_position
from kvferry.engines.vllm.config import ConnectorConfig
from kvferry.engines.vllm.meta import BlockIds, SchedulerMeta
from kvferry.engines.vllm.offer import Offer, wants_prefill, write_nothing, write_offer
from kvferry.engines.vllm.prompt import content_of
from kvferry.engines.vllm.room import BlocksWanted
from kvferry.engines.vllm.siblings import Siblings
from kvferry.engines.vllm.turn_keeper import TurnKeeper
from kvferry.engines.vllm.turn_names import TurnNames
from kvferry.engines.vllm.unclaimed import UnclaimedLeases
from kvferry.errors import TransferError, Unnameable
from kvferry.geometry import GroupKind
from kvferry.limited_log import LimitedLog
from kvferry.observe.events import LeaseEnded, LeaseExtended, LeaseGranted
from kvferry.observe.stream import EventStream
from kvferry.terminal import shown
from kvferry.transport.control_server import ControlServer, LeasesClaimed, LeasesReleased
from kvferry.transport.fair_queue import FairQueue
from kvferry.transport.handshake import Address
from kvferry.transport.lease import LeaseBook
from kvferry.transport.redeem import Grant, new_ticket
from kvferry.transport.tickets import TicketBook

logger = logging.getLogger(__name__)

LEASE_SLOTS = 8192


class Producer:
    """Grants leases for finished prompts, and ends them."""

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        config: ConnectorConfig,
        kinds: tuple[GroupKind, ...],
        incarnation: int,
        events: EventStream,
        names: TurnNames,
        adapters: Adapters,
    ) -> None:
        self._adapters = adapters
        self._engine_id = str(vllm_config.kv_transfer_config.engine_id)
        self._groups = kv_cache_config.kv_cache_groups
        self._hash_block_tokens = kv_cache_config.hash_block_size
        self._kinds = kinds
        ahead = reads_ahead(vllm_config)
        self._sampled_below = vocabulary_size(vllm_config) if ahead else 0
        # Drafts of several modules combine what was computed of a token with tokens that only the consumer
        # has. A prefix that ends earlier is whole, but recurrent state has no earlier one.
        self._unsettled = 0 if GroupKind.STATE in kinds else max(ahead - 1, 0)
        self._book = LeaseBook(incarnation, LEASE_SLOTS, config.lease_seconds, time.monotonic)
        self._host = config.advertise_host or config.host
        self._events = events
        self._prompts: dict[str, Any] = {}
        self._withdrawn: list[str] = []
        self._log = LimitedLog(logger)
        self._siblings = Siblings()
        self._wanted = BlocksWanted(vllm_config, kv_cache_config, kinds)
        self._unclaimed = UnclaimedLeases(self._book, self._wanted)
        self._stopped = False
        self._turns: TurnKeeper | None = None
        if config.turn_seconds:
            self._turns = TurnKeeper(
                vllm_config,
                kv_cache_config,
                kinds,
                self._book,
                names,
                self._wanted,
                events,
                seconds=config.turn_seconds,
                share=config.turn_share,
            )
        self._tickets = TicketBook(incarnation)
        self.port = 0

    def start(self, server: ControlServer, pool: Any, workers: int) -> None:
        """Begin to grant leases and to publish tickets and turns.

        Args:
            server: the control channel, which answers from them.
            pool: the engine's block pool.
            workers: number of workers, which all have lease words.
        """
        self.port, self._tickets = server.port, server.tickets
        self._unclaimed.start(pool)
        if self._turns is not None:
            self._turns.start(server.turns, pool, workers)

    @property
    def busy(self) -> bool:
        """Whether the engine must keep stepping even without requests."""
        return self._turns is not None and self._turns.busy

    @property
    def holds_blocks(self) -> bool:
        """Whether blocks will become free without preempting a request."""
        return self._turns is not None and self._turns.holds_blocks

    @property
    def keeps_turns(self) -> Address | None:
        """Address at which peers ask for earlier turns; None if none are kept."""
        return None if self._turns is None else (self._host, self.port)

    def on_new_request(self, request: Any) -> None:
        """Stop short of the last prompt token, which the consumer computes; mutates `request`."""
        self._wanted.came(request)
        if wants_prefill(request.kv_transfer_params) and trim_prompt(
            request, self._hash_block_tokens, self._sampled_below
        ):
            self._prompts[request.request_id] = request
            with suppress(Unnameable):
                self._adapters.name(request.lora_request)  # it is read by the time the prompt is computed

    def completed_by(self, scheduled: Mapping[str, int]) -> list[Any]:
        """Return requests to be offered whose prompt the coming step completes.

        Args:
            scheduled: tokens per request in that step.
        """
        return [
            request
            for name, request in self._prompts.items()
            if name in scheduled
            and 0 < request.num_prompt_tokens - request.num_computed_tokens <= scheduled[name]
        ]

    def finished(self, request: Any, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        """Handle the end of a request; return whether its blocks are kept, and its ``kv_transfer_params``.

        Args:
            request: vLLM's.
            block_ids: by position per group, up to what was computed.
        """
        self._wanted.gone(request)
        if not wants_prefill(request.kv_transfer_params):
            if self._turns is not None and not self._stopped:
                self._turns.finished(request, block_ids, self.tables)
            return False, None
        if self._prompts.pop(request.request_id, None) is None or not finished_whole(request):
            if (lease := self._siblings.lease_of(request.request_id)) is not None:
                self._withdrawn.append(lease)  # without this sample there is no response
            return False, write_nothing()
        if (made := self._siblings.offer_of(request.request_id)) is not None:
            return False, made
        tokens = request.num_prompt_tokens - self._unsettled
        if tokens < 1 or self._stopped:
            return False, write_nothing()
        try:
            content = content_of(request, tokens, self._adapters)
            word = self._book.grant(request.request_id)
        except (TransferError, Unnameable) as error:
            self._log.say(str(error), f"request {shown(request.request_id)}: not offered: {error}")
            return False, write_nothing()
        now = time.monotonic()
        self._events.emit(LeaseGranted(request.request_id, now, tokens, self._book.seconds))
        ticket, grant = new_ticket(), Grant.of(word.slot, word.generation, self.tables(block_ids, tokens))
        self._tickets.publish(ticket, request.request_id, tokens, content, grant)
        params = write_offer(Offer(self._engine_id, self._host, self.port, ticket.hex(), tokens))
        self._siblings.offered(request.request_id, params)
        self._unclaimed.granted(request.request_id, block_ids)
        return True, params

    def tables(self, block_ids: BlockIds, tokens: int) -> list[list[int]]:
        """Return block tables to offer: block ids by position; of a state group, the snapshot's block."""
        return [
            [ids[state_position(group.kv_cache_spec, tokens)]] if kind is GroupKind.STATE else list(ids)
            for kind, group, ids in zip(self._kinds, self._groups, block_ids, strict=True)
        ]

    def take_events(self, events: FairQueue[LeasesClaimed | LeasesReleased], meta: SchedulerMeta) -> None:
        """Handle what consumers said; add the leases that end now to `meta`, for the workers."""
        while events:
            event = events.popleft()
            if isinstance(event, LeasesClaimed):
                for name in self._book.extend(event.leases):
                    self._events.emit(LeaseExtended(name, time.monotonic()))
            else:
                meta.ended.update(self._ended(self._book.end(event.leases), expired=False))
        withdrawn, self._withdrawn = self._withdrawn, []
        meta.ended.update(self._ended(self._book.end(withdrawn), expired=False, withdrawn=True))
        self._end_unclaimed(meta)
        over = self._book.end_expired()
        if self._turns is not None:
            turns = {name: over.pop(name) for name in list(over) if name in self._turns}
            turns.update(self._book.end(self._turns.step()))
            meta.turns_ended = self._ended(turns, expired=False)
        expired = self._ended(over, expired=True)
        for name in expired:
            self._log.say(
                "silent",
                f"request {shown(name)}: its consumer was silent for {self._book.seconds:g} s "
                "(lease_seconds), its blocks are given back",
            )
        meta.ended.update(expired)

    def _end_unclaimed(self, meta: SchedulerMeta) -> None:
        """End leases that nobody has claimed, as far as requests wait for their blocks."""
        leases = self._ended(self._book.end(self._unclaimed.leases_to_end()), expired=True)
        for name in leases:
            self._log.say(
                "unclaimed",
                f"request {shown(name)}: no consumer has claimed its blocks in "
                f"{self._unclaimed.seconds:g} s, and other requests wait for blocks, so they are given back",
            )
        meta.ended.update(leases)

    def _ended(self, leases: dict[str, int], *, expired: bool, withdrawn: bool = False) -> dict[str, int]:
        self._tickets.withdraw(leases)
        self._siblings.ended(leases)
        self._unclaimed.ended(leases)
        for name in leases:
            if self._turns is not None:
                self._turns.ended(name)
            self._events.emit(LeaseEnded(name, time.monotonic(), expired, withdrawn))
        return leases

    def reset(self) -> None:
        """Withdraw all offers and earlier turns: what was computed so far must not be used again."""
        self._withdrawn = [name for name in self._book.held if self._turns is None or name not in self._turns]
        self._tickets.withdraw(self._withdrawn)
        if self._turns is not None:
            self._turns.give_up()

    def stop_offering(self) -> None:
        """Withdraw everything, and offer nothing from now on."""
        self.reset()
        self._stopped = True

    def sent(self, request_ids: set[str]) -> None:
        """Note requests whose lease words all workers have raised."""
        for name in request_ids:
            self._book.ended(name)
            self._unclaimed.on_blocks_freed(name)

    def raised(self, turns: Mapping[str, int]) -> None:
        """Note the number of workers that have raised the words of each of these turns."""
        for name, workers in turns.items():
            if self._turns is not None and self._turns.raised(name, workers):
                self._book.ended(name)
