"""The connector's half in the engine's scheduler process. It makes all decisions."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import replace
from typing import Any

from kvferry.common.errors import ConfigError
from kvferry.connector.admin import DRAINED, AdminCalls, AdminServer
from kvferry.connector.admission import Admission
from kvferry.connector.bids import Speeds, StepTimes
from kvferry.connector.blocks import Headroom, PartBlocks
from kvferry.connector.choosing import BidChooser
from kvferry.connector.config import NODE, ConnectorConfig, read_tiers
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
from kvferry.connector.events import EventStream
from kvferry.connector.messages import CHANGED, MOVED, StepOrders, StepReports, WorkerInfo
from kvferry.connector.peers.peering import Peering
from kvferry.connector.source import RunningLoads, Source
from kvferry.connector.tiers.opening import NamespaceOf
from kvferry.connector.tiers.tiering import Tiering
from kvferry.geometry import RankGeometry
from kvferry.tiers.names import PEER
from kvferry.tiers.paths import boot_id
from kvferry.transport.addresses import is_loopback
from kvferry.transport.messages import Facts
from kvferry.transport.security import Keys, admin_token, key_location, read_keys

logger = logging.getLogger(__name__)

# Seconds after which a step looks at all parts, for what depends on time alone.
_LOOK_SECONDS = 1.0

# What nobody waits for is put off in the step that begins a load, and in the one that computes its request.
_HURRIED_STEPS = 2

_RESET = "tiers are not used before POST /reset_prefix_cache?reset_external=true"


class SchedulerHalf:
    """The scheduler half of one engine's connector.

    Only the engine's thread calls it. `engine` says when it calls what.

    Attributes:
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
            workers: sorted by rank.
            facts: returns the facts about the engine that peers compare, given its incarnation.
            prefix_cache: None unless the engine shares attention blocks where it lacks recurrent state.
            describe_blocks: None unless the engine publishes events about its blocks.
            wake: makes the engine run a step soon, although it has no requests.

        Raises:
            ConfigError: a setting cannot be used, memory, keys or addresses cannot be had, no chunk could
                ever be stored, or workers run with another key, or with tiers on a machine that the
                scheduler's cannot reach.
        """
        adapters, events = adapters or Adapters(), events or EventStream()
        tiers, keys = read_tiers(config.tiers), scheduler_keys(config)
        ranks = [worker.geometry for worker in workers]
        cards = tuple(worker.card for worker in workers if worker.card is not None)
        self._engine, self.events, self._wake = engine, events, wake
        self._draining = self._paused = self._sleep_resets = False
        self._changed = self._moved = False  # the weights of a worker, the KV cache of a worker
        self._epoch, self._look_at = 0, 0.0
        self._put_off = 0  # number of steps in which events and messages to peers were put off
        self._scheduled = self._done = 0  # numbers of the last step scheduled, and of the last one done
        self._quiet_orders = StepOrders(computes=True, quiet=True)

        # What the sources of KV and the admission share.
        speeds = Speeds(clock)
        self._steps = StepTimes(speeds, clock)
        loads = RunningLoads(
            engine.groups,
            workers=len(workers),
            pool=pool,
            timeout_seconds=config.load_timeout_seconds,
            clock=clock,
        )
        self.parts = PartBlocks(ranks[0].groups, pool, config.whole_blocks)

        # The sources. Of equally good offers, that of the first one is taken.
        sources: list[Source] = []
        weights = {PEER: config.load_weight}
        self._peering: Peering | None = None
        if cards and keys is not None:
            check_rank_keys(keys, workers)
            self._peering = Peering(
                engine,
                config,
                keys,
                cards,
                pool=pool,
                loads=loads,
                adapters=adapters,
                events=events,
                idle=lambda: self._steps.idle and not engine.lockstep,
                facts=facts,
                wake=wake,
                clock=clock,
            )
            sources.append(self._peering.source)
        self._tiering: Tiering | None = None
        if tiers is not None:
            machines = machines_of(workers)
            if tiers.slow:
                check_reachable(config, machines)
            self._tiering = Tiering(
                tiers,
                engine,
                config,
                machines,
                pool=pool,
                parts=self.parts,
                adapters=adapters,
                events=events,
                speeds=speeds,
                namespace=namespace,
                keys=keys,
                describe_blocks=describe_blocks,
                wake=wake,
            )
            sources.append(self._tiering.source)
            weights.update(self._tiering.weights)
        self.chunking = None if self._tiering is None else self._tiering.chunking

        # The choice between them.
        self.admission = Admission(
            engine.groups,
            loads=loads,
            parts=self.parts,
            headroom=Headroom.of(engine.groups, engine.step_tokens, pool),
            attempts=config.attempts,
            sources=sources,
            chooser=BidChooser(config.source_policy, speeds, config.patience_seconds, weights),
            events=events,
            tenants=config.weighted_tenants(),
            prefix_cache=prefix_cache,
            clock=clock,
        )

        # The parts' own containers of what they have to do, which they never replace: asking each part in
        # every step took longer than the rest of a quiet step.
        self._agenda: tuple[Sized, ...] = (events.waiting, *self.admission.agenda)
        if self._peering is not None:
            self._agenda += self._peering.agenda
        # Called in every step, because some of these containers are filled by what the step computes.
        self._counters: tuple[Callable[[Step], None], ...] = ()
        if self._tiering is not None:
            self._agenda += self._tiering.agenda
            self._counters = self._tiering.counters
        # With a host buffer, any step may complete a prompt that is copied to it.
        self._always_looks = bool(self._peering and config.host_buffer)

        self._admin: AdminServer | None = None
        if (admin := config.admin) is not None and keys is not None:
            calls = AdminCalls(self, self._tiering, engine.longest_request, wake)
            port = admin.port + engine.port_offset if admin.port else 0
            self._admin = AdminServer(admin.host, port, admin_token(keys), calls)

    @property
    def busy(self) -> bool:
        """Whether the tiers or peers need engine steps even if the engine has no requests.

        A pause also waits for loads whose requests have ended, because they may still write to the KV cache.
        """
        return (
            (self._admin is not None and len(self._admin.calls) > 0)
            or (self._peering is not None and self._peering.busy)
            or (self._tiering is not None and self._tiering.busy)
            or (self._paused and len(self.admission.loads) > 0)
        )

    @property
    def rest_seconds(self) -> float:
        """Time in which a step of an engine without requests can do nothing, unless a message arrives."""
        if self.busy or self.events.waiting or len(self.admission.loads):
            return 0.0
        return math.inf if self._peering is None else self._peering.rest_seconds

    @property
    def holds_blocks(self) -> bool:
        """Whether blocks of stores or ended leases will soon be free, so that the engine need not preempt."""
        peering, tiering = self._peering, self._tiering
        return (peering is not None and peering.holds_blocks) or (
            tiering is not None and tiering.holds_blocks
        )

    def on_new_request(self, request: Request) -> None:
        self.events.hold()  # until its first token is there, or is not near
        if self._peering is not None:
            self._peering.on_new_request(request)
        self.admission.on_new_request(request)
        if self._tiering is not None:
            self._tiering.on_new_request(request)

    def place_snapshots(self, request: Request, start: int) -> None:
        """Place snapshots of recurrent state, for prompts that begin like a request, before its admission."""
        if self._tiering is not None:
            self._tiering.place_snapshots(request, start)

    def finished(self, request: Request, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        """End a request: store its last chunks, and offer or keep its KV for peers.

        Returns:
            (whether the engine must keep the blocks, the ``kv_transfer_params`` of the response if any).
        """
        self.admission.finished(request.request_id)
        whole = self.parts.masked_tables(request.request_id, block_ids)
        self.parts.forget(request.request_id)
        if self._tiering is not None:
            self._tiering.finished(request, whole)
        held = (False, None) if self._peering is None else self._peering.producer.finished(request, whole)
        self.events.release()  # no step may follow
        return held

    def orders(self, step: Step) -> StepOrders:
        """Return what all workers do in the coming step."""
        computed = step.num_tokens
        self._scheduled += 1
        if self._admin is not None:
            self._admin.calls.run()
        now = self._steps.scheduled(computed)
        if self._peering is not None:
            self._peering.stepped_at = now
        for count in self._counters:
            count(step)
        if computed and now < self._look_at and not (self._always_looks or any(self._agenda)):
            return self._quiet_orders
        self._look_at = now + _LOOK_SECONDS
        idle = not self._engine.lockstep and not self._steps.computing
        orders = StepOrders(epoch=self._epoch, computes=computed > 0, idle=idle)
        if idle:
            orders.step_seconds = self._steps.small_seconds
        if self._peering is not None:
            self._peering.schedule(
                self._scheduled,
                step,
                lambda name: self.parts.masked_tables(name, step.block_ids(name)),
                self.admission.admitted,
                orders,
            )
        if self._tiering is not None:
            self._tiering.poll(idle=idle)  # before loads take what has arrived
        started = self.admission.schedule(step.tokens.keys(), orders)
        self._put_off = self._put_off + 1 if orders.loads or started else 0
        if not self._put_off or self._put_off > _HURRIED_STEPS:
            self._catch_up()
        if self._tiering is not None:
            self._tiering.schedule(step, started, orders)
        return orders

    def _catch_up(self) -> None:
        """Do what was put off because a request waited for its first token."""
        self._put_off = 0
        self.events.release()
        if self._peering is not None:
            # The client's thread takes the interpreter from the engine's thread, for up to a millisecond.
            self._peering.client.flush()

    def take_reports(self, reports: StepReports) -> None:
        if reports.moved or reports.stale is not None:
            self._stop_stale_exchange(reports)
        if self._tiering is not None:
            self._tiering.take_reports(reports)
        self.admission.take_reports(reports)
        if self._peering is not None:
            self._peering.producer.on_workers_confirmed(reports.raised)
        # The next step may compute a request that was loaded, or load more. An engine would rest before it.
        if reports.reports and not self._steps.computing:
            self._wake()

    def _stop_stale_exchange(self, reports: StepReports) -> None:
        """Stop what must not be used after the weights have changed or the KV cache has moved.

        After a change of the weights, peers are not used any more, and tiers not before a reset of the cache.
        After a move of the cache, peers and tiers are not used any more: the engine computes everything.
        """
        if self._moved:
            return
        if reports.moved:
            self._moved = True  # the worker has logged it
            if self._peering is not None:
                self._peering.stop(MOVED)
            if self._tiering is not None:
                self._tiering.suspend(MOVED)
            return
        if not self._changed:
            self._changed = True
            logger.warning(
                "%s: no KV is exchanged with other engines any more, since they compared other weights; "
                "start this engine anew to exchange again", CHANGED,
            )  # fmt: skip
            if self._peering is not None:
                self._peering.stop(CHANGED)
        if self._tiering is not None and reports.stale is not None and reports.stale >= self._epoch:
            why = f"{CHANGED}, and its cache was not reset: {_RESET}"
            logger.warning(why)
            self._tiering.suspend(why)

    def sent(self, request_ids: set[str]) -> None:
        """Record that all workers have ended the leases of these requests. Their blocks can be freed now."""
        if self._peering is not None:
            self._peering.producer.sent(request_ids)

    def step_done(self) -> None:
        """Record that the engine has taken the output of the oldest step under way."""
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
        """Let peers read again, if the workers, sorted by rank, have registered their memory anew."""
        if any(worker.stale is not None and worker.stale >= self._epoch for worker in workers):
            self.reset()
        if self._peering is not None:
            self._peering.wake(workers)

    def reset(self) -> None:
        """Invalidate all KV that was kept, offered or stored so far, because the engine's cache is reset.

        If the engine falls asleep, chunks in the tiers stay valid, until `wake` finds other weights.
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
            if self._moved:
                self._tiering.suspend(MOVED)

    def shutdown(self) -> None:
        """Close the control channel and the tiers, and end all threads."""
        self.events.release()
        if self._admin is not None:
            self._admin.close()
        if self._peering is not None:
            self._peering.close()
        if self._tiering is not None:
            self._tiering.shutdown()
        self._peering = self._tiering = self._admin = None


