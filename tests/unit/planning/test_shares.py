"""Shares of chunks on several machines, against bytes computed without the planner."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import event, given, strategies as st

from kvferry.common.errors import Incompatible
from kvferry.geometry import Attention, GroupKind, RankGeometry
from kvferry.geometry.canonical import CanonicalForm, canonical_form_of, chunk_pool, share_of
from kvferry.planning.chunk_cells import check_storable
from kvferry.planning.descriptors import Descriptors
from kvferry.planning.select import LoadSpan, select_cells
from kvferry.planning.shares import share_copies
from kvferry.planning.template import build_templates
from kvferry.tools.models.layout import EngineShape, lay_out
from kvferry.tools.models.store import LayerCache
from support.chunks import Kept, StoredLayout, chunk_of, cut_like, kept
from support.engines import ranks
from support.examples import examples
from support.models import attention, model, state
from support.oracle import Memory, copy, expand_cells, fill
from support.ready import source_of


def ranks_of(case: Kept) -> int:
    spec = case.writers[0].spec
    return spec.tp * spec.pcp * len(spec.stages)


@examples(100)
@given(kept().filter(lambda case: ranks_of(case) > 1), st.integers(1, 4))
def test_shares_that_machines_store_are_together_the_chunk(case: Kept, each: int) -> None:
    try:
        check_shares(case, each)
    except BaseException as error:
        error.add_note(f"\ndef test_this_case():\n    check_shares({source_of(case)}, {each})\n")
        raise


def check_shares(case: Kept, each: int) -> None:
    """Check an engine with so many ranks on each machine, but on the last."""
    with cut_like(case.finest):
        engine = case.writers[0]
        sources = ranks(engine.spec, case.families)
        ends = [*range(0, len(sources), each), len(sources)]
        machines = [sources[low:high] for low, high in pairwise(ends)]
        whole = canonical_form_of(sources, case.chunk_tokens)
        shares = [share_of(whole, machine) for machine in machines]
        if len(machines) == 1:
            assert shares == [whole]
        try:
            copies = share_copies(whole, shares)
            for share, machine in zip(shares, machines, strict=True):
                check_storable(share, machine)
        except Incompatible:
            assert not must_work(case, engine, ends)
            event("refused")
            return
        event(f"{len(machines)} machines, {len(engine.spec.stages)} stages")
        for number, group in enumerate(whole.groups):
            stored = [
                store(case, engine, machine, share, number)
                for machine, share in zip(machines, shares, strict=True)
            ]
            for chunk in range(1 if group.kind is GroupKind.STATE else case.chunks):
                check_chunk(
                    case, whole, number, chunk, [one[chunk] for one in stored], [c[number] for c in copies]
                )


def must_work(case: Kept, engine: StoredLayout, ends: Sequence[int]) -> bool:
    """Whether machines whose ranks end there have whole layers, or whole units of all layers."""
    spec = engine.spec
    inside = [number for end in ends if (number := end % (spec.tp * spec.pcp))]
    if not inside:
        return True
    # Of several stages, a machine would hold all heads of some layers, and some heads of others.
    if len(spec.stages) > 1 or spec.pcp > 1 or any(group.turns[0] > 1 for group in spec.groups):
        return False
    sharded = {field.heads for family in case.families for field in family.fields if field.heads}
    unit = {heads: heads // case.finest.units(heads) for heads in sharded}
    return all(
        heads % spec.tp == 0 and heads // spec.tp * number % unit[heads] == 0
        for heads in sharded
        for number in inside
    )


def store(
    case: Kept, engine: StoredLayout, machine: Sequence[RankGeometry], share: CanonicalForm, number: int
) -> list[np.ndarray]:
    """Return each chunk's share in a machine's arena, as its ranks store it: uint8 of shape (bytes,)."""
    size = share.groups[number].chunk_bytes
    if not size:
        return [np.zeros(0, np.uint8)] * case.chunks
    pool = chunk_pool(share, number, 1 << 50, case.chunks + 1)
    memory, table = Memory.of(pool, 7), np.arange(1, case.chunks + 1)
    written = np.zeros(len(memory.bytes), np.int64)
    kind = pool.groups[number].kind
    table = table[:1] if kind is GroupKind.STATE else table
    span = LoadSpan(0, case.chunks * case.chunk_tokens, case.chunks * case.chunk_tokens)
    for rank, template in zip(machine, build_templates(machine, pool), strict=True):
        source = Memory.of(rank, 8)
        fill(rank, engine.tables, source)
        for route in template.routes:
            pattern = Attention(kind if kind is GroupKind.STATE else GroupKind.FULL, 0)
            cells = select_cells(route, pattern, span, engine.tables[route.src_group], table)
            copy(expand_cells(route, cells), source, memory, written)
    assert written.max() == 1, "a byte of a share was stored twice"
    return [memory.bytes[size * slot : size * (slot + 1)] for slot in range(1, case.chunks + 1)]


def check_chunk(case, whole, number, chunk, stored, copies) -> None:
    group = whole.groups[number]
    found, times = np.full(group.chunk_bytes, 9, np.uint8), np.zeros(group.chunk_bytes, np.int64)
    for share, one in zip(stored, copies, strict=True):
        move(one.gathered, share, found, times)
    tokens = range(chunk * case.chunk_tokens, (chunk + 1) * case.chunk_tokens)
    value = chunk_of(case.families, group.kind, group.attention_span, tokens, case.finest)
    expected, once = np.full(group.chunk_bytes, 9, np.uint8), np.zeros(group.chunk_bytes, np.int64)
    for section, start in zip(group.sections, group.starts, strict=True):
        expected[start : start + section.bytes], value = value[: section.bytes], value[section.bytes :]
        once[start : start + section.bytes] = 1
    assert np.array_equal(found, expected), "the gathered chunk is not what it should be"
    assert np.array_equal(times, once), "a byte was gathered twice, or not at all"
    for share, one in zip(stored, copies, strict=True):
        back, times = np.full(len(share), 9, np.uint8), np.zeros(len(share), np.int64)
        move(one.scattered, found, back, times)
        assert times.max(initial=0) <= 1
        assert np.array_equal(back[times == 1], share[times == 1]), "a share differs from what was stored"
        assert times.sum() >= one.gathered.total_bytes


def move(runs: Descriptors, src: np.ndarray, dst: np.ndarray, times: np.ndarray) -> None:
    for a, b, size in zip(runs.src.tolist(), runs.dst.tolist(), runs.length.tolist(), strict=True):
        assert a + size <= len(src)
        dst[b : b + size] = src[a : a + size]
        times[b : b + size] += 1


KV = attention(heads=8, k=16, v=16)
HYBRID = model(KV, LayerCache(GroupKind.SLIDING, 24, KV.fields), state(heads=8, conv=8), KV)


def engine(tp: int, stages: tuple[int, ...] = (4,)) -> list[RankGeometry]:
    return lay_out(HYBRID, EngineShape(tp, stages, 16, "LBNHC", 99))


@pytest.mark.parametrize(
    ("tp", "stages", "machines"),
    [(2, (4,), 2), (4, (4,), 2), (8, (4,), 4), (16, (4,), 2), (2, (2, 2), 2), (1, (1, 2, 1), 3)],
)
def test_shares_of_equal_machines_add_up_to_what_the_chunk_takes(
    tp: int, stages: tuple[int, ...], machines: int
) -> None:
    all_ranks = engine(tp, stages)
    each = len(all_ranks) // machines
    groups = [all_ranks[at : at + each] for at in range(0, len(all_ranks), each)]
    whole = canonical_form_of(all_ranks, 64)
    shares = [share_of(whole, ranks_) for ranks_ in groups]
    for share, ranks_ in zip(shares, groups, strict=True):
        check_storable(share, ranks_)
    for number, group in enumerate(whole.groups):
        held = sum(share.groups[number].content_bytes for share in shares)
        assert held == group.content_bytes
        gathered = [copies[number].gathered.total_bytes for copies in share_copies(whole, shares)]
        assert sum(gathered) == group.content_bytes


def test_what_all_ranks_hold_is_in_every_share_and_gathered_once() -> None:
    latent = model(attention(heads=0, k=64, v=8))
    both = lay_out(latent, EngineShape(2, (1,), 16, "LBNHC", 99))
    whole = canonical_form_of(both, 64)
    shares = [share_of(whole, [rank]) for rank in both]
    assert shares == [whole, whole]
    first, second = share_copies(whole, shares)
    assert first[0].gathered.total_bytes == second[0].scattered.total_bytes == whole.groups[0].content_bytes
    assert second[0].gathered.total_bytes == 0, "this machine's own copy takes no transfer"


def test_machines_whose_ranks_are_no_neighbours_are_refused() -> None:
    four = engine(4)
    whole = canonical_form_of(four, 64)
    apart = [[four[0], four[2]], [four[1], four[3]]]
    shares = [share_of(whole, machine) for machine in apart]
    with pytest.raises(Incompatible, match="no rank of the peer holds"):
        check_storable(shares[0], apart[0])
