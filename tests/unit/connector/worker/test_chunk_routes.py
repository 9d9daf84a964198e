"""Chunks copied by ranks of one engine, read by ranks of another, through one arena."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from types import SimpleNamespace

import numpy as np
import pytest

from kvferry.common.errors import TransferError
from kvferry.connector.messages import ArenaCard, LoadOrder, MachineRanks, Piece, StoreOrder
from kvferry.connector.mover import ChunkMover, ChunkRoutes
from kvferry.geometry import Group, GroupKind, RankGeometry
from kvferry.geometry.canonical import canonical_form_of
from kvferry.memory import address_space, device_copy as host_registration, device_stream, pool_cells
from kvferry.memory.address_space import tensor_over
from kvferry.memory.device_copy import copy_cells_on_device
from kvferry.planning.chunk_cells import TableSlice, slice_table
from kvferry.planning.select import LoadSpan
from kvferry.tiers.host.arena import Arena
from kvferry.tools.measuring.owned import OwnedCache, allocate
from kvferry.tools.models.layout import EngineShape
from kvferry.tools.models.store import LayerCache, ModelCache, StoredField
from support.engines import EngineSpec, Family, GroupSpec, Interior, Stored, ranks
from support.loads import made_up_load
from support.oracle import expect, fill
from support.recorded_cuda import RecordedCuda
from support.waiting import wait_for
from transport.memory import place, scattered_tables

KV = tuple(StoredField(name, 2, 4, (("content", 8),)) for name in ("k", "v"))
STATE = StoredField("ssm", 4, 4, (("width", 6),)), StoredField("conv", 2, 0, (("width", 5),))
MODEL = ModelCache(
    "tiny",
    (
        LayerCache(GroupKind.FULL, 0, KV),
        LayerCache(GroupKind.SLIDING, 24, KV),
        LayerCache(GroupKind.STATE, 0, STATE),
        LayerCache(GroupKind.FULL, 0, KV),
    ),
)
CHUNK, TOKENS = 64, 192
WHOLE = range(TOKENS)


def memory_of(shape: EngineShape, seed: int) -> list[OwnedCache]:
    """The caches of all ranks, with random content."""
    caches = [allocate(MODEL, shape, rank, "cpu") for rank in range(shape.tp * len(shape.stages))]
    random = np.random.default_rng(seed)
    for cache in caches:
        memory = cache.buffer.numpy()
        memory[:] = random.integers(0, 256, len(memory), np.uint8)
    return caches


def ranks_of(caches: list[OwnedCache]) -> list[RankGeometry]:
    return [cache.geometry for cache in caches]


def groups_of(caches: list[OwnedCache]) -> tuple[Group, ...]:
    return caches[0].geometry.groups


def routes_of(caches: list[OwnedCache], arena: Arena) -> list[ChunkRoutes]:
    ranks = ranks_of(caches)
    canonical = canonical_form_of(ranks, CHUNK)
    return [ChunkRoutes(canonical, ranks, (rank.pp_rank, rank.tp_rank), arena.memory) for rank in ranks]


def tables_of(caches: list[OwnedCache], low: int, high: int):
    """Block tables of one prompt: blocks 1, 2, ... by position, another part of the pool for each group."""
    found, first = [], 1
    for group in groups_of(caches):
        if group.kind is GroupKind.STATE:
            found.append(slice_table([first], 0, 1, 1))
            first += 1
            continue
        blocks = -(-TOKENS // group.block_tokens)
        found.append(slice_table(list(range(first, first + blocks)), low, high, group.block_tokens))
        first += blocks
    return tuple(found)


def arrays(caches: list[OwnedCache]) -> list[np.ndarray]:
    return [part.table() for part in tables_of(caches, 0, TOKENS)]


def engines(writer: int, reader: int) -> tuple[list[OwnedCache], list[OwnedCache]]:
    shapes = {
        1: EngineShape(1, (4,), 32, "LBHNC", 40),
        2: EngineShape(2, (2, 2), 16, "LBNHC", 60),
        4: EngineShape(4, (4,), 128, "LBHNC", 20),
    }
    return memory_of(shapes[writer], 1), memory_of(shapes[reader], 2)


def pieces_of(engine: list[OwnedCache], numbers: range) -> tuple[Piece, ...]:
    """Every chunk of every group, side by side in the arena from its second page on; of a state the last."""
    found, at = [], 4096
    for number, group in enumerate(canonical_form_of(ranks_of(engine), CHUNK).groups):
        for chunk in numbers[-1:] if group.kind is GroupKind.STATE else numbers:
            found.append(Piece(number, chunk, at))
            at += group.chunk_bytes
    return tuple(found)


@pytest.fixture
def arena():
    made = Arena.create(1 << 20)
    yield made
    made.close()


@pytest.mark.parametrize(("writer", "reader"), [(1, 2), (2, 1), (4, 2), (1, 4)])
def test_chunks_stored_by_one_engine_are_loaded_and_stored_again_by_another(
    arena: Arena, writer: int, reader: int
) -> None:
    a, b = engines(writer, reader)
    numbers = range(TOKENS // CHUNK)
    pieces = pieces_of(a, numbers)
    stored = [
        routes.store(StoreOrder("s", pieces, tables_of(a, 0, TOKENS), WHOLE))
        for routes in routes_of(a, arena)
    ]
    content = sum(
        group.content_bytes * (1 if group.kind is GroupKind.STATE else len(numbers))
        for group in canonical_form_of(ranks_of(a), CHUNK).groups
    )
    assert sum(map(sum, stored)) == content
    written = arena.memory.copy()
    span = LoadSpan(0, TOKENS, TOKENS + 1)
    before = [cache.buffer.clone() for cache in b]
    for routes in routes_of(b, arena):
        routes.load(pieces, span, arrays(b), first=True)
    assert any((cache.buffer != old).any() for cache, old in zip(b, before, strict=True))
    arena.memory[4096:] = 0
    for routes in routes_of(b, arena):
        routes.store(
            StoreOrder("t", tuple(p for p in pieces if whole_in(b, p, span)), tables_of(b, 0, TOKENS), WHOLE)
        )
    for piece in pieces:
        if whole_in(b, piece, span):
            size = canonical_form_of(ranks_of(a), CHUNK).groups[piece.group].chunk_bytes
            at = slice(piece.offset, piece.offset + size)
            assert np.array_equal(arena.memory[at], written[at]), piece


def whole_in(engine: list[OwnedCache], piece: Piece, span: LoadSpan) -> bool:
    """A window's earlier chunks are not loaded, or only in part."""
    group = canonical_form_of(ranks_of(engine), CHUNK).groups[piece.group]
    return group.kind is not GroupKind.SLIDING