def scheduler_keys(config: ConnectorConfig) -> Keys | None:
    """Return the secret keys of the control channels; None if the engine needs none. Log their location.

    Raise ConfigError if the key file cannot be read, or a missing one cannot be created.
    """
    # The token of the admin API derives from the keys too.
    if not (config.transfers or config.shares_host_memory) and config.admin is None:
        return None
    keys, place = read_keys(config.secret_file), key_location(config.secret_file)
    logger.info("channels between engines use %s (fingerprint %s)", place, keys.fingerprint)
    if (
        (config.transfers or config.shares_host_memory)
        and not place.configured
        and not is_loopback(config.host)
    ):
        logger.warning(
            "host is %s and secret_file is not set, so only this user's engines on this machine have "
            "the key: others are refused until they have it too; copy %s to their machines, or make a file "
            "with kvferry keygen FILE, and set secret_file everywhere",
            config.host, place.path,
        )  # fmt: skip
    return keys


def check_rank_keys(keys: Keys, workers: Iterable[WorkerInfo]) -> None:
    """Raise ConfigError if the key of a rank differs: its machine has a key of its own."""
    for worker in workers:
        if worker.key not in (None, keys.fingerprint):
            geometry = worker.geometry
            raise ConfigError(
                f"rank TP{geometry.tp_rank} PP{geometry.pp_rank} has a key with fingerprint {worker.key}, "
                f"the engine's scheduler one with {keys.fingerprint}: its machine has a key of its own; set "
                "secret_file to the same secret on all machines of the engine (kvferry keygen FILE makes one)"
            )


def machines_of(workers: Iterable[WorkerInfo]) -> list[list[RankGeometry]]:
    """Return the ranks of each machine, those of this process's machine first. It may have none."""
    found: dict[str, list[RankGeometry]] = {boot_id(): []}
    for worker in workers:
        found.setdefault(worker.machine, []).append(worker.geometry)
    return list(found.values())


def check_reachable(config: ConnectorConfig, machines: Sequence[Sequence[RankGeometry]]) -> None:
    """Raise ConfigError if ranks with tiers in storage run on machines that cannot reach each other."""
    if len(machines) > 1 and is_loopback(config.host):
        rank = machines[1][0]
        raise ConfigError(
            f"rank TP{rank.tp_rank} PP{rank.pp_rank} runs on another machine than the engine's scheduler, "
            f"and host is {config.host}, so chunks cannot be exchanged with storage; set host to {NODE!r} "
            "(--host node), or configure no tiers but host memory"
        )
