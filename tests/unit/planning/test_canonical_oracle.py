"""Chunks stored by some engines and loaded by others, against bytes computed without the planner."""

from collections.abc import Sequence

import numpy as np
from hypothesis import event, given, strategies as st

from kvferry.geometry import Attention, GroupKind, RankGeometry
from kvferry.geometry.canonical import CanonicalForm, canonical_form_of, chunk_pool
from kvferry.planning.select import Cells, LoadSpan, select_cells
from kvferry.planning.template import Route, build_templates
from support.chunks import Kept, StoredLayout, chunk_of, cut_like, kept
from support.engines import ranks
from support.examples import examples
from support.oracle import Memory, copy, expand_cells, expect, fill, visible
from support.packed import move, way_of
from support.ready import source_of

WAYS = ("direct", "direct", "over-read", "staged", "staged, landed")


@examples(60)
@given(kept(), st.sampled_from(WAYS))
def test_chunks_stored_by_some_engines_load_into_another(case: Kept, how: str):
    try:
        check_bytes(case, how)
    except BaseException as error:
        error.add_note(f"\ndef test_this_case():\n    check_bytes({source_of(case)}, {how!r})\n")
        raise


def check_bytes(case: Kept, how: str) -> None:
    with cut_like(case.finest):
        canonical = form_of(case)
        pools = pools_of(canonical, case)
        tables = slots_of(canonical, case)
        memories = [Memory.of(pool, 500 + number) for number, pool in enumerate(pools)]
        written = [np.zeros(len(memory.bytes), np.int64) for memory in memories]
        halves = (range(case.cut), range(case.cut, case.chunks))
        for seed, (engine, chunks) in enumerate(zip(case.writers, halves, strict=True)):
            store(case, engine, chunks, pools, tables, memories, written, seed, how)
        for group, pool, table, memory, count in zip(
            canonical.groups, pools, tables, memories, written, strict=True
        ):
            check_chunks(case, group, pool, table, memory, count)
        load(case, pools, tables, memories, how)


def store(
    case: Kept,
    engine: StoredLayout,
    chunks: range,
    pools: Sequence[RankGeometry],
    tables: Sequence[np.ndarray],
    memories: Sequence[Memory],
    written: Sequence[np.ndarray],
    seed: int,
    how: str,
) -> None:
    """Some chunks; a snapshot is stored by whoever stores the last chunk."""
    sources = ranks(engine.spec, case.families)
    filled = [Memory.of(rank, seed * 100 + number) for number, rank in enumerate(sources)]
    for rank, memory in zip(sources, filled, strict=True):
        rank.check()
        fill(rank, engine.tables, memory)
    if not chunks:
        return
    span = LoadSpan(
        chunks.start * case.chunk_tokens, chunks.stop * case.chunk_tokens, case.chunks * case.chunk_tokens
    )
    for number, pool in enumerate(pools):
        kind = pool.groups[number].kind
        if kind is GroupKind.STATE and chunks.stop != case.chunks:
            continue
        kind = kind if kind is GroupKind.STATE else GroupKind.FULL
        for template, source in zip(build_templates(sources, pool), filled, strict=True):
            for route in template.routes:
                cells = select_cells(
                    route, Attention(kind, 0), span, engine.tables[route.src_group], tables[route.dst_group]
                )
                carry(route, cells, source, memories[number], written[number], how)


def check_chunks(case, group, pool, table, memory, written) -> None:
    before = Memory.of(pool, 500 + pool.pp_rank).bytes
    stride = pool.groups[pool.pp_rank].layers[0].block_stride
    expected, times = before.copy(), np.zeros(len(before), np.int64)
    for chunk, slot in enumerate(table.tolist()):
        tokens = range(chunk * case.chunk_tokens, (chunk + 1) * case.chunk_tokens)
        value = chunk_of(case.families, group.kind, group.attention_span, tokens, case.finest)
        assert len(value) == group.content_bytes
        for section, start in zip(group.sections, group.starts, strict=True):
            at, part, value = slot * stride + start, value[: section.bytes], value[section.bytes :]
            expected[at : at + section.bytes] = part
            times[at : at + section.bytes] = 1
    assert np.array_equal(memory.bytes, expected), "a chunk is not what it should be"
    assert np.array_equal(written, times), "a byte was stored twice"


def load(case: Kept, pools, tables, memories, how: str) -> None:
    for rank in ranks(case.reader.spec, case.families):
        rank.check()
        memory = Memory.of(rank, 1000)
        expected = expect(rank, pools, case.spans, case.reader.tables, memory.bytes.copy())
        writes = np.zeros(len(memory.bytes), np.int64)
        for source, template in zip(memories, build_templates(pools, rank), strict=True):
            for route in template.routes:
                group, span = rank.groups[route.dst_group], case.spans[route.dst_group]
                available = needed_slots(case, group, span, tables[route.src_group])
                cells = select_cells(
                    route,
                    group,
                    span,
                    available,
                    case.reader.tables[route.dst_group],
                )
                carry(route, cells, source, memory, writes, how)
        expected.check(memory.bytes)
        assert writes.max(initial=0) <= 1, "a byte was read from two places"
        event("loads something" if writes.any() else "loads nothing")


def needed_slots(case: Kept, group, span: LoadSpan, table: np.ndarray) -> np.ndarray:
    """Null slots for chunks that nobody needs: a window does not ask for what is before it."""
    if group.kind is GroupKind.STATE:
        return table
    chunks = {token // case.chunk_tokens for token in visible(group.kind, group.attention_span, span)}
    return np.where(np.isin(np.arange(len(table)), sorted(chunks)), table, 0)


def carry(route: Route, cells: Cells, src: Memory, dst: Memory, writes: np.ndarray, how: str) -> None:
    if how == "direct":
        copy(expand_cells(route, cells), src, dst, writes)
    elif len(cells):
        move(route, way_of(route, how, 64), cells, src, dst, writes)


@examples(20)
@given(kept())
def test_engines_of_one_model_agree_on_the_canonical_form(case: Kept):
    with cut_like(case.finest):
        forms = [
            canonical_form_of(ranks(engine.spec, case.families), case.chunk_tokens)
            for engine in (*case.writers, case.reader)
        ]
        assert forms[0] == forms[1] == forms[2]
        assert len({form.content for form in forms}) == 1
        assert form_of(case, case.chunk_tokens + 1).content != forms[0].content


def form_of(case: Kept, chunk_tokens: int = 0) -> CanonicalForm:
    return canonical_form_of(ranks(case.writers[0].spec, case.families), chunk_tokens or case.chunk_tokens)


def pools_of(canonical: CanonicalForm, case: Kept) -> list[RankGeometry]:
    """A pool per group, with a gap between slots."""
    return [
        chunk_pool(canonical, number, (1 << 50) + (number << 32), case.chunks + 2, group.chunk_bytes + 3)
        for number, group in enumerate(canonical.groups)
    ]


def slots_of(canonical: CanonicalForm, case: Kept) -> list[np.ndarray]:
    """Slots by chunk, none of them 0; of a snapshot, the one."""
    order = np.random.default_rng(case.seed).permutation(case.chunks + 1)[: case.chunks] + 1
    return [order[:1] if group.kind is GroupKind.STATE else order for group in canonical.groups]
