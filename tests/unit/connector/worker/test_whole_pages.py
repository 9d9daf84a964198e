"""Chunks of pages whose content is not known: whole blocks, copied by an engine, read by another like it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvferry.connector.messages import Piece, StoreOrder
from kvferry.connector.mover import ChunkRoutes
from kvferry.geometry import Group, GroupKind, Layer, RankGeometry, Region
from kvferry.geometry.canonical import CanonicalForm, canonical_form_of
from kvferry.geometry.page import PageFormat, opaque_page
from kvferry.planning.chunk_cells import slice_table
from kvferry.planning.select import LoadSpan, needed_tokens
from kvferry.tiers.host.arena import Arena
from support.pages import kv_page

CHUNK, TOKENS = 64, 192
SIZES = ((GroupKind.MLA, 0, 32), (GroupKind.SLIDING, 24, 16), (GroupKind.SLIDING, 8, 4))
"""Kind, attention span and tokens per block of each group."""


class Rank:
    """A rank's cache with random content: of each group a layer of whole pages, of the first a known one."""

    def __init__(self, seed: int, rank: int, ranks: int, blocks: int, gap: int) -> None:
        self._blocks, self._tables = blocks, {}
        groups, at, first = [], 0, 1
        places: list[tuple[PageFormat, int]] = []
        for number, (kind, span, tokens) in enumerate(SIZES):
            # Two pieces apart from one another, as of a page with padding.
            pages = [opaque_page(f"riddle {number}", tokens, 24, rank, ranks, ((2, 40),))]
            if number == 0:
                pages.append(kv_page(tokens, heads=2 // ranks, start=rank * (2 // ranks), total=2))
            layers = []
            for page in pages:
                layers.append((f"layers.{number}.{len(layers)}", at, page.page_bytes + gap, page))
                places.append((page, at))
                at += blocks * (page.page_bytes + gap)
            groups.append((kind, span, tokens, layers))
            count = TOKENS // tokens
            self._tables[number] = list(range(first, first + count))
            first += count
        self.memory = np.random.default_rng(seed).integers(0, 256, at, np.uint8)
        base = self.memory.ctypes.data
        self.geometry = RankGeometry(
            rank, ranks, 0, 1, blocks,
            tuple(
                Group(kind, tokens, span, tuple(Layer(name, base + a, *rest) for name, a, *rest in of))
                for kind, span, tokens, of in groups
            ),
            (Region(base, at),),
        )  # fmt: skip
        self.geometry.check()

    def slices(self) -> tuple:
        return tuple(slice_table(ids, 0, TOKENS, SIZES[n][2]) for n, ids in self._tables.items())

    def tables(self) -> list[np.ndarray]:
        return [np.array(ids, np.int64) for ids in self._tables.values()]

    def place(self, group: int, layer: int, position: int) -> slice:
        """Where in the memory a page is, by position of its block in the prompt."""
        found = self.geometry.groups[group].layers[layer]
        start = found.address - self.memory.ctypes.data + self._tables[group][position] * found.block_stride
        return slice(start, start + found.page.page_bytes)

    def page(self, group: int, layer: int, position: int) -> np.ndarray:
        """The bytes of a page that hold something."""
        whole = self.memory[self.place(group, layer, position)]
        return np.concatenate((whole[:24], whole[40:64])) if layer == 0 else whole


def engine(seed: int, ranks: int, blocks: int, gap: int) -> list[Rank]:
    return [Rank(seed + rank, rank, ranks, blocks, gap) for rank in range(ranks)]


def form_of(ranks: list[Rank]) -> CanonicalForm:
    return canonical_form_of([rank.geometry for rank in ranks], CHUNK)


def routes_of(ranks: list[Rank], arena: Arena) -> list[ChunkRoutes]:
    geometries = [rank.geometry for rank in ranks]
    return [ChunkRoutes(form_of(ranks), geometries, (0, one.tp_rank), arena.memory) for one in geometries]


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create(1 << 20)
    yield made
    made.close()


def stored(writers: list[Rank], arena: Arena) -> tuple[Piece, ...]:
    """Every chunk of a prompt, copied to the arena."""
    pieces, at = [], 4096
    for number, group in enumerate(form_of(writers).groups):
        for chunk in range(TOKENS // CHUNK):
            pieces.append(Piece(number, chunk, at))
            at += group.chunk_bytes
    for rank, routes in zip(writers, routes_of(writers, arena), strict=True):
        routes.store(StoreOrder("s", tuple(pieces), rank.slices(), range(TOKENS)))
    return tuple(pieces)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("span", [LoadSpan(0, 192, 193), LoadSpan(64, 128, 400), LoadSpan(0, 150, 151)])
def test_whole_blocks_come_back_and_nothing_else_changes(arena: Arena, ranks: int, span: LoadSpan) -> None:
    writers, readers = engine(1, ranks, 90, 8), engine(50, ranks, 110, 0)
    assert form_of(writers) == form_of(readers), "where pages lie is not part of what they hold"
    pieces = stored(writers, arena)
    before = [rank.memory.copy() for rank in readers]
    last = -(-span.ends // CHUNK)
    for rank, routes in zip(readers, routes_of(readers, arena), strict=True):
        wanted = []
        for number, group in enumerate(form_of(readers).groups):
            low, high = needed_tokens(group, span)
            chunks = range(low // CHUNK, last) if low < high else ()
            wanted += [piece for piece in pieces if piece.group == number and piece.number in chunks]
        routes.load(wanted, span, rank.tables(), first=True)
    for there, here, old in zip(writers, readers, before, strict=True):
        changed = here.memory != old
        for number, (_, _, tokens) in enumerate(SIZES):
            group = here.geometry.groups[number]
            low, high = needed_tokens(group, span)
            for layer in range(len(group.layers)):
                for position in range(low // tokens, -(-high // tokens)):
                    at = number, layer, position
                    assert np.array_equal(here.page(*at), there.page(*at)), at
                    changed[here.place(*at)] = False
        assert not changed.any(), "bytes outside of the needed blocks were written"


def test_a_spoiled_chunk_shows_in_the_blocks(arena: Arena) -> None:
    writers, readers = engine(1, 1, 90, 8), engine(50, 1, 110, 0)
    pieces = stored(writers, arena)
    arena.memory[pieces[0].offset] ^= 1
    span = LoadSpan(0, 64, 65)
    (rank,), (routes,) = readers, routes_of(readers, arena)
    routes.load([piece for piece in pieces if piece.number == 0], span, rank.tables(), first=True)
    same = [np.array_equal(rank.page(0, layer, 0), writers[0].page(0, layer, 0)) for layer in range(2)]
    assert sorted(same) == [False, True]


def test_engines_of_other_blocks_or_ranks_have_other_chunks() -> None:
    one, two = form_of(engine(1, 1, 90, 0)), form_of(engine(1, 2, 90, 0))
    assert one.content != two.content
    assert [section.element_tokens for group in one.groups for section in group.sections] == [32, 1, 16, 4]
