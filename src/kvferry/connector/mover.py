"""A rank's thread that copies chunks between its KV blocks and the arena.

The engine's hooks pass orders to the thread and collect its results without waiting.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, count, groupby, islice
from operator import attrgetter
from typing import NamedTuple, TypeAlias

import numpy.typing as npt
from numpy import uint8

from kvferry.common.errors import KVFerryError, TransferError
from kvferry.common.threads import Thread
from kvferry.connector.messages import ArenaCard, Load, LoadOrder, MachineRanks, Piece, StoreOrder
from kvferry.geometry import RankGeometry
from kvferry.geometry.canonical import CanonicalForm
from kvferry.memory.address_space import AddressSpace
from kvferry.memory.copies import ChunkCopies, offsets_of
from kvferry.memory.device_copy import HostRegistration
from kvferry.memory.device_stream import DeviceEvent, enter_stream, wait_event
from kvferry.planning.chunk_cells import cells_to_blank, cells_to_load, cells_to_store, chunk_pools
from kvferry.planning.descriptors import Int64s
from kvferry.planning.select import LoadSpan, unfilled_cells
from kvferry.planning.strategy import COPY_ENGINE_BYTES
from kvferry.planning.template import Route, build_templates
from kvferry.tiers.host.arena import Arena
from kvferry.tiers.shares.arena import FarArena, ReachableArena
from kvferry.transport.addresses import PortRange
from kvferry.transport.read_plan import LoadFigures, Report

logger = logging.getLogger(__name__)

_FIRST, _LOAD, _STORE, _LAST = range(4)
"""Priorities of the thread's jobs, the most urgent first: attach the arena, load, store, end the thread."""

_FORWARD_POLL_SECONDS = 5e-4
"""Seconds between checks whether a store's forward is over, while there is nothing else to copy."""

_Job: TypeAlias = Callable[[], bool | None]
"""A job of the thread. It returns True if it could not begin yet, and must be called again."""


class _RouteCopier(NamedTuple):
    route: Route
    copies: ChunkCopies


