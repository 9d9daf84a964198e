"""A lane: one thread with one NIXL agent that reads from peers.

The engine's thread submits orders, polls for results, and never waits for a lane. The lane's thread does the
work that takes time: starting a READ may take as long as the READ itself, planning a long prompt takes
milliseconds, and preparing a peer takes longer.

    ordered ─plan, post─▶ DATA ─all done─▶ WORDS ─equal─▶ ready
                 │          └─error─┐        └─changed─┐
                 └──────────────────┴───────────────────┴─▶ failed

In state DATA the lane reads the KV. In state WORDS it reads the lease words. A lease word is an integer in
the producer's registered memory that changes before leased blocks are freed. So an unchanged word proves that
the KV is valid.

A cell is the smallest unit that is transferred. The lane starts one READ per rank of the peer for all cells
that it reads straight into blocks. Cells that are packed into contiguous staging memory move in segments
(`packed_read`).

Every order has exactly one result. The lane delivers it when none of the order's READs is in flight. Until
then nothing else may use the destination blocks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import zmq

from kvferry.geometry import RankGeometry, Region
from kvferry.memory.device_stream import enter_stream
from kvferry.transport.agent import Agent, ReadState
from kvferry.transport.connected_peer import MAX_SOURCES, ConnectedPeer
from kvferry.transport.messages import RankCard
from kvferry.transport.metadata_validation import MetadataValidator
from kvferry.transport.packed_read import PackedRead, PackedReadResources
from kvferry.transport.peer_connections import PeerConnections, log_unexpected
from kvferry.transport.read_order import ReadOrder
from kvferry.transport.read_plan import ReadPlan
from kvferry.transport.settings import TransferSettings
from kvferry.transport.staging import StagingArea

logger = logging.getLogger(__name__)

MAX_SEGMENTS = 4096
"""Maximum number of segments (runs of cells packed by the source) that a lane reads at a time."""

_SHORTEST_NAP, _LONGEST_NAP = 20e-6, 2e-4
"""Shortest and longest time between polls while a READ is in flight, in seconds.

Some transports make progress only when polled.
"""

_LONGEST_WAIT = 1e-3
"""Maximum seconds between polls for new orders while no READ is in flight.

