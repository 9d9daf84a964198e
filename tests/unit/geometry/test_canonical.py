from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from kvferry.common.errors import GeometryError
from kvferry.geometry import Attention, Axis, Field, GroupKind, PageFormat, RankGeometry, opaque_page
from kvferry.geometry.canonical import CanonicalForm, canonical_form_of, chunk_pool
from kvferry.geometry.canonical.derive import whole_block_tokens
from kvferry.planning.select import LoadSpan, select_cells
from kvferry.planning.template import build_templates
from kvferry.tools.models.layout import EngineShape, GroupShape, lay_out
from kvferry.tools.models.store import LayerCache, ModelCache, StoredField
from support.oracle import Memory, copy, expand_cells, expect, fill
from support.pages import kv_page, rank_of, state_page

GQA = ModelCache(
    "gqa",
    (LayerCache(GroupKind.FULL, 0, tuple(StoredField(n, 2, 8, (("content", 64),)) for n in ("k", "v"))),) * 4,
)
MLA = ModelCache(
    "mla", (LayerCache(GroupKind.MLA, 0, (StoredField("latent", 2, 0, (("content", 576),)),)),) * 4
)
TABLE = np.arange(1, 5)
"""Blocks, or slots, 1 to 4."""


def engine(model: ModelCache, tp: int, tokens: int = 128, layout: str = "LBHNC") -> tuple[RankGeometry, ...]:
    return lay_out(model, EngineShape(tp, (len(model.layers),), tokens, layout, 5))


def only_pool(canonical: CanonicalForm) -> RankGeometry:
    assert len(canonical.groups) == 1
    return chunk_pool(canonical, 0, 1 << 50, 5)


def bytes_stored(ranks) -> list[int]:
    """Bytes of a chunk that every rank stores."""
    pool = only_pool(canonical_form_of(ranks, 128))
    return [sum(r.runs.total_bytes for r in t.routes) for t in build_templates(ranks, pool)]


# -- who stores what, who reads what


def test_gqa_stored_by_four_is_read_by_two_as_one_run():
    four, two = engine(GQA, 4), engine(GQA, 2, layout="BHLNC")
    canonical = canonical_form_of(four, 128)
    assert canonical == canonical_form_of(two, 128)
    (section,) = canonical.groups[0].sections
    assert (section.units, section.unit_bytes) == (8, 4 * 128 * 2 * 64 * 2)
    for rank in two:
        (template,) = build_templates([only_pool(canonical)], rank)
        (route,) = template.routes
        assert route.runs.length.tolist() == [4 * section.unit_bytes]


def test_a_head_of_a_layer_is_one_run_from_a_head_major_page():
    (template,) = build_templates(engine(GQA, 1), only_pool(canonical_form_of(engine(GQA, 1), 128)))
    assert set(template.routes[0].runs.length.tolist()) == {128 * 2 * 64 * 2}


def test_replicated_heads_are_stored_by_one_rank():
    latent = 4 * 128 * 576 * 2
    assert bytes_stored(engine(MLA, 4)) == [latent, 0, 0, 0]
    head = 4 * 128 * 2 * 64 * 2
    assert bytes_stored(engine(GQA, 16)) == [head, 0] * 8


def test_a_latent_is_one_unit():
    (group,) = canonical_form_of(engine(MLA, 4), 128).groups
    assert [(s.axis, s.units, s.unit_bytes) for s in group.sections] == [("", 1, 4 * 128 * 576 * 2)]


# -- recurrent state: heads and channels


