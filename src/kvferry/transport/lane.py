"""A lane: one thread with one NIXL agent that reads from peers.

The engine's thread submits orders, polls for results, and never waits for a lane. The lane's thread does the
work that takes time: starting a READ may take as long as the READ itself, planning a long prompt takes
milliseconds, and preparing a peer takes longer.

If the engine computes nothing, its thread may read a small order itself (`Lane.read_now`). That saves two
switches between threads, which take longer than the READ. One thread at a time has the *turn* to work for the
lane. The lane's thread has it from an order until nothing is left to do, so the other finds a lane at rest.

    ordered ─plan, post─▶ DATA ─all done─▶ [DIGESTS] ─compared─▶ WORDS ─equal─▶ ready
                 │          └─error─┐                              └─changed, or digests differ─┐
                 └──────────────────┴───────────────────────────────────────────────────────────┴─▶ failed

In state DATA the lane reads the KV: one READ per rank of the peer for all cells that go straight into blocks,
and images in segments (`segmented_read`). With `TransferSettings.verify`, all cells are read in segments, and
the lane compares the digest of each with the peer's when it has landed (`verification`). In state DIGESTS the
last ones are compared. In state WORDS the lane reads the lease words. An unchanged word proves that the KV is
valid, and that the peer's digests are of the leased blocks.

Every order has exactly one report. The lane delivers it when none of the order's READs is in flight. Until
then nothing else may use the destination blocks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import zmq

from kvferry.common.threads import Thread
from kvferry.geometry import RankGeometry
from kvferry.memory.device_stream import enter_stream
from kvferry.transport.agent import Agent, ReadState
from kvferry.transport.costs import TransferSettings
from kvferry.transport.lane_connections import (
    MAX_SOURCES,
    ConnectedPeer,
    LaneConnections,
    ReadPlan,
    log_unexpected,
)
from kvferry.transport.messages import RankCard
from kvferry.transport.metadata_validation import MetadataValidator
from kvferry.transport.read_plan import ReadOrder, Report
from kvferry.transport.staging import LaneResources, StagingArea

logger = logging.getLogger(__name__)

MAX_SEGMENTS = 4096  # maximum number of segments that the source packs and a lane reads at a time

# Shortest and longest time between polls while a READ is in flight, in seconds. Some transports make progress
# only when polled.
_SHORTEST_NAP, _LONGEST_NAP = 20e-6, 2e-4

# Maximum seconds between polls while the lane only waits for sources to gather.
_LONGEST_WAIT = 1e-3

_ALL_BITS = (1 << 64) - 1

# Creates a NIXL agent, with the arguments of `Agent`.
MakeAgent: TypeAlias = Callable[..., Agent]


class _Connect(NamedTuple):
    """A command to connect a peer, or to disconnect it if `cards` is None."""

    peer: str
    cards: tuple[RankCard, ...] | None


@dataclass(slots=True)
class _Read:
    """A read order that a lane has started and not ended. Times are in seconds of `time.perf_counter`."""

    order: ReadOrder
    peer: ConnectedPeer
    landing: int  # index in `LaneResources.words` of the first of `MAX_SOURCES` for lease words, one per rank
    plan: ReadPlan
    started: float
    handles: list[Any] = field(default_factory=list)  # READs in flight, not of images: of cells, then words
    failure: str | None = None
    peer_lost: bool = False  # the transport failed
    data_done: float = 0.0  # when all KV had arrived; 0 before
    words_asked: bool = False
    unverified: str | None = None  # why the KV is not the peer's, or could not be compared
    corrupt: bool = False


class Lane:
    """A thread that reads KV from peers into this worker's KV cache, with a NIXL agent of its own.

    The engine's thread calls the public methods, which return at once, except `join`.

    Attributes:
        ready: ends when the lane has created its NIXL agent and registered its memory. It raises ConfigError
            if NIXL is missing, cannot start on this machine, or has no UCX backend, and NIXL's own exception
            if the memory cannot be registered.
        results: (key, report) of orders. The lane appends them, and the engine's thread removes them.
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
        clock: Callable[[], float],
    ) -> None:
        """Start the thread. The arguments are those of `Transfers`. `clock` is for timeouts and pauses."""
        self.ready: Future[None] = Future()
        self.results: deque[tuple[str, Report]] = deque()
        self._on_result, self._validator = on_result, validator
        own_words = in_flight * MAX_SOURCES
        self._free_landings = list(range(0, own_words, MAX_SOURCES))
        self._queue: deque[ReadOrder | _Connect] = deque()
        self._held: deque[ReadOrder] = deque()
        self._reads: list[_Read] = []
        self._measuring: list[ConnectedPeer] = []
        self._pending = 0
        self._wake, self._turn = threading.Event(), threading.Lock()
        self._stop = False

        def start() -> LaneResources:
            enter_stream(geometry.regions[0])
            words = np.zeros(own_words + MAX_SEGMENTS, np.uint64)
            # Nobody reads from this agent, so it needs no progress thread, which would slow down its READs.
            agent = make_agent(name, progress=False)
            free_words = list(range(own_words, len(words)))
            lane = LaneResources(agent, geometry, landing, words, zmq.Context(), free_words, settings, clock)
            images = [landing.region] if landing.units else []
            agent.register([*geometry.regions, *images, lane.words_region])
            return lane

        self._thread = Thread(partial(self._run, start), f"kvferry-transfer {name}")
        self._thread.start()

    # -- the engine's thread ------------------------------------------------------------------------------

    def submit(self, order: ReadOrder) -> None:
        self._queue.append(order)
        self._wake.set()

    def read_now(self, order: ReadOrder) -> None:
        """Read an order in this call as far as possible without a wait; the lane's thread does the rest.

        If the lane is not at rest, only submit the order.
        """
        if not self._turn.acquire(blocking=False):
            self.submit(order)
            return
        try:
            if not (self._stop or self._queue or self._held or self._reads or self._measuring):
                self._start_read(order)
            else:
                self._queue.append(order)
        finally:
            self._turn.release()
        if self._queue or self._held or self._reads:
            self._wake.set()

    def connect(self, peer: str, cards: tuple[RankCard, ...] | None) -> None:
        """Connect a peer, or disconnect it without `cards`, between the orders submitted before and after."""
        self._queue.append(_Connect(peer, cards))
        self._wake.set()

    def stop(self) -> None:
        """Tell the lane's thread to end after the reads in progress."""
        self._stop = True
        self._wake.set()

    def join(self, patience_seconds: float) -> bool:
        self._thread.join(patience_seconds)
        return not self._thread.is_alive()

    # -- the thread ---------------------------------------------------------------------------------------

    def _run(self, start: Callable[[], LaneResources]) -> None:
        try:
            self._lane = start()
        except BaseException as error:  # noqa: BLE001 - `ready` raises it
            self.ready.set_exception(error)
            return
        self._links = LaneConnections(
            self._make_peer,
            self._validate,
            lambda: [
                *(read.peer for read in self._reads),
                *(peer for peer in self._measuring if peer.measuring),
            ],
            self._lane.clock,
        )
        self.ready.set_result(None)
        while not self._stop:
            with self._turn:
                self._work()
            self._wake.wait()
            self._wake.clear()
        with self._turn:
            self._work()
            self._shut()

    def _work(self) -> None:
        """Execute orders until nothing is left to do. After `stop`, only end the READs in flight."""
        nap = _SHORTEST_NAP
        # NIXL cannot cancel a READ, so the lane lives until none is in flight, also none that is timed.
        while True:
            if self._stop and not self._reads and not any(peer.measuring for peer in self._measuring):
                return
            busy = self._execute_queued()
            busy |= self._progress(self._reads)
            if busy:
                nap = _SHORTEST_NAP
            elif self._reads or self._measuring:
                self._pause(nap)
                nap = min(nap * 2, _LONGEST_NAP)
            else:
                return

    def _execute_queued(self) -> bool:
        """Execute queued commands, and orders while there are not too many reads. Return whether any was."""
        busy = self._links.process_verdicts() | self._measure()
        if busy:
            # Held orders came before the queued ones, and go back in front of them in their order.
            self._queue.extendleft(reversed(self._held))
            self._held.clear()
        while self._queue and (self._free_landings or isinstance(self._queue[0], _Connect)):
            busy = True
            command = self._queue.popleft()
            if isinstance(command, ReadOrder):
                self._start_read(command)
            elif command.cards is not None:
                self._links.connect(command.peer, command.cards)
            else:
                self._links.disconnect(command.peer)
        self._links.close_unused()
        return busy

    def _measure(self) -> bool:
        """Go on measuring the speed of READs from new peers; return whether waiting orders may go on."""
        if not self._measuring:
            return False
        for peer in self._measuring:
            peer.measure()
            if peer.speed_pending:
                break  # as in `ConnectedPeer.measure`
        self._measuring = [peer for peer in self._measuring if not peer.measured]
        before, self._pending = self._pending, sum(peer.speed_pending for peer in self._measuring)
        return self._pending < before

    def _validate(self, cards: tuple[RankCard, ...]) -> Future[str]:
        refusal = self._validator.validate(cards)
        refusal.add_done_callback(lambda _: self._wake.set())
        return refusal

    def _make_peer(self, cards: tuple[RankCard, ...]) -> ConnectedPeer:
        peer = ConnectedPeer(self._lane, cards)
        self._measuring.append(peer)
        return peer

    def _start_read(self, order: ReadOrder) -> None:
        read = self._start(order)
        # Posting may have completed the READ. Then read the lease words at once, too.
        if read is not None and self._progress([read]) and read.data_done:
            self._progress([read])

    def _start(self, order: ReadOrder) -> _Read | None:
        """Plan an order and start to read its KV. Return None if it is held or has failed already."""
        peer = self._links.get(order.peer)
        if isinstance(peer, str):
            self._deliver(order, Report(peer, peer_lost=True))
            return None
        if peer is None or (peer in self._measuring and peer.speed_pending):
            self._held.append(order)
            return None
        try:
            plan = peer.plan(order)
        except Exception as error:  # noqa: BLE001 - only this order fails
            log_unexpected(error)
            self._deliver(order, Report(str(error)))
            return None
        try:
            # The read does not fill these cells, and stale bytes may be NaN.
            for copies, blocks, cells in plan.clears:
                copies.clear(blocks, cells)
        except Exception as error:
            logger.exception("lane: blocks cannot be cleared")
            self._deliver(order, Report(f"blocks cannot be cleared: {error}"))
            return None
        read = _Read(order, peer, self._free_landings.pop(), plan, time.perf_counter())
        self._reads.append(read)
        for source, indices in plan.direct:
            self._post(read, local=source.local, here=indices.dst, remote=source.remote, there=indices.src)
        return read

    def _post(self, read: _Read, local: Any, here: Any, remote: Any, there: Any) -> None:
        if read.failure is not None:
            return
        try:
            handle = self._lane.agent.transfer("READ", local, here, remote, there)
            # Kept before it is posted: a READ that fails to start may still be in flight.
            read.handles.append(handle)
            self._lane.agent.post(handle)
        except Exception as error:  # noqa: BLE001 - the transport's own exceptions
            read.failure, read.peer_lost = f"the transport refused the read: {error}", True

    def _pause(self, nap: float) -> None:
        """Sleep for `nap` seconds, or if no READ is in flight until a peer replies."""
        segmented = [one for read in self._reads for one in read.plan.segmented]
        awaited = {one.awaited for one in segmented}
        awaited |= {one.awaited for read in self._reads for one in read.plan.verifications}
        sockets = [one for one in awaited if one is not None]
        in_flight = any(read.handles for read in self._reads) or any(one.in_flight for one in segmented)
        if sockets and not in_flight:
            # Polling more often would take CPU time from the source, if it gathers on the same machine.
            zmq.select(sockets, [], [], _LONGEST_WAIT)
        else:
            # ZeroMQ waits for whole milliseconds only, and would not wait at all.
            time.sleep(nap)

    def _progress(self, reads: Sequence[_Read]) -> bool:
        moved = False
        for read in list(reads):
            try:
                moved |= self._advance(read)
            except Exception as error:  # noqa: BLE001 - only this read fails; its READs in flight are awaited
                if read.failure is None:
                    log_unexpected(error)
                    read.failure = f"the lane failed: {error}"
        return moved

    def _advance(self, read: _Read) -> bool:
        """Take the next step of a read if that is possible now; return whether a step was taken."""
        agent, moved = self._lane.agent, False
        for one in read.plan.verifications if read.failure is None else ():
            moved |= one.ask_ahead()  # first, because posting a READ may take as long as the READ
        for part in list(read.plan.segmented):
            if read.failure is not None:
                part.abandon(read.failure)
            moved |= part.advance()
            read.failure = read.failure or part.failure
            read.peer_lost |= part.peer_lost
            if part.finished:
                read.plan.segmented.remove(part)
        states = list(map(agent.state, read.handles))
        landed = not read.plan.segmented and ReadState.IN_FLIGHT not in states
        if landed and ReadState.FAILED in states:
            read.failure, read.peer_lost = read.failure or "the transport failed while reading", True
        moved |= self._verify(read, landed=landed)
        if not landed:
            return moved
        for handle in read.handles:
            agent.release(handle)
        read.handles.clear()
        if read.plan.verifications:
            return moved
        if read.failure is None and not read.words_asked:
            read.words_asked = True
            self._read_words(read)
        else:
            self._end(read)
        return True

    def _verify(self, read: _Read, *, landed: bool) -> bool:
        """Go on verifying what has been read, and return whether there was any progress."""
        moved = False
        if landed and not read.data_done:
            read.data_done = time.perf_counter()
        for one in list(read.plan.verifications):
            if read.failure is not None:
                one.abandon(read.failure)
            else:
                moved |= one.advance()
            if one.finished:
                read.plan.verifications.remove(one)
                # The word tells more: if it has changed, the peer's blocks may hold other KV by now.
                read.unverified, read.corrupt = read.unverified or one.failure, read.corrupt or one.corrupt
        return moved

    def _read_words(self, read: _Read) -> None:
        """Start to read the lease word of every rank that KV was read from. All KV must have arrived."""
        # The word is read second: descriptors inside one READ are unordered, so a word read with the data
        # proves nothing.
        there = np.array([read.order.lease.slot], np.int32)
        for number, source in enumerate(read.plan.sources):
            at = read.landing + number
            # If nothing arrives here, the word of the read before must not pass for it.
            self._lane.words[at] = read.order.lease.word(source.card.incarnation) ^ _ALL_BITS
            here = np.array([at], np.int32)
            self._post(read, local=source.local_words, here=here, remote=source.remote_words, there=there)

    def _end(self, read: _Read) -> None:
        now, corrupt = time.perf_counter(), False
        if read.failure is None:
            self._links.mark_served(read.peer)
            self._check_words(read)
            if read.failure is None:
                read.failure, corrupt = read.unverified, read.corrupt
        elif read.peer_lost:
            self._links.mark_failed(read.peer, read.failure)
        self._reads.remove(read)
        self._free_landings.append(read.landing)
        done = read.data_done or now
        figures = read.plan.figures(transfer_seconds=done - read.started, check_seconds=now - done)
        self._deliver(read.order, Report(read.failure, figures, read.peer_lost, corrupt))

    def _deliver(self, order: ReadOrder, report: Report) -> None:
        self.results.append((order.key, report))
        self._on_result()

    def _check_words(self, read: _Read) -> None:
        for number, source in enumerate(read.plan.sources):
            expected, word = (
                read.order.lease.word(source.card.incarnation),
                int(self._lane.words[read.landing + number]),
            )
            if word >> 32 != expected >> 32:
                read.failure, read.peer_lost = (
                    "another run of the producer has the memory that was read",
                    True,
                )
                return
            if word != expected:
                read.failure = "the producer gave the blocks back before they were read (lease word changed)"

    def _shut(self) -> None:
        try:
            # Callbacks run in reverse: peers are removed from the agent before it ends.
            with ExitStack() as rest:
                rest.callback(self._lane.context.destroy, linger=0)
                rest.callback(self._lane.agent.close)
                for peer in self._links:
                    rest.callback(peer.close)
        except Exception:
            logger.exception("lane: while closing")