Then the lane only waits for sources to pack cells.
"""


class MakeAgent(Protocol):
    """Type of functions that create a NIXL agent. They take the same arguments as `Agent`."""

    def __call__(self, name: str, *, progress: bool) -> Agent:
        """Start a NIXL agent and return it.

        Args:
            name: name of the agent, unique among all agents that ever communicate.
            progress: True to run NIXL's progress thread.
        """


@dataclass(frozen=True, slots=True)
class ReadResult:
    """The result of an order to read KV from a peer. None of the order's transfers is in flight any more.

    Attributes:
        key: unique name of the order (`ReadOrder.key`).
        failure: reason for the failure; None if all bytes arrived and are valid.
        plan: plan of the read; None if the order failed before its read was started.
        transfer_seconds: duration from the start of the read until all KV had arrived. If the read failed
            before that, duration until the read ended; 0 if it was not started.
        check_seconds: duration of reading the lease words (integers that show whether the KV is valid); 0 if
            they were not read.
        peer_lost: True if the peer cannot be read from, or has restarted. Other orders to read from this peer
            will fail too.
    """

    key: str
    failure: str | None
    plan: ReadPlan | None
    transfer_seconds: float
    check_seconds: float
    peer_lost: bool = False


@dataclass(frozen=True, slots=True)
class _Connect:
    """A command to a lane (reading thread): connect or disconnect a peer.

    Attributes:
        peer: name of the peer.
        cards: descriptions of the peer's ranks; None to disconnect the peer.
    """

    peer: str
    cards: tuple[RankCard, ...] | None


@dataclass(slots=True)
class _Read:
    """The execution of a read order, which a lane (reading thread) has started and not ended.

    It consists of READs: one-sided reads of the peer's memory. A lease word is an integer in that memory that
    changes before leased blocks are freed. A cell is the part of a block that moves as one unit.

    Attributes:
        order: order that is executed.
        peer: connection to the peer.
        landing: index of the first of the `MAX_SOURCES` elements of `Lane._landing` that belong to this read.
            The lease word of each rank of the peer is read into one of them.
        plan: plan of the read.
        handles: handles of READs in flight. At first, these READs fetch cells straight into blocks; later,
            they fetch lease words. READs of packed cells are not included.
        packed: reads of packed cells in progress, one per route (set of layers that are read together).
        words: True once the lease words are being read.
        failure: reason for the failure; None if there is none so far.
        peer_lost: True if the transport failed.
        started: start of the read, in seconds of `time.perf_counter`.
        data_done: time at which all KV had arrived, by the same clock; 0 while KV is still missing.
    """

    order: ReadOrder
    peer: ConnectedPeer
    landing: int
    plan: ReadPlan
    handles: list[Any] = field(default_factory=list)
    packed: list[PackedRead] = field(default_factory=list)
    words: bool = False
    failure: str | None = None
    peer_lost: bool = False
    started: float = 0.0
    data_done: float = 0.0


class Lane:
    """A thread that reads KV from peers into this worker's KV cache, with a NIXL agent of its own.

    The engine's thread calls the public methods. They queue commands and orders, which the lane's thread
    executes.
    """

    def __init__(
        self,
        name: str,
        geometry: RankGeometry,
        landing: StagingArea,
        settings: TransferSettings,
        make_agent: MakeAgent,
        validator: MetadataValidator,
        in_flight: int,
        on_result: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the thread. Use `wait_ready` to wait until it can read.

        Args:
            name: name of the NIXL agent, unique among all agents that ever communicate.
            geometry: addresses and layout of this worker's KV cache.
            landing: staging area into which packed cells (parts of blocks) are read; all lanes share it.
            settings: settings of transfers, such as the transfer strategy and the measured costs that decide
                between strategies.
            make_agent: function that creates the NIXL agent; the thread calls it.
            validator: object that decides whether a peer's transport metadata may be loaded.
            in_flight: maximum number of orders that are executed at the same time; further orders wait.
            on_result: function that the thread calls when `results` has a new result.
            clock: function that returns the current time in seconds, for timeouts, for the pauses between
                attempts to connect a peer, and for the speed of READs.
        """
        self._clock = clock
        self._on_result = on_result
        self._settings, self._geometry, self._images = settings, geometry, landing
        self._landing = np.zeros(in_flight * MAX_SOURCES + MAX_SEGMENTS, np.uint64)
        self._landing_region = Region(int(self._landing.ctypes.data), self._landing.nbytes)
        self._free_landings = list(range(0, in_flight * MAX_SOURCES, MAX_SOURCES))
        self._validator = validator
        self._queue: deque[ReadOrder | _Connect] = deque()
        self._held: deque[ReadOrder] = deque()
        self._results: deque[ReadResult] = deque()
        self._reads: list[_Read] = []
        self._measuring: list[ConnectedPeer] = []
        self._pending = 0
        self._wake = threading.Event()
        self._stop = False
        self._ready = threading.Event()
        self._fault: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(name, make_agent), name=f"kvferry-transfer {name}", daemon=True
        )
        self._thread.start()

    def wait_ready(self) -> None:
        """Block until the lane (reading thread) has created its NIXL agent and registered its memory.

        Raises:
            ConfigError: NIXL is missing, cannot start on this machine, or has no UCX backend. If NIXL cannot
                register the memory, NIXL's own exception is raised.
        """
        self._ready.wait()
        if self._fault is not None:
            raise self._fault

    # -- the engine's thread ------------------------------------------------------------------------------

    def connect(self, peer: str, cards: Sequence[RankCard]) -> None:
        """Queue a command to connect a peer, and return at once. `submit` may be called right away.

        Orders for this peer wait until it is connected, and fail if it cannot be connected.

        Args:
            peer: name of the peer.
            cards: descriptions of all ranks of the peer.
        """
        self._queue.append(_Connect(peer, tuple(cards)))
        self._wake.set()

    def disconnect(self, peer: str) -> None:
        """Queue a command to disconnect a peer. The connection is closed when no read uses it any more.

        Orders for this peer that are submitted after this call fail.
        """
        self._queue.append(_Connect(peer, None))
        self._wake.set()

    def submit(self, order: ReadOrder) -> None:
        """Queue an order to read KV from a peer.

        The lane's thread executes it; `results` returns its result.
        """
        self._queue.append(order)
        self._wake.set()

    def results(self) -> list[ReadResult]:
        """Return and remove the results of all read orders that have ended since the last call."""
        taken = []
        while self._results:
            taken.append(self._results.popleft())
        return taken

    def stop(self) -> None:
        """Tell the lane's thread to end after the reads in progress. `join` waits until it has ended."""
        self._stop = True
        self._wake.set()

    def join(self, patience_seconds: float) -> bool:
        """Wait at most `patience_seconds` for the lane's thread to end; return whether it has ended."""
        self._thread.join(patience_seconds)
        return not self._thread.is_alive()

    # -- the thread ---------------------------------------------------------------------------------------

    def _run(self, name: str, make_agent: MakeAgent) -> None:
        try:
            enter_stream(self._geometry.regions[0])
            agent = make_agent(name, progress=False)
            images = [self._images.region] if self._images.units else []
            agent.register([*self._geometry.regions, *images, self._landing_region])
        except BaseException as error:  # noqa: BLE001 - `wait_ready` raises it
            self._fault = error
            return
        finally:
            self._ready.set()
        self._context: zmq.Context[Any] = zmq.Context()
        self._links = PeerConnections(
            partial(self._make_peer, agent),
            lambda cards: self._validator.validate(cards, self._wake.set),
            lambda: [
                *(read.peer for read in self._reads),
                *(peer for peer in self._measuring if peer.measuring),
            ],
            self._clock,
        )
        self._resources = PackedReadResources(
            agent,
            self._images,
            self._landing,
            list(range(len(self._landing) - MAX_SEGMENTS, len(self._landing))),
        )
        nap = _SHORTEST_NAP
        while not (self._stop and not self._reads and not self._times_reads):
            busy = self._execute_queued(agent)
            busy |= self._progress(agent, self._reads)
            if busy:
                nap = _SHORTEST_NAP
            elif self._reads or self._measuring:
                self._pause(nap)
                nap = min(nap * 2, _LONGEST_NAP)
            else:
                self._wake.wait()
                self._wake.clear()
        self._shut(agent)

    def _execute_queued(self, agent: Agent) -> bool:
        """Execute the queued commands and read orders, oldest first. Return whether there was anything to do.

        While the maximum number of reads is in progress, read orders stay in the queue.
        """
        busy = self._links.process_verdicts() | self._measure()
        if busy:
            self._queue.extendleft(reversed(self._held))
            self._held.clear()
        while self._queue and (self._free_landings or isinstance(self._queue[0], _Connect)):
            busy = True
            command = self._queue.popleft()
            if isinstance(command, ReadOrder):
                read = self._start(agent, command)
                # Posting may have completed the READ. Then read the lease words at once, too.
                if read is not None and self._progress(agent, [read]) and read.words:
                    self._progress(agent, [read])
            elif command.cards is not None:
                self._links.connect(command.peer, command.cards)
            else:
                self._links.disconnect(command.peer)
        self._links.close_unused()
        return busy

    @property
    def _times_reads(self) -> bool:
        """True while a READ is in flight by which the speed of a new peer is measured."""
        return any(peer.measuring for peer in self._measuring)

    def _measure(self) -> bool:
        """Go on measuring the speed of READs from new peers; return whether waiting orders may go on."""
        for peer in self._measuring:
            peer.measure()
            if peer.speed_pending:
                break  # as in `ConnectedPeer.measure`
        self._measuring = [peer for peer in self._measuring if not peer.measured]
        before, self._pending = self._pending, sum(peer.speed_pending for peer in self._measuring)
        return self._pending < before

    def _make_peer(self, agent: Agent, cards: tuple[RankCard, ...]) -> ConnectedPeer:
        peer = ConnectedPeer(
            agent=agent,
            own_geometry=self._geometry,
            cards=cards,
            words=self._landing_region,
            landing=self._images,
            context=self._context,
            settings=self._settings,
            clock=self._clock,
        )
        self._measuring.append(peer)
        return peer

    def _start(self, agent: Agent, order: ReadOrder) -> _Read | None:
        """Plan an order, start to read its KV, and return the read.

        If the peer's transport metadata is still being validated, or the speed of READs from it is being
        measured, keep the order until that is done, and return None. If the peer is not connected, or the
        order cannot be planned, queue a `ReadResult` with the failure, and return None.

        Args:
            agent: NIXL agent of this lane (reading thread).
            order: order to execute.
        """
        peer = self._links.get(order.peer)
        if isinstance(peer, str):
            self._deliver(ReadResult(order.key, peer, None, 0.0, 0.0, peer_lost=True))
            return None
        if peer is None or peer.speed_pending:
            self._held.append(order)
            return None
        try:
            plan = peer.plan(order)
        except Exception as error:  # noqa: BLE001 - only this order fails
            log_unexpected(error)
            self._deliver(ReadResult(order.key, str(error), None, 0.0, 0.0))
            return None
        try:
            plan.clear()
        except Exception as error:
            logger.exception("lane: blocks cannot be cleared")
            self._deliver(ReadResult(order.key, f"blocks cannot be cleared: {error}", None, 0.0, 0.0))
            return None
        read = _Read(order, peer, self._free_landings.pop(), plan, started=time.perf_counter())
        self._reads.append(read)
        for rank in plan.ranks:
            lists = rank.source.lists
            read.packed += [
                PackedRead(
                    self._resources,
                    lists,
                    rank.source.client,
                    route=part.route,
                    method=part.method,
                    cells=part.cells,
                    lease=order.lease,
                    clock=self._clock,
                )
                for part in rank.packed
            ]
            if rank.direct is not None:
                self._post(
                    agent,
                    read,
                    local=lists.local,
                    here=rank.direct.dst,
                    remote=lists.remote,
                    there=rank.direct.src,
                )
        return read

    def _post(self, agent: Agent, read: _Read, local: Any, here: Any, remote: Any, there: Any) -> None:
        if read.failure is not None:
            return
        try:
            handle = agent.read(local, here, remote, there)
            read.handles.append(handle)
            agent.post(handle)
        except Exception as error:  # noqa: BLE001 - the transport's own exceptions
            read.failure, read.peer_lost = f"the transport refused the read: {error}", True

    def _pause(self, nap: float) -> None:
        """Sleep for `nap` seconds.

        Wake up early if a peer that was asked to pack cells (parts of blocks) replies.
        """
        clients = [
            rank.source.client.socket
            for read in self._reads
            if any(packed.waits_for_source for packed in read.packed)
            for rank in read.plan.ranks
            if rank.source.client is not None and rank.source.client.waiting
        ]
        if clients:
            # If no READ is in flight, only a reply matters. Polling more often would take CPU time from the
            # source, if it gathers on the same machine.
            in_flight = any(read.handles or any(p.in_flight for p in read.packed) for read in self._reads)
            zmq.select(clients, [], [], nap if in_flight else _LONGEST_WAIT)
        else:
            time.sleep(nap)

    def _progress(self, agent: Agent, reads: Sequence[_Read]) -> bool:
        """Advance reads in progress by a step each; return whether any of them advanced.

        Args:
            agent: NIXL agent of this lane (reading thread).
            reads: reads to advance.
        """
        moved = False
        for read in list(reads):
            try:
                moved |= self._advance(agent, read)
            except Exception as error:  # noqa: BLE001 - only this read fails; its READs in flight are awaited
                if read.failure is None:
                    log_unexpected(error)
                    read.failure = f"the lane failed: {error}"
        return moved

    def _advance(self, agent: Agent, read: _Read) -> bool:
        """Take the next step of a read if that is possible now; return whether a step was taken.

        When all KV has arrived, start to read the lease words (integers that show whether the KV is valid).
        When the words have arrived, check them and queue a `ReadResult`. If the read has failed, queue a
        `ReadResult` with the failure as soon as no READ (one-sided read) is in flight.

        Args:
            agent: NIXL agent of this lane (reading thread).
            read: read in progress.
        """
        moved = False
        for packed in read.packed:
            if read.failure is not None:
                packed.abandon(read.failure)
            moved |= packed.advance()
            read.failure = read.failure or packed.failure
            read.peer_lost |= packed.peer_lost
        states = [agent.state(handle) for handle in read.handles]
        if ReadState.IN_FLIGHT in states or not all(packed.finished for packed in read.packed):
            return moved
        if ReadState.FAILED in states:
            read.failure, read.peer_lost = read.failure or "the transport failed while reading", True
        for handle in read.handles:
            agent.release(handle)
        read.handles.clear()
        read.packed.clear()
        if read.failure is None and not read.words:
            self._read_words(agent, read)
        else:
            self._end(read)
        return True

    def _read_words(self, agent: Agent, read: _Read) -> None:
        """Start to read the lease word of every rank that KV was read from. All KV must have arrived.

        A lease word is an integer in the rank's memory that changes before leased blocks are freed. So an
        unchanged word shows that the KV is valid.

        Args:
            agent: NIXL agent of this lane (reading thread).
            read: read whose KV has arrived.
        """
        read.words, read.data_done = True, time.perf_counter()
        there = np.array([read.order.lease.slot], np.int32)
        for number, rank in enumerate(read.plan.ranks):
            here = np.array([read.landing + number], np.int32)
            self._landing[here] = ~np.uint64(read.order.lease.word(rank.source.incarnation))
            self._post(
                agent,
                read,
                local=rank.source.lists.local_words,
                here=here,
                remote=rank.source.lists.remote_words,
                there=there,
            )

    def _end(self, read: _Read) -> None:
        now = time.perf_counter()
        if read.failure is None:
            self._links.mark_served(read.peer)
            self._check_words(read)
        elif read.peer_lost:
            self._links.mark_failed(read.peer, read.failure)
        self._reads.remove(read)
        self._free_landings.append(read.landing)
        done = read.data_done or now
        self._deliver(
            ReadResult(
                key=read.order.key,
                failure=read.failure,
                plan=read.plan,
                transfer_seconds=done - read.started,
                check_seconds=now - done,
                peer_lost=read.peer_lost,
            )
        )

    def _deliver(self, result: ReadResult) -> None:
        self._results.append(result)
        self._on_result()

    def _check_words(self, read: _Read) -> None:
        expected = [read.order.lease.word(rank.source.incarnation) for rank in read.plan.ranks]
        words = self._landing[read.landing : read.landing + len(expected)].tolist()
        if any(word >> 32 != one >> 32 for word, one in zip(words, expected, strict=True)):
            read.failure, read.peer_lost = "another run of the producer has the memory that was read", True
        elif words != expected:
            read.failure = "the producer gave the blocks back before they were read (lease word changed)"

    def _shut(self, agent: Agent) -> None:
        try:
            with ExitStack() as rest:
                rest.callback(self._context.destroy, linger=0)
                rest.callback(agent.close)
                for peer in self._links:
                    rest.callback(peer.close)
        except Exception:
            logger.exception("lane: while closing")
