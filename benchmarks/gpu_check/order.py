"""Order after the forward: a store copies what the forward wrote, and a load is there for later kernels.

The forward is a CUDA graph that waits and then writes new content into the blocks. The store is ordered while
it runs, as an engine orders it. Without the event the store must copy the old content; otherwise the check
would prove nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from benchmarks.gpu_check.job import GpuCheckJob
from benchmarks.gpu_check.result import CheckResult, CheckState
from kvferry.common.errors import TransferError
from kvferry.connector.bids import Bid
from kvferry.connector.messages import ArenaCard, Load, LoadOrder, MachineRanks, Piece, StoreOrder
from kvferry.connector.mover import ChunkMover
from kvferry.geometry import GroupKind
from kvferry.geometry.canonical import canonical_form_of
from kvferry.memory.device_stream import DeviceEvent, record_event
from kvferry.planning.chunk_cells import slice_table
from kvferry.planning.select import LoadSpan
from kvferry.tiers.host.arena import Arena
from kvferry.tiers.names import TIERS
from kvferry.tools.measuring.owned import OwnedCache, allocate
from kvferry.tools.models.layout import EngineShape
from kvferry.tools.models.store import LayerCache, ModelCache, StoredField

_NAME = "order after the forward"
_TOKENS, _CHUNK, _BLOCK = 1024, 256, 16
_KV = tuple(StoredField(name, 2, 8, (("content", 64),)) for name in ("k", "v"))
_MODEL = ModelCache("order", tuple(LayerCache(GroupKind.FULL, 0, _KV) for _ in range(4)))
_SLEEP_CYCLES = 200_000_000
"""About 0.1 s on a GPU: much longer than the store takes to begin."""

_PATIENCE_SECONDS = 30.0

_Item = TypeVar("_Item")


def check_order(job: GpuCheckJob) -> CheckResult:
    """Store during a forward, load again, and compare every byte with that of a CPU.

    Args:
        job: device.

    Raises:
        TransferError: wrong bytes were stored or loaded, or the mover failed.
    """
    wanted = _stored(_Engine("cpu"), waits=True)
    engine = _Engine(job.torch_device)
    found = _stored(engine, waits=True)
    if not np.array_equal(found, wanted):
        raise TransferError("a store did not wait for the forward: it copied other bytes")
    if not job.on_gpu:
        return CheckResult(
            _NAME, CheckState.PASSED, "Stores and loads are right; a CPU has no order to keep."
        )
    overtaken = _stored(_Engine(job.torch_device), waits=False)
    if np.array_equal(overtaken, wanted):
        return CheckResult(
            _NAME,
            CheckState.FAILED,
            "A store without the event also copied the new content: nothing is proved.",
        )
    return CheckResult(
        _NAME,
        CheckState.PASSED,
        "A store ordered during a CUDA graph copied what the graph wrote. Without the event it copied old "
        "bytes. A kernel after a reported load read the loaded bytes.",
    )


@dataclass(slots=True)
class _Engine:
    """A rank with one prompt in blocks 1, 2, ...

    Attributes:
        device: torch device of its KV cache.
        cache: KV cache, filled with old content.
    """

    device: str
    cache: OwnedCache

    def __init__(self, device: str) -> None:
        self.device = device
        shape = EngineShape(1, (len(_MODEL.layers),), _BLOCK, "LBNHC", 2 + _TOKENS // _BLOCK)
        self.cache = allocate(_MODEL, shape, 0, device)
        self.cache.buffer.fill_(7)

    @property
    def content(self) -> torch.Tensor:
        """Content that the forward writes: the same bytes for every device."""
        draw = np.random.default_rng(11)
        return torch.from_numpy(draw.integers(0, 256, self.cache.buffer.nbytes, np.uint8))

    def forward(self) -> Callable[[], object]:
        """Return the forward: a CUDA graph that waits and then writes. On a CPU, a function that writes."""
        content = self.content.to(self.device)
        if self.device == "cpu":
            return lambda: self.cache.buffer.copy_(content)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.cuda._sleep(_SLEEP_CYCLES)  # noqa: SLF001 - torch has no public way to keep a GPU busy
            self.cache.buffer.copy_(content)
        self.cache.buffer.fill_(7)
        replay: Callable[[], object] = graph.replay
        return replay


def _stored(engine: _Engine, *, waits: bool) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Run a forward, store its chunks meanwhile, and return the arena's bytes. If it waited, load them again.

    Args:
        engine: rank whose KV is stored.
        waits: False to leave out the event, so that the copies overtake the forward.

    Raises:
        TransferError: the mover failed, or a load is wrong.
    """
    geometry = engine.cache.geometry
    canonical = canonical_form_of([geometry], _CHUNK)
    (group,) = canonical.groups
    chunks = _TOKENS // _CHUNK
    table = list(range(1, 1 + _TOKENS // _BLOCK))
    pieces = tuple(Piece(0, number, 4096 + number * group.chunk_bytes) for number in range(chunks))
    on_gpu = engine.device != "cpu"
    with torch.cuda.stream(torch.cuda.Stream()) if on_gpu else nullcontext():
        # Before the mover starts: while a graph is captured, no thread may register memory.
        forward = engine.forward()
        _settle(record_event())
        with (
            closing(Arena.create(8192 + chunks * group.chunk_bytes)) as arena,
            closing(ChunkMover((0, 0))) as mover,
        ):
            machine = MachineRanks((geometry,), canonical, arena.handle)
            mover.attach(ArenaCard((machine,), arena.region.length))
            order = StoreOrder("store", pieces, (slice_table(table, 0, _TOKENS, _BLOCK),), range(_TOKENS))
            # The first store compiles the kernel, which must not take as long as the forward.
            _store(mover, order, None)
            forward()
            event = record_event()
            _store(mover, order, event if waits else None)
            found = np.array(arena.memory)
            _settle(event)
            if waits:
                _check_load(engine, mover, pieces, table)
    return found


def _store(mover: ChunkMover, order: StoreOrder, event: DeviceEvent | None) -> None:
    mover.store(order, event)
    ((_, report),) = _wait(mover.take_reports)
    if report.failure:
        raise TransferError(f"a store failed: {report.failure}")


def _check_load(engine: _Engine, mover: ChunkMover, pieces: tuple[Piece, ...], table: list[int]) -> None:
    """Load the chunks into zeroed blocks, and compare what a kernel reads after the load is reported."""
    buffer = engine.cache.buffer
    buffer.zero_()
    _settle(record_event())
    load = Load(
        key="load",
        request_id="load",
        attempt="load",
        loads=1,
        bid=Bid(TIERS, ()),
        span=LoadSpan(0, _TOKENS, _TOKENS + 1),
        tables=(np.array(table, np.int64),),
        timeout_seconds=_PATIENCE_SECONDS,
        began=0.0,
    )
    mover.load(load, LoadOrder("part", pieces, first=True))
    ((_, report),) = _wait(mover.take_reports)
    if report.failure:
        raise TransferError(f"a load failed: {report.failure}")
    read = (buffer + 0).cpu()  # a kernel on the engine's stream
    pages = engine.cache.geometry.groups[0].layers
    for layer in pages:
        first = layer.address - engine.cache.geometry.regions[0].address + table[0] * layer.block_stride
        here = slice(first, first + layer.page.content_bytes)
        if not torch.equal(read[here], engine.content[here]):
            raise TransferError("a kernel after a reported load read other bytes than were stored")


def _wait(take: Callable[[], list[_Item]]) -> list[_Item]:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not (found := take()):
        if time.monotonic() > deadline:
            raise TransferError(f"the mover did not answer within {_PATIENCE_SECONDS:g} s")
        time.sleep(1e-4)
    return found


def _settle(event: DeviceEvent | None) -> None:
    if event is not None:
        event.synchronize()