class ChunkRoutes:
    """Copies chunks between one rank's KV blocks and the arena, for one thread.

    Every method returns only when its copies are complete.
    """

    def __init__(
        self,
        canonical: CanonicalForm,
        ranks: Sequence[RankGeometry],
        rank_coordinates: tuple[int, int],
        memory: npt.NDArray[uint8],
        *,
        engine_bytes: int = COPY_ENGINE_BYTES,
    ) -> None:
        """Prepare the copies between this rank's KV blocks and the arena.

        Args:
            canonical: form of the share of chunks that is in the arena.
            ranks: all ranks on this machine.
            rank_coordinates: (pp_rank, tp_rank) of the rank in this process; it must be in `ranks`.
            memory: the arena, uint8 of shape (bytes,). If the blocks are on a GPU, it must be registered with
                CUDA.
            engine_bytes: run length in bytes from which the GPU's copy engine copies instead of a kernel.

        Raises:
            Incompatible: some layers cannot be stored in the format or loaded from it.
            TransferError: the layout describes bytes outside this rank's registered memory.
        """
        self._canonical, self._memory = canonical, memory
        number = [(rank.pp_rank, rank.tp_rank) for rank in ranks].index(rank_coordinates)
        self._rank = ranks[number]
        space, pools = AddressSpace(self._rank.regions), chunk_pools(canonical)
        # Copies of each group, out of the blocks and into them.
        self._out: list[list[_RouteCopier]] = []
        self._in: list[list[_RouteCopier]] = []
        for pool, template in zip(pools, build_templates(pools, self._rank), strict=True):
            for side, routes, copiers in (
                ("src", build_templates(ranks, pool)[number].routes, self._out),
                ("dst", template.routes, self._in),
            ):
                copies = [ChunkCopies(route, side, space, memory, engine_bytes) for route in routes]
                copiers.append(list(map(_RouteCopier, routes, copies)))

    def store(self, order: StoreOrder, computed: DeviceEvent | None = None) -> tuple[int, ...]:
        """Copy this rank's part of each chunk to the arena. Return the bytes copied, per KV cache group.

        `computed` is the GPU's event after which the blocks hold their KV; None if they hold it already.

        Raises:
            TransferError: the order names blocks that do not hold the tokens.
        """
        found, tokens = [0] * len(self._canonical.groups), self._canonical.chunk_tokens
        wait_event(self._rank.regions[0], computed)
        with self._awaited(self._out):
            for group, numbers, offsets, pieces in _by_group(order.pieces):
                for route, copies in self._out[group]:
                    blocks = order.tables[route.src_group]
                    if blocks is None:
                        raise TransferError(
                            f"a store of group {route.src_group} has no block table of it; expected one"
                        )
                    for cells in cells_to_store(route, tokens, numbers, order.available, blocks):
                        copies.store(cells, offsets)
                        found[group] += len(cells) * route.cell_bytes
                    # Only the first and the last chunk can begin or end outside the available tokens. Slots
                    # are reused, so the rest would hold bytes of another chunk.
                    for piece in {pieces[0], pieces[-1]}:
                        beside = cells_to_blank(route, tokens, piece.number, order.available)
                        copies.blank(beside, piece.offset)
        return tuple(found)

    def load(
        self, pieces: Sequence[Piece], span: LoadSpan, tables: Sequence[Int64s], *, first: bool
    ) -> tuple[int, ...]:
        """Copy this rank's part of each chunk to its blocks. Return the bytes copied, per KV cache group.

        Args:
            pieces: as `LoadOrder.pieces`.
            span, tables: of the whole load.
            first: True for the first part of the load: blocks that the load fills only partly are zeroed
                before.

        Raises:
            TransferError: the tables name blocks that cannot hold the tokens.
        """
        found, tokens = [0] * len(self._canonical.groups), self._canonical.chunk_tokens
        with self._awaited(self._in):
            if first:
                for route, copies in chain.from_iterable(self._in):
                    here, table = self._rank.groups[route.dst_group], tables[route.dst_group]
                    copies.clear(*unfilled_cells(route, here, span, table))
            for group, numbers, offsets, _ in _by_group(pieces):
                for route, copies in self._in[group]:
                    here, table = self._rank.groups[route.dst_group], tables[route.dst_group]
                    for cells in cells_to_load(route, tokens, here, span, numbers, table):
                        copies.load(cells, offsets)
                        found[group] += len(cells) * route.cell_bytes
        return tuple(found)

    @contextmanager
    def _awaited(self, routes: Iterable[Sequence[_RouteCopier]]) -> Iterator[None]:
        """Wait at the end for all copies that were queued meanwhile, also if an error ends the block."""
        try:
            yield
        finally:
            # After an error, the engine may use the blocks and the arena for something else. All routes queue
            # on the thread's stream, so waiting on one is enough.
            for _, copies in islice(chain.from_iterable(routes), 1):
                copies.wait()


def _by_group(pieces: Sequence[Piece]) -> Iterator[tuple[int, list[int], Int64s, list[Piece]]]:
    """Yield (group, indices in the prompt, offsets in the arena, pieces) for each group of sorted pieces."""
    for group, each in groupby(pieces, attrgetter("group")):
        of_group, numbers, offsets = [], [], []
        for piece in each:
            of_group.append(piece)
            numbers.append(piece.number)
            offsets.append(piece.offset)
        yield group, numbers, offsets_of(offsets), of_group


