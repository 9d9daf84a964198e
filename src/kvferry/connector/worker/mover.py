"""A rank's thread that copies chunks between its KV blocks and the arena.

The engine's hooks pass orders to the thread and collect its results without waiting.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import TypeAlias

from kvferry.connector.load import Load, LoadFigures
from kvferry.connector.messages import Report
from kvferry.connector.worker.chunk_routes import ChunkRoutes
from kvferry.connector.worker.orders import ArenaCard, LoadOrder, StoreOrder
from kvferry.errors import KVFerryError, TransferError
from kvferry.geometry.canonical import canonical_form_of
from kvferry.memory.device_stream import DeviceEvent, enter_stream
from kvferry.memory.host_registration import HostRegistration
from kvferry.planning.strategy import COPY_ENGINE_BYTES
from kvferry.tiers.host.arena import Arena

logger = logging.getLogger(__name__)

_FIRST, _LOAD, _STORE, _LAST = range(4)
"""Priorities of the thread's jobs, the most urgent first: attach the arena, load, store, end the thread."""

_FORWARD_POLL_SECONDS = 5e-4
"""Seconds between checks whether a store's forward is over, while there is nothing else to copy."""

_Job: TypeAlias = Callable[[], bool | None]
"""A job of the thread. It returns True if it could not begin yet, and must be called again."""


class ChunkMover:
    """A thread that copies chunks between one rank's KV blocks and the arena.

    Only the engine's thread calls the public methods.
    """

    def __init__(
        self,
        rank_coordinates: tuple[int, int],
        on_result: Callable[[], None] = lambda: None,
        *,
        engine_bytes: int = COPY_ENGINE_BYTES,
    ) -> None:
        """Start the thread.

        Args:
            rank_coordinates: (pp_rank, tp_rank) of this rank.
            on_result: called by the thread after each copy.
            engine_bytes: run length in bytes from which a GPU's copy engine copies instead of a kernel.
        """
        self._rank_coordinates, self._on_result = rank_coordinates, on_result
        self._engine_bytes = engine_bytes
        self._jobs: queue.PriorityQueue[tuple[int, int, _Job | None]] = queue.PriorityQueue()
        self._numbers = count()
        self._reports: deque[tuple[str, Report]] = deque()
        self._routes: ChunkRoutes | None = None
        self._arena: Arena | None = None
        self._registration: HostRegistration | None = None
        self._unusable = "no arena yet"
        self._thread = threading.Thread(target=self._run, name="kvferry-chunks", daemon=True)
        self._thread.start()

    def attach(self, card: ArenaCard) -> None:
        """Queue the job of attaching the arena, before the first copy."""
        self._put(_FIRST, partial(self._attach, card))

    def load(self, load: Load, order: LoadOrder) -> None:
        """Queue a copy of chunks of a load from host memory to KV blocks."""

        def copy(routes: ChunkRoutes) -> tuple[int, ...]:
            return routes.load(order.pieces, load.span, load.tables, first=order.first)

        # Loads are copied before stores, because requests wait for loads only.
        self._put(_LOAD, partial(self._copy, order.key, copy))

    def store(self, order: StoreOrder, computed: DeviceEvent | None) -> None:
        """Queue a copy of chunks from KV blocks to host memory.

        Args:
            order: chunks to copy.
            computed: event of the GPU after which the blocks hold what the step's forward pass wrote; None if
                they hold it already. The copy waits for it.
        """
        self._put(_STORE, partial(self._store, order, computed))

    def take_reports(self) -> list[tuple[str, Report]]:
        """Return the reports on the copies that have ended since the last call, each with its order's key."""
        found = []
        while self._reports:
            found.append(self._reports.popleft())
        return found

    def finish(self) -> None:
        """Wait until all queued orders are carried out."""
        self._jobs.join()

    def close(self) -> None:
        """Carry out all queued orders, end the thread, and detach the arena."""
        self._put(_LAST, None)
        self._thread.join()
        self._routes = None
        if self._registration is not None:
            self._registration.close()
            self._registration = None
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def _put(self, rank: int, job: _Job | None) -> None:
        self._jobs.put((rank, next(self._numbers), job))

    def _run(self) -> None:
        while (item := self._jobs.get())[2] is not None:
            if item[2]():
                # The job keeps its number, so stores stay in order.
                self._jobs.put(item)
            self._jobs.task_done()

    def _attach(self, card: ArenaCard) -> None:
        try:
            canonical = canonical_form_of(card.ranks, card.chunk_tokens)
            self._arena = Arena.attach(card.name)
            (rank,) = (one for one in card.ranks if (one.pp_rank, one.tp_rank) == self._rank_coordinates)
            enter_stream(rank.regions[0])
            if rank.regions[0].memory == "VRAM":
                self._registration = HostRegistration(self._arena.region)
            self._routes = ChunkRoutes(
                canonical,
                card.ranks,
                self._rank_coordinates,
                self._arena.memory,
                engine_bytes=self._engine_bytes,
            )
        except KVFerryError as error:
            self._unusable = str(error)
            logger.error("tiers: rank %s can neither store nor load: %s", self._rank_coordinates, error)  # noqa: TRY400 - said in full
        except Exception as error:  # torch's and Triton's own exceptions, on a GPU
            self._unusable = f"{type(error).__name__}: {error}"
            logger.exception("tiers: rank %s can neither store nor load", self._rank_coordinates)

    def _store(self, order: StoreOrder, computed: DeviceEvent | None) -> bool:
        # Loads that are ordered while the forward still runs must not wait behind this store.
        if _still_runs(computed):
            time.sleep(_FORWARD_POLL_SECONDS)
            return True
        self._copy(order.key, lambda routes: routes.store(order, computed))
        return False

    def _copy(self, key: str, what: Callable[[ChunkRoutes], tuple[int, ...]]) -> None:
        """Copy the chunks of an order and record a report.

        Args:
            key: unique name of the order.
            what: makes the copies and returns the number of bytes per KV cache group.
        """
        began = time.perf_counter()
        copied_bytes: tuple[int, ...] = ()
        failure = None
        try:
            if self._routes is None:
                raise TransferError(self._unusable)
            copied_bytes = what(self._routes)
        except KVFerryError as error:
            failure = str(error)
        except Exception as error:
            logger.exception("tiers: order %s", key)
            failure = f"{type(error).__name__}: {error}"
        seconds = time.perf_counter() - began
        figures = LoadFigures(bytes_by_group=copied_bytes, transfer_seconds=seconds)
        self._reports.append((key, Report(failure, figures=figures)))
        self._on_result()


def _still_runs(computed: DeviceEvent | None) -> bool:
    """Return whether a forward still runs.

    Args:
        computed: event behind the forward; None if it is over.
    """
    try:
        return computed is not None and not computed.query()
    except Exception:
        # The GPU has failed. The copy that follows fails too, and says why in its report.
        logger.exception("tiers: the event of a forward cannot be queried")
        return False