def mamba2(ranges: list[tuple[int, int]], layers: int = 3) -> list[RankGeometry]:
    """Ranks that hold these of 16 heads of 4 · 8 floats and 32 channels of x each; a single b is on all."""
    found = []
    for rank, (start, stop) in enumerate(ranges):
        heads, channels = stop - start, 32 * (stop - start)
        row = (channels + 8) * 2
        width = Axis("width", ((3, row),))
        x = Field("conv.x", 2, 0, (Axis("channel", ((channels, 2),), 32 * start, 512), width))
        b = Field("conv.b", 2, channels * 2, (Axis("channel", ((8, 2),)), width))
        inner = Axis("channel", ((4, 32),)), Axis("state", ((8, 4),))
        ssm = Field("ssm", 4, 3 * row, (Axis("head", ((heads, 128),), start, 16), *inner))
        page = PageFormat("MAMBA2", 0, 3 * row + heads * 128, (x, b, ssm))
        tp = (rank, len(ranges))
        found.append(rank_of(*[page] * layers, kind=GroupKind.STATE, tp=tp, address=(1 + rank) << 40))
    return found


EVEN, QUARTERS, UNEVEN = (
    [(0, 16)],
    [(0, 4), (4, 8), (8, 12), (12, 16)],
    [(0, 3), (3, 10), (10, 16)],
)


@pytest.mark.parametrize("ranges", [EVEN, QUARTERS, UNEVEN])
def test_a_rank_reads_one_run_of_units_of_every_section_of_a_state(ranges: list[tuple[int, int]]):
    ranks = mamba2(ranges)
    canonical = canonical_form_of(ranks, 256)
    assert canonical == canonical_form_of(mamba2(EVEN), 256)
    (group,) = canonical.groups
    assert [(s.axis, s.total, s.units, s.unit_bytes) for s in group.sections] == [
        ("head", 16, 16, 3 * 128),
        ("channel", 8, 8, 3 * 3 * 2),
        ("channel", 512, 64, 3 * 8 * 3 * 2),
    ]
    pool = only_pool(canonical)
    for rank, (start, stop) in zip(ranks, ranges, strict=True):
        whole = [range(start, stop), range(8), range(4 * start, 4 * stop)]
        (template,) = build_templates([pool], rank)
        (route,) = template.routes
        read, expected = np.zeros((2, group.chunk_bytes), bool)
        for at, length in zip(route.runs.src - pool.regions[0].address, route.runs.length, strict=True):
            read[at : at + length] = True
        for section, first, units in zip(group.sections, group.starts, whole, strict=True):
            expected[first + units.start * section.unit_bytes : first + units.stop * section.unit_bytes] = (
                True
            )
        assert np.array_equal(read, expected)


@pytest.mark.parametrize("cuts", [[0, 100, 299, 512], [0, 7, 9, 512], [0, 512]])
def test_channels_may_be_cut_inside_a_unit(cuts: list[int]):
    def ranks(at: list[int], base: int) -> list[RankGeometry]:
        pages = [state_page(b - a, a, 512) for a, b in pairwise(at)]
        return [
            rank_of(page, page, kind=GroupKind.STATE, tp=(n, len(pages)), address=base + (n << 32))
            for n, page in enumerate(pages)
        ]

    writers, readers = ranks(cuts, 1 << 40), ranks([0, 256, 512], 1 << 44)
    canonical = canonical_form_of(writers, 1)
    assert canonical == canonical_form_of(readers, 1)
    hand_over(writers, only_pool(canonical), readers)


def hand_over(writers, pool, readers) -> None:
    """A snapshot through slot 4, every byte checked."""
    memories = [Memory.of(rank, n) for n, rank in enumerate(writers)]
    for rank, memory in zip(writers, memories, strict=True):
        fill(rank, [TABLE[:1]], memory)
    kept = Memory.of(pool, 100)
    carried(writers, memories, pool, kept, TABLE[:1], TABLE[3:])
    for rank in readers:
        memory = Memory.of(rank, 200)
        expected = expect(rank, [pool], [LoadSpan(0, 9, 9)], [TABLE[2:3]], memory.bytes.copy())
        carried([pool], [kept], rank, memory, TABLE[3:], TABLE[2:3])
        expected.check(memory.bytes)


