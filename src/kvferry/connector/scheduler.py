"""The connector's half in the engine's scheduler process. It makes all decisions."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvferry.connector.admin import DRAINED, AdminActions, AdminCalls, AdminServer
from kvferry.connector.compose import (
    Composition,
    check_one_machine,
    check_rank_keys,
    scheduler_keys,
)
from kvferry.connector.config import AdminConfig, ConnectorConfig, read_tiers
from kvferry.connector.content import Adapters
from kvferry.connector.engine import (
    BlockIds,
    BlockPool,
    DescribeBlocks,
    EngineFacts,
    PrefixCache,
    Request,
    Step,
)
from kvferry.connector.events import EventStream, Refusals
from kvferry.connector.messages import StepOrders, StepReports, WorkerInfo
from kvferry.connector.peers.peering import Peering
from kvferry.connector.source import Source
from kvferry.connector.speeds import Speeds, StepTimes
from kvferry.connector.stale_kv import StaleKV
from kvferry.connector.tiers.tiering import NamespaceOf, Tiering
from kvferry.transport.messages import Facts
from kvferry.transport.security import Keys, admin_token

logger = logging.getLogger(__name__)

# Seconds after which a step looks at all parts, for what depends on time alone.
_LOOK_SECONDS = 1.0


class SchedulerHalf:
    """The scheduler half of one engine's connector.

    It owns the admission, the exchange of KV with peers (`Peering`) and the tiers (`Tiering`). Only the
    engine's thread calls it. For every step the engine calls `on_new_request` for new requests, `admission`
    for requests to schedule, `orders` before the step, `take_reports` after it, and `finished` for requests
    that have ended.

    Attributes:
        events: stream that receives the events about requests.
        admission: chooses a source of KV for each request.
        parts: record of the blocks that loads fill only in part.
        chunking: tokens per chunk, between kept snapshots, and before the first one; None without tiers.
    """

    def __init__(
        self,
        engine: EngineFacts,
        config: ConnectorConfig,
        workers: Sequence[WorkerInfo],
        pool: BlockPool,
        *,
        facts: Callable[[int], Facts],
        namespace: NamespaceOf,
        adapters: Adapters | None = None,
        events: EventStream | None = None,
        prefix_cache: PrefixCache | None = None,
        describe_blocks: DescribeBlocks | None = None,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the control channel to other engines, and open the tiers. All workers of the engine run.

        Args:
            workers: descriptions of all workers, sorted by rank.
            facts: function that takes the incarnation, and returns the facts about the engine that peers
                compare at the handshake.
            namespace: function that takes the format in which chunks are stored, and returns the namespace
                (scope) of the chunk keys.
            prefix_cache: the engine's prefix cache, if it shares attention blocks where it lacks recurrent
                state; else None.
            describe_blocks: function that returns the engine's blocks that end in a range of a request's
                tokens, if the engine publishes events about its blocks; else None.
            wake: function that makes the engine run a step soon, although it has no requests.
            clock: function that returns monotonic seconds.

        Raises:
            ConfigError: a setting is invalid, the secret key cannot be read or created, the control channel
                or the admin API cannot listen at its address, no chunk could ever be stored in the tiers,
                their memory cannot be allocated, a worker of an engine with tiers runs on another machine, or
                a worker's secret key differs from the scheduler's.
        """
        adapters, events = adapters or Adapters(), events or EventStream()
        tiers, keys = read_tiers(config.tiers), scheduler_keys(config)
        self._engine, self.events = engine, events
        speeds = Speeds(clock)
        self._steps = StepTimes(speeds, clock)
        self._peering: Peering | None = None
        self._tiering: Tiering | None = None
        self._calls: AdminCalls | None = None
        self._admin: AdminServer | None = None
        self._draining = self._paused = self._sleep_resets = False
        self._epoch, self._look_at = 0, 0.0
        self._scheduled = self._done = 0  # numbers of the last step scheduled, and of the last one done
        self._quiet_orders = StepOrders(computes=True, quiet=True)
        geometries = [worker.geometry for worker in workers]
        composition = Composition(
            engine,
            config,
            pool=pool,
            groups=geometries[0].groups,
            workers=len(workers),
            events=events,
            adapters=adapters,
            refusals=Refusals(events),
            speeds=speeds,
            idle=lambda: self._steps.idle and not engine.lockstep,
            prefix_cache=prefix_cache,
            describe_blocks=describe_blocks,
            clock=clock,
        )
        self.parts = composition.parts
        sources: list[Source] = []
        ranks = tuple(worker.card for worker in workers if worker.card is not None)
        if ranks and keys is not None:
            check_rank_keys(keys, workers)
            self._peering = Peering(composition, keys, ranks, facts=facts, wake=wake, clock=clock)
            sources.append(self._peering.source)
        if tiers is not None:
            check_one_machine(workers)
            self._tiering = Tiering(tiers, composition, namespace=namespace, ranks=geometries)
            sources.append(self._tiering.source)
        self.chunking = None if self._tiering is None else self._tiering.chunking
        self._stale = StaleKV(self._peering, self._tiering)
        self.admission = composition.admission(
            sources, {} if self._tiering is None else self._tiering.weights
        )
        if config.admin is not None and keys is not None:
            self._start_admin(config.admin, keys, wake)

    def _start_admin(self, admin: AdminConfig, keys: Keys, wake: Callable[[], None]) -> None:
        """Start the server of the admin API. Operators' token derives from the keys."""
        self._calls = AdminCalls(wake)
        actions = AdminActions(self, self._tiering, self._engine.longest_request)
        port = admin.port + self._engine.port_offset if admin.port else 0
        self._admin = AdminServer(admin.host, port, admin_token(keys), actions, self._calls)

    @property
    def busy(self) -> bool:
        """Whether the tiers or peers need engine steps even if the engine has no requests.

        A pause also waits for loads whose requests have ended, because they may still write to the KV cache.
        """
        return (
            bool(self._calls)
            or (self._peering is not None and self._peering.busy)
            or (self._tiering is not None and self._tiering.busy)
            or (self._paused and len(self.admission.loads) > 0)
        )

    @property
    def holds_blocks(self) -> bool:
        """Whether blocks of stores or ended leases will soon be free, so that the engine need not preempt."""
        peering, tiering = self._peering, self._tiering
        return (peering is not None and peering.holds_blocks) or (
            tiering is not None and tiering.holds_blocks
        )

    def on_new_request(self, request: Request) -> None:
        """Add a new request: ask which sources can load its KV.

        Also prepare to offer the request's KV to other engines, and to store it in the tiers.
        """
        if self._peering is not None:
            self._peering.on_new_request(request)
        self.admission.on_new_request(request)
        if self._tiering is not None:
            self._tiering.on_new_request(request)

    def place_snapshots(self, request: Request, start: int) -> None:
        """Have an engine with recurrent state take snapshots of a request, for prompts that begin like it.

        The engine calls it when it is about to admit the request.
        """
        if self._tiering is not None:
            self._tiering.place_snapshots(request, start)

    def finished(self, request: Request, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        """End a request: store its last chunks, and offer or keep its KV for peers.

        Returns:
            Two values: whether the engine must keep the blocks, and the ``kv_transfer_params`` of the
            response (None for none).
        """
        self.admission.finished(request.request_id)
        whole = self.parts.masked_tables(request.request_id, block_ids)
        self.parts.forget(request.request_id)
        if self._tiering is not None:
            self._tiering.finished(request, whole)
        return (False, None) if self._peering is None else self._peering.producer.finished(request, whole)

    def orders(self, step: Step) -> StepOrders:
        """Return the message that tells all workers what to load, store and send in the coming step."""
        computed = step.num_tokens
        self._scheduled += 1
        if self._calls:
            self._calls.run()
        now = self._steps.scheduled(computed)
        if self._peering is not None:
            self._peering.stepped_at = now
        if computed and now < self._look_at and not self._has_work():
            return self._quiet_orders
        self._look_at = now + _LOOK_SECONDS
        idle = not self._engine.lockstep and not self._steps.computing
        orders = StepOrders(epoch=self._epoch, computes=computed > 0, idle=idle)
        if self._peering is not None:
            self._peering.schedule(
                self._scheduled,
                step,
                lambda name: self.parts.masked_tables(name, step.block_ids(name)),
                self.admission.admitted,
                orders,
            )
        if self._tiering is not None:
            self._tiering.schedule(step, orders)
        self.admission.scheduled(step.tokens)
        self.admission.hand_over(orders)
        return orders

    def _has_work(self) -> bool:
        """Return whether this step must look at any part, by the parts' own records."""
        return (
            self._tiering is not None
            or (self._peering is not None and self._peering.has_work)
            or self.admission.has_work
        )

    def take_reports(self, reports: StepReports) -> None:
        """Process the workers' reports of the last step."""
        self._stale.take_reports(reports, self._epoch)
        if self._tiering is not None:
            self._tiering.take_reports(reports)
        self.admission.take_reports(reports)
        if self._peering is not None:
            self._peering.producer.on_workers_confirmed(reports.raised)

    def sent(self, request_ids: set[str]) -> None:
        """Record that all workers have ended the leases of these requests. Their blocks can be freed now."""
        if self._peering is not None:
            self._peering.producer.sent(request_ids)

    def step_done(self) -> None:
        """Record that the oldest step under way is done: the engine has taken the step's output."""
        self._done = min(self._done + 1, self._scheduled)
        self._steps.done()
        if self._peering is not None:
            self._peering.producer.step_done(self._done)
        if self._tiering is not None:
            self._tiering.step_done()

    def drain(self) -> None:
        """Offer no KV and read no KV of other engines from now on. Leases and loads under way go on."""
        if not self._draining:
            self._draining = True
            logger.info("%s: it offers no KV and reads none of other engines any more", DRAINED)
            if self._peering is not None:
                self._peering.drain(DRAINED)

    def drain_state(self) -> dict[str, Any]:
        """Return whether an operator drains this engine, and how many leases and loads are under way."""
        return {
            "draining": self._draining,
            "leases": 0 if self._peering is None else self._peering.producer.leases,
            "loads": len(self.admission.loads),
        }

    def on_pause(self, *, paused: bool) -> None:
        """Record that the engine was paused or resumed."""
        self._paused = paused
        if self._peering is not None:
            self._peering.producer.on_pause(paused=paused)

    def on_sleep(self) -> None:
        """End all leases, because the engine is about to give up the memory of its KV cache.

        The next reset is the one with which the engine falls asleep.
        """
        self._sleep_resets = True
        if self._peering is not None:
            self._peering.producer.on_sleep()

    def on_asleep(self, *, failed: bool) -> None:
        """Record that the engine sleeps, or that it could not fall asleep."""
        self._sleep_resets = False
        if failed:
            self.reset()

    def wake(self, workers: Sequence[WorkerInfo]) -> None:
        """Let peers read again, after workers have registered the memory of the KV cache anew.

        Do nothing if they have not.

        Args:
            workers: descriptions of all workers, sorted by rank.
        """
        if any(worker.stale is not None and worker.stale >= self._epoch for worker in workers):
            self.reset()
        if self._peering is not None:
            self._peering.wake(workers)

    def reset(self) -> None:
        """Invalidate all KV that was kept, offered or stored so far, because the engine's cache is reset.

        If the engine falls asleep, chunks in the tiers stay valid. `wake` invalidates them if the weights
        have changed meanwhile.
        """
        if self._peering is not None:
            self._peering.reset()
        if self._sleep_resets:
            self._sleep_resets = False
            return
        self._epoch += 1
        self._quiet_orders = replace(self._quiet_orders, epoch=self._epoch)
        if self._peering is not None:
            self._peering.begin_epoch()
        if self._tiering is not None:
            self._tiering.start_anew()
        self._stale.on_reset()

    def shutdown(self) -> None:
        """Close the control channel and the tiers, and end all threads."""
        if self._calls is not None:
            self._calls.close()
        if self._admin is not None:
            self._admin.close()
        if self._peering is not None:
            self._peering.close()
        if self._tiering is not None:
            self._tiering.shutdown()
        self._peering = self._tiering = self._admin = None