class ChunkMover:
    """A thread that copies chunks between one rank's KV blocks and the arena."""

    def __init__(
        self,
        rank_coordinates: tuple[int, int],
        on_result: Callable[[], None] = lambda: None,
        *,
        engine_bytes: int = COPY_ENGINE_BYTES,
        host: str = "127.0.0.1",
        ports: PortRange | None = None,
    ) -> None:
        """Start the thread. It calls `on_result` after each copy.

        `host` and `ports` are the settings, for an arena that the scheduler's process reads from another
        machine.
        """
        self._rank_coordinates, self._on_result = rank_coordinates, on_result
        self._engine_bytes, self._host, self._ports = engine_bytes, host, ports
        self._jobs: queue.PriorityQueue[tuple[int, int, _Job | None]] = queue.PriorityQueue()
        self._numbers = count()
        self._reports: deque[tuple[str, Report]] = deque()
        self._routes: ChunkRoutes | None = None
        self._arena: Arena | None = None
        # The arena, if this rank has created it for its machine.
        self._reachable: ReachableArena | None = None
        self._arenas: deque[tuple[int, FarArena | str]] = deque()
        self._registration: HostRegistration | None = None
        self._unusable = "no arena yet"
        self._thread = Thread(self._run, "kvferry-chunks")
        self._thread.start()

    def attach(self, card: ArenaCard) -> None:
        """Queue the job of attaching the arena, before the first copy.

        If no rank has created the arena of this machine yet, the first of its ranks does, and the others wait
        for the next card.
        """
        self._put(_FIRST, partial(self._attach, card))

    def load(self, load: Load, order: LoadOrder) -> None:
        """Queue a copy of chunks of a load from host memory to KV blocks."""
        copy = partial(
            ChunkRoutes.load, pieces=order.pieces, span=load.span, tables=load.tables, first=order.first
        )
        # Loads are copied before stores, because requests wait for loads only.
        self._put(_LOAD, partial(self._copy, order.key, copy))

    def store(self, order: StoreOrder, computed: DeviceEvent | None) -> None:
        """Queue a copy of chunks from KV blocks to host memory, after the GPU's event `computed`, if any."""
        self._put(_STORE, partial(self._store, order, computed))

    def take_reports(self) -> list[tuple[str, Report]]:
        """Return the reports on the copies that have ended since the last call, each with its order's key."""
        found = []
        while self._reports:
            found.append(self._reports.popleft())
        return found

    def take_arenas(self) -> dict[int, FarArena | str]:
        """Return the arena that this rank has created since the last call, as `StepReports.arenas`."""
        found = {}
        while self._arenas:
            number, arena = self._arenas.popleft()
            found[number] = arena
        return found

    def finish(self) -> None:
        self._jobs.join()

    def close(self) -> None:
        """Carry out all queued orders, end the thread, and detach the arena."""
        self._put(_LAST, None)
        self._thread.join()
        self._routes = None
        if self._registration is not None:
            self._registration.close()
            self._registration = None
        if self._reachable is not None:
            self._reachable.close()
            self._reachable = None
        elif self._arena is not None:
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
        number, machine = next(
            (number, one)
            for number, one in enumerate(card.machines)
            if self._rank_coordinates in one.coordinates
        )
        creates = machine.arena is None and self._rank_coordinates == machine.coordinates[0]
        if self._routes is not None or not (machine.arena or creates):
            return
        try:
            if creates:
                self._reachable = ReachableArena(card.arena_bytes, self._host, self._ports)
            self._attach_to(machine)
        except KVFerryError as error:
            self._unusable = str(error)
            logger.error("tiers: rank %s can neither store nor load: %s", self._rank_coordinates, error)  # noqa: TRY400 - said in full
        except Exception as error:  # torch's and Triton's own exceptions, on a GPU
            self._unusable = f"{type(error).__name__}: {error}"
            logger.exception("tiers: rank %s can neither store nor load", self._rank_coordinates)
        if creates:
            found: FarArena | str = self._unusable
            if self._reachable is not None and self._routes is not None:
                found = self._reachable.description
            self._arenas.append((number, found))
            self._on_result()

    def _attach_to(self, machine: MachineRanks) -> None:
        if self._reachable is not None:
            self._arena = self._reachable.arena
        else:
            assert machine.arena is not None
            self._arena = Arena.attach(machine.arena)
        rank = machine.ranks[machine.coordinates.index(self._rank_coordinates)]
        enter_stream(rank.regions[0])
        if rank.regions[0].memory == "VRAM":
            self._registration = HostRegistration(self._arena.region)
        self._routes = ChunkRoutes(
            machine.share,
            machine.ranks,
            self._rank_coordinates,
            self._arena.memory,
            engine_bytes=self._engine_bytes,
        )

    def _store(self, order: StoreOrder, computed: DeviceEvent | None) -> bool:
        # Loads that are ordered while the forward still runs must not wait behind this store.
        if _still_runs(computed):
            time.sleep(_FORWARD_POLL_SECONDS)
            return True
        self._copy(order.key, partial(ChunkRoutes.store, order=order, computed=computed))
        return False

    def _copy(self, key: str, what: Callable[[ChunkRoutes], tuple[int, ...]]) -> None:
        """Copy the chunks of the order `key`, and record a report.

        `what` makes the copies, and returns the number of bytes per KV cache group.
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
    """Return whether a forward still runs, from the event behind it; None if it is over."""
    try:
        return computed is not None and not computed.query()
    except Exception:
        # The GPU has failed. The copy that follows fails too, and says why in its report.
        logger.exception("tiers: the event of a forward cannot be queried")
        return False