def test_a_load_in_parts_is_the_same_as_whole(arena: Arena) -> None:
    a, b = engines(1, 2)
    pieces = pieces_of(a, range(3))
    for routes in routes_of(a, arena):
        routes.store(StoreOrder("s", pieces, tables_of(a, 0, TOKENS), WHOLE))
    span = LoadSpan(64, 192, 400)
    needed = tuple(p for p in pieces if p.number >= (2 if p.group == sliding(a) else 1))
    whole = loaded(b, arena, [needed], span)
    c = memory_of(EngineShape(2, (2, 2), 16, "LBNHC", 60), 2)
    parts = loaded(c, arena, [needed[:1], needed[1:3], needed[3:]], span)
    assert all(np.array_equal(x, y) for x, y in zip(whole, parts, strict=True))


def sliding(engine: list[OwnedCache]) -> int:
    groups = canonical_form_of(ranks_of(engine), CHUNK).groups
    return next(n for n, group in enumerate(groups) if group.kind is GroupKind.SLIDING)


def loaded(engine: list[OwnedCache], arena: Arena, parts, span: LoadSpan) -> list[np.ndarray]:
    for routes in routes_of(engine, arena):
        for number, pieces in enumerate(parts):
            routes.load(pieces, span, arrays(engine), first=number == 0)
    return [cache.buffer.numpy().copy() for cache in engine]


def test_partly_loaded_blocks_are_zeroed_first(arena: Arena) -> None:
    a, b = engines(2, 4)  # blocks of 128 tokens: the second holds tokens 128 to 191, and nothing
    pieces = pieces_of(a, range(3))
    for routes in routes_of(a, arena):
        routes.store(StoreOrder("s", pieces, tables_of(a, 0, TOKENS), WHOLE))
    needed = tuple(p for p in pieces if p.group != sliding(a) or p.number == 2)
    loaded(b, arena, [needed], LoadSpan(0, 192, 400))
    full = next(n for n, group in enumerate(groups_of(b)) if group.kind is GroupKind.FULL)
    block = tables_of(b, 0, TOKENS)[full].ids[1]
    for cache in b:
        pages = cache.views()[groups_of(b)[full].layers[0].name][block]
        assert pages[:, :64].any()
        assert not pages[:, 64:].any()