def carried(srcs, memories, dst, memory, src_table, dst_table) -> None:
    writes = np.zeros(len(memory.bytes), np.int64)
    for template, source in zip(build_templates(srcs, dst), memories, strict=True):
        for route in template.routes:
            cells = select_cells(route, Attention(GroupKind.STATE), LoadSpan(0, 9, 9), src_table, dst_table)
            copy(expand_cells(route, cells), source, memory, writes)
    assert writes.max() == 1


# -- one value whatever the engine


def test_layers_are_in_the_order_of_their_numbers_whichever_rank_has_them():
    (rank,) = engine(ModelCache("deep", GQA.layers * 3), 1)
    (group,) = rank.groups
    backwards = replace(rank, groups=(replace(group, layers=group.layers[::-1]),))
    names = [name for name, _ in canonical_form_of([backwards], 16).groups[0].sections[0].layers()]
    assert names == [f"layers.{number}" for number in range(12)]


def test_layers_that_need_the_same_are_one_chunk_however_the_engine_groups_them():
    fields = GQA.layers[0].fields
    windows = ModelCache(
        "gemma", (*[LayerCache(GroupKind.SLIDING, 64, fields)] * 5, LayerCache(GroupKind.FULL, 0, fields))
    )
    groups = tuple(GroupShape((number,), 16) for number in range(6))
    apart = lay_out(windows, EngineShape(2, (6,), 16, "BLHNC", 5, groups=groups))
    together = lay_out(windows, EngineShape(1, (2, 4), 16, "LBHNC", 5))
    assert [len(ranks[0].groups) for ranks in (apart, together)] == [6, 2]
    canonical = canonical_form_of(apart, 32)
    assert canonical == canonical_form_of(together, 32)
    assert [group.label for group in canonical.groups] == ["full_attention", "sliding_window(64)"]
    assert [canonical.index(group.label) for group in apart[0].groups] == [1, 1, 1, 1, 1, 0]


def test_layers_of_different_heads_have_sections_of_their_own():
    ranks = [rank_of(kv_page(heads=2), kv_page(heads=4))]
    (group,) = canonical_form_of(ranks, 16).groups
    assert [(s.total, s.unit_bytes) for s in group.sections] == [(2, 256), (4, 256)]


@pytest.mark.parametrize(
    "other",
    [
        kv_page(item=4),
        kv_page(width=4),
        kv_page(heads=4),
        replace(kv_page(), fields=(replace(kv_page().fields[0], name="k"),)),
    ],
    ids=["element", "width", "heads", "name"],
)
def test_formats_with_another_meaning_have_another_content(other: PageFormat):
    assert (
        canonical_form_of([rank_of(kv_page())], 16).content != canonical_form_of([rank_of(other)], 16).content
    )


def test_content_stays_what_it_was():
    # Chunks on disk are found by it: if this changes, raise FORMAT.
    assert canonical_form_of([rank_of(kv_page())], 16).content[:16] == "feb5fd9ece5038f5"


# -- one value per block


def test_whole_pages_lie_in_a_section_of_blocks():
    canonical = canonical_form_of([rank_of(kv_page(), opaque_page("FLASH_SPARSE", 16, 64, 0, 1))], 32)
    (group,) = canonical.groups
    found = [(s.axis, s.total, s.element_tokens, s.elements, s.unit_bytes) for s in group.sections]
    assert found == [("shard", 1, 16, 2, 2 * 64), ("head", 2, 1, 32, 32 * 16)]
    assert canonical.opaque
    assert not canonical_form_of([rank_of(kv_page())], 32).opaque
    assert "section 'shard' 1 in 1 units, one value per 16 tokens" in canonical.describe()
    # Chunks on disk are found by it: if this changes, raise FORMAT.
    assert canonical.content[:16] == "a4e618e6726914e0"


def test_each_rank_stores_its_own_whole_pages_or_one_those_that_all_hold():
    apart = [rank_of(opaque_page("riddle", 128, 64, r, 2), tp=(r, 2)) for r in range(2)]
    assert bytes_stored(apart) == [64, 64]
    alike = [rank_of(opaque_page("riddle", 128, 64, 0, 1), tp=(r, 2)) for r in range(2)]
    assert sorted(bytes_stored(alike)) == [0, 64]
    assert canonical_form_of(alike, 128) == canonical_form_of(
        [rank_of(opaque_page("riddle", 128, 64, 0, 1))], 128
    )