@pytest.mark.parametrize("writer", [1, 2, 4])
def test_a_tail_holds_nothing_past_its_tokens(arena: Arena, writer: int) -> None:
    a, _ = engines(writer, 1)
    number = next(n for n, group in enumerate(groups_of(a)) if group.kind is GroupKind.FULL)
    group = canonical_form_of(ranks_of(a), CHUNK).groups[number]
    cell = min(groups_of(a)[number].block_tokens, CHUNK)
    arena.memory[4096 : 4096 + group.chunk_bytes] = 0xEE
    tail = TOKENS - CHUNK + 20
    for routes in routes_of(a, arena):
        routes.store(StoreOrder("s", (Piece(number, 2, 4096),), tables_of(a, 0, tail), range(tail)))
    found = arena.memory[4096 : 4096 + group.content_bytes].reshape(4, 2, CHUNK, -1)  # head, layer, token
    here = -(-20 // cell) * cell
    assert found[:, :, :here].any(axis=(0, 1, 3)).all()
    assert not found[:, :, here:].any()


@pytest.mark.parametrize("writer", [1, 2])
def test_a_chunk_without_its_beginning_holds_nothing_there(arena: Arena, writer: int) -> None:
    a, _ = engines(writer, 1)
    number = sliding(a)
    part = next(n for n, group in enumerate(groups_of(a)) if group.kind is GroupKind.SLIDING)
    size = groups_of(a)[part].block_tokens
    tables = list(tables_of(a, 0, TOKENS))
    since = TOKENS - size
    tables[part] = slice_table(
        [0] * (since // size) + list(tables[part].ids[since // size :]), 0, TOKENS, size
    )
    arena.memory[4096:] = 0xEE
    for routes in routes_of(a, arena):
        routes.store(StoreOrder("s", (Piece(number, 2, 4096),), tuple(tables), range(since, TOKENS)))
    group = canonical_form_of(ranks_of(a), CHUNK).groups[number]
    found = arena.memory[4096 : 4096 + group.content_bytes].reshape(4, 1, CHUNK, -1)  # head, layer, token
    assert found[:, :, -size:].any(axis=(0, 1, 3)).all()
    assert not found[:, :, :-size].any()


def test_a_chunk_with_a_null_block_is_not_stored(arena: Arena) -> None:
    a, _ = engines(1, 2)
    tables = list(tables_of(a, 0, TOKENS))
    full = next(n for n, group in enumerate(groups_of(a)) if group.kind is GroupKind.FULL)
    tables[full] = slice_table([0, 0, *tables[full].ids[2:]], 0, TOKENS, 32)
    (routes,) = routes_of(a, arena)
    with pytest.raises(TransferError, match="null block"):
        routes.store(StoreOrder("s", pieces_of(a, range(3)), tuple(tables), WHOLE))


def card_of(ranks: Sequence[RankGeometry], arena: Arena) -> ArenaCard:
    machine = MachineRanks(tuple(ranks), canonical_form_of(ranks, CHUNK), arena.handle)
    return ArenaCard((machine,), arena.region.length)


def test_a_mover_does_loads_first_and_says_what_it_did(arena: Arena) -> None:
    a, _ = engines(1, 2)
    pieces, tables = pieces_of(a, range(3)), tables_of(a, 0, TOKENS)
    mover = ChunkMover((0, 0))
    waited = []
    forward = SimpleNamespace(query=lambda: True, synchronize=lambda: waited.append(1))
    mover.store(StoreOrder("early", pieces, tables, WHOLE), forward)
    mover.attach(card_of(ranks_of(a), arena))
    mover.store(StoreOrder("s", pieces, tables, WHOLE), forward)
    load = made_up_load("l", LoadSpan(0, TOKENS, 400), [tables[0].ids])
    mover.load(load, LoadOrder("p", pieces, first=True))
    mover.close()
    moved = dict(mover.take_reports())
    assert set(moved) == {"early", "s", "p"}
    assert moved["s"].failure is None
    assert sum(moved["s"].figures.bytes_by_group) > 0
    assert moved["p"].failure is not None, "tables for one group of three"
    assert len(waited) == 2


def test_a_mover_on_a_gpu_copies_after_the_forward_and_reports_after_its_copies(arena, monkeypatch) -> None:
    cuda = RecordedCuda()
    for module in (device_stream, host_registration):
        monkeypatch.setattr(module, "torch", SimpleNamespace(cuda=cuda))
    # Memory of the CPU stands for the GPU's, and torch copies it.
    monkeypatch.setattr(
        address_space, "tensor_over", lambda region, over=tensor_over: over(replace(region, memory="DRAM"))
    )
    monkeypatch.setattr(
        pool_cells,
        "finish_stream",
        lambda device: device_stream.finish_stream(SimpleNamespace(type="cuda", index=0)),
    )

    def copy(part, *arguments) -> None:
        cuda.calls.append("copy")
        copy_cells_on_device(part, *arguments)

    monkeypatch.setattr(pool_cells, "copy_cells_on_device", copy)
    a, _ = engines(1, 2)
    before = [cache.buffer.clone() for cache in a]
    ranks = tuple(
        replace(rank, regions=tuple(replace(one, memory="VRAM") for one in rank.regions))
        for rank in ranks_of(a)
    )
    pieces = pieces_of(a, range(3))
    mover = ChunkMover((0, 0), engine_bytes=4096)
    event = device_stream.record_event()
    mover.attach(card_of(ranks, arena))
    mover.store(StoreOrder("s", pieces, tables_of(a, 0, TOKENS), WHOLE), event)
    ((_, stored),) = wait_for(mover.take_reports)
    assert stored.failure is None
    for cache in a:
        cache.buffer.zero_()
    load = made_up_load("l", LoadSpan(0, TOKENS, 400), arrays(a))
    mover.load(load, LoadOrder("p", pieces, first=True))
    mover.close()
    assert [report.failure for _, report in mover.take_reports()] == [None]
    calls = [call for call, _ in groupby(cuda.calls)]
    size = arena.handle.size
    assert calls[0] == "record event 1"
    assert calls[1:3] == ["set_device 0", "set_stream 1 of 0"]
    assert calls[3].startswith("cudaHostRegister ")
    assert calls[3].endswith(f" {size} 3")
    assert calls[4:8] == [
        "stream 1 of 0 waits for event 1",
        "copy",
        "record event 2 on stream 1 of 0",
        "synchronize event 2",
    ]
    assert calls[8:11] == ["copy", "record event 3 on stream 1 of 0", "synchronize event 3"]
    assert calls[11].startswith("cudaHostUnregister ")
    tables = arrays(a)
    full = next(n for n, group in enumerate(groups_of(a)) if group.kind is GroupKind.FULL)
    for layer in groups_of(a)[full].layers:
        for block in tables[full].tolist():
            start = layer.address + block * layer.block_stride - ranks_of(a)[0].regions[0].address
            page = slice(start, start + layer.page.content_bytes)
            assert (a[0].buffer[page] == before[0][page]).all()


def test_a_load_does_not_wait_behind_a_store_whose_forward_still_runs(arena: Arena) -> None:
    a, _ = engines(1, 2)
    pieces, over = pieces_of(a, range(3)), []
    mover = ChunkMover((0, 0))
    mover.attach(card_of(ranks_of(a), arena))
    forward = SimpleNamespace(query=lambda: bool(over), synchronize=lambda: None)
    order = StoreOrder("s", pieces, tables_of(a, 0, TOKENS), WHOLE)
    for key in "st":
        mover.store(replace(order, key=key), forward)
    load = made_up_load("l", LoadSpan(0, TOKENS, 400), arrays(a))
    mover.load(load, LoadOrder("p", pieces, first=True))
    assert [(key, report.failure) for key, report in wait_for(mover.take_reports)] == [("p", None)]
    over.append(True)
    mover.close()
    assert [key for key, _ in mover.take_reports()] == ["s", "t"], "stores keep their order"


def test_a_gpu_that_fails_is_reported_and_the_thread_goes_on(arena: Arena, monkeypatch) -> None:
    a, _ = engines(1, 2)

    def fail(*_) -> bool:
        raise RuntimeError("CUDA error: unspecified launch failure")

    mover = ChunkMover((0, 0))
    order = StoreOrder("s", pieces_of(a, range(3)), tables_of(a, 0, TOKENS), WHOLE)
    card = card_of(ranks_of(a), arena)
    monkeypatch.setattr("kvferry.connector.mover.enter_stream", fail)
    mover.attach(card)
    mover.store(order, SimpleNamespace(query=fail, synchronize=fail))
    first = wait_for(mover.take_reports)
    monkeypatch.undo()
    mover.attach(card)
    mover.store(order, SimpleNamespace(query=fail, synchronize=fail))
    mover.store(order, None)
    mover.close()
    failures = [report.failure for _, report in (*first, *mover.take_reports())]
    assert failures == [*["RuntimeError: CUDA error: unspecified launch failure"] * 2, None]


def test_copies_that_were_queued_are_awaited_if_a_later_one_is_refused(arena: Arena, monkeypatch) -> None:
    a, _ = engines(1, 2)
    calls: list[str] = []
    copy = pool_cells.PoolCells.copy
    monkeypatch.setattr(
        pool_cells.PoolCells, "copy", lambda self, *given: (calls.append("copy"), copy(self, *given))
    )
    monkeypatch.setattr(pool_cells.PoolCells, "wait", lambda _: calls.append("wait"))
    (routes,) = routes_of(a, arena)
    tables = [*tables_of(a, 0, TOKENS)]
    tables[-1] = None
    with pytest.raises(TransferError, match="no block table"):
        routes.store(StoreOrder("s", pieces_of(a, range(3)), tuple(tables), WHOLE))
    assert (calls[0], calls[-1]) == ("copy", "wait")
    calls.clear()
    with pytest.raises(IndexError):
        routes.load(pieces_of(a, range(3)), LoadSpan(0, TOKENS, 400), arrays(a)[:1], first=False)
    assert (calls[0], calls[-1]) == ("copy", "wait")


LATENT = (Family(GroupKind.MLA, fields=(Stored("latent", 2, 0, (("content", 24),)),)),) * 2


def sharing(tp: int, block: int, *turns: int) -> EngineSpec:
    """An engine whose ranks share the tokens of a block: how many do, and the tokens of a turn."""
    group = GroupSpec(GroupKind.MLA, 0, (0, 1), block, turns=turns or (1, 1))
    return EngineSpec(tp, (2,), (group,), "LBNHC", Interior(), 40)


@pytest.mark.parametrize("turns", [(2, 1), (2, 16), (4, 8)])
def test_ranks_that_share_tokens_store_the_same_chunks_and_load_them(
    arena: Arena, turns: tuple[int, int]
) -> None:
    shared, alone = sharing(4, 16, *turns), sharing(1, 32)
    chunks = []
    for spec in (shared, alone):
        arena.memory[:] = 7
        pieces = pieces_over(ranks(spec, LATENT))
        tables = scattered_tables(spec, TOKENS, 1)
        placed = [place(rank, seed) for seed, rank in enumerate(ranks(spec, LATENT))]
        for rank, memory in placed:
            fill(rank, tables, memory)
        every = [rank for rank, _ in placed]
        for rank in every:
            routes = ChunkRoutes(canonical_form_of(every, CHUNK), every, (0, rank.tp_rank), arena.memory)
            routes.store(StoreOrder("s", pieces, (TableSlice(0, tuple(tables[0].tolist())),), WHOLE))
        chunks.append(arena.memory.copy())
    assert np.array_equal(*chunks)
    assert (chunks[0] != 7).sum() > 0.9 * TOKENS * 2 * 48, "chunks are stored"
    span = LoadSpan(0, TOKENS - 20, TOKENS)
    tables = scattered_tables(shared, TOKENS, 2)
    placed = [place(rank, seed) for seed, rank in enumerate(ranks(shared, LATENT))]
    every = [rank for rank, _ in placed]
    for rank, memory in placed:
        expected = expect(rank, ranks(alone, LATENT), [span], tables, memory.bytes.copy(), cleared=True)
        routes = ChunkRoutes(canonical_form_of(every, CHUNK), every, (0, rank.tp_rank), arena.memory)
        routes.load(pieces, span, tables, first=True)
        expected.check(memory.bytes)


def pieces_over(every: list[RankGeometry]) -> tuple[Piece, ...]:
    (group,) = canonical_form_of(every, CHUNK).groups
    return tuple(Piece(0, chunk, 4096 + chunk * group.chunk_bytes) for chunk in range(TOKENS // CHUNK))