@pytest.mark.parametrize(("tokens", "content"), [(32, "riddle"), (16, "other")], ids=["block", "content"])
def test_engines_with_other_whole_pages_have_other_chunks(tokens: int, content: str):
    forms = [
        canonical_form_of([rank_of(opaque_page(c, n, 64, 0, 1))], 32)
        for c, n in (("riddle", 16), (content, tokens))
    ]
    assert forms[0].content != forms[1].content


def test_a_value_per_block_beside_tokens_is_stored_with_its_block():
    kv = kv_page().fields[0]
    page = PageFormat("kv", 16, kv.extent()[1] + 8, (kv, Field("scale", 8, kv.extent()[1], ())))
    (group,) = canonical_form_of([rank_of(page)], 64).groups
    assert [(s.axis, s.element_tokens, s.unit_bytes) for s in group.sections] == [
        ("", 16, 32),
        ("head", 1, 1024),
    ]


def test_blocks_that_a_chunk_holds_whole():
    window = rank_of(kv_page(48), kind=GroupKind.SLIDING, attention_span=64)
    for expected, *ranks in (
        (1, rank_of(kv_page(48))),
        (1, rank_of(state_page(), kind=GroupKind.STATE)),
        (48, window),
        (32, rank_of(kv_page(32), opaque_page("riddle", 32, 64, 0, 1))),
        (96, window, rank_of(opaque_page("riddle", 32, 64, 0, 1))),
    ):
        assert whole_block_tokens(ranks) == expected


# -- what has no canonical form


def refusal(ranks, chunk_tokens: int = 16) -> str:
    with pytest.raises(GeometryError) as caught:
        canonical_form_of(ranks, chunk_tokens)
    return str(caught.value)


def test_chunks_that_would_split_a_whole_page_are_refused():
    assert refusal([rank_of(kv_page(), opaque_page("FLASH_SPARSE", 16, 64, 0, 1))], 24) == (
        "chunks of 24 tokens of full_attention; expected a multiple of 16, because its pages have one value "
        "per as many tokens"
    )


def test_a_shard_of_another_axis_is_refused():
    field = Field("kv", 2, 0, (Axis("token", ((16, 2),)), Axis("content", ((1, 2),), 0, 2)))
    assert "sharded along 'content'" in refusal([rank_of(PageFormat("kv", 16, 32, (field,)))])


def test_missing_and_doubled_ranks_are_refused():
    first, second = engine(GQA, 2)
    for ranks in ([first], [first, first], [first, second, second], [], [first, engine(GQA, 4)[1]]):
        assert "needs every rank of one engine once" in refusal(ranks)


def test_ranks_that_disagree_are_refused():
    first, second = rank_of(kv_page(), tp=(0, 2)), rank_of(kv_page(width=4), tp=(1, 2))
    assert "layer 'layers.0': ranks of one engine describe it differently" in refusal([first, second])


def test_chunks_of_no_tokens_are_refused():
    assert refusal([rank_of(kv_page())], 0) == "chunks of 0 tokens; expected 1 or more"


def test_slots_that_do_not_hold_a_chunk_are_refused():
    canonical = canonical_form_of(engine(GQA, 1), 128)
    with pytest.raises(
        GeometryError, match=r"5 slots of 4096 bytes for chunks of full_attention; .* at least 1048576 bytes"
    ):
        chunk_pool(canonical, 0, 0, 5, stride=4096)
    with pytest.raises(GeometryError, match="0 slots"):
        chunk_pool(canonical, 0, 0, 0)


def test_a_label_that_no_group_has_is_a_key_error():
    with pytest.raises(KeyError):
        canonical_form_of(engine(GQA, 1), 128).index("state")
