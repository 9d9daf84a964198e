import numpy as np
from hypothesis import given, strategies as st

from kvferry.planning.strided_copy import (
    Loop,
    StridedCopy,
    coalesce_copy,
    expand_copies,
    fuse_copies,
    strided_copies,
)
from support.examples import examples

loops = st.builds(Loop, st.integers(2, 4), st.integers(1, 40), st.integers(1, 40))
copies = st.builds(
    StridedCopy,
    st.integers(0, 50),
    st.integers(0, 50),
    st.integers(1, 8),
    st.lists(loops, max_size=3).map(tuple),
)
offsets = st.lists(st.integers(0, 200), min_size=1, max_size=12, unique=True)


def moved(found) -> list[tuple[int, int]]:
    """Every byte that is moved: from where, to where."""
    return sorted(
        (a + i, b + i)
        for copy in found
        for a, b, n in zip(*(x.tolist() for x in vars_of(copy.descriptors())), strict=True)
        for i in range(n)
    )


def vars_of(descriptors):
    return descriptors.src, descriptors.dst, descriptors.length


@examples(60)
@given(copies)
def test_coalescing_moves_the_same_bytes_in_no_more_runs(copy):
    found = coalesce_copy(copy)
    assert moved([found]) == moved([copy])
    assert found.run_count <= copy.run_count
    assert found.bytes == copy.bytes


def test_outer_loops_are_joined_if_they_continue_each_other_on_both_sides():
    rows = Loop(4, 100, 50)
    assert coalesce_copy(StridedCopy(0, 0, 8, (Loop(3, 400, 200), rows))).loops == (Loop(12, 100, 50),)
    for next_rows in (Loop(3, 400, 208), Loop(3, 408, 200)):
        assert coalesce_copy(StridedCopy(0, 0, 8, (next_rows, rows))).loops == (next_rows, rows)


@examples(60)
@given(st.lists(copies, max_size=6))
def test_fusing_moves_the_same_bytes_in_no_more_copies(several):
    found = fuse_copies(several)
    assert moved(found) == moved(several)
    assert len(found) <= len(several)


@examples(60)
@given(st.lists(st.tuples(offsets, st.randoms()), min_size=1, max_size=3), st.integers(1, 4))
def test_copies_of_axes_move_every_combination_of_positions(axes, item):
    pairs = []
    expected = [(100, 0)]
    for src, shuffle in axes:
        dst = [n * 1000 for n in range(len(src))]
        shuffle.shuffle(dst)
        pairs.append((np.array(src), np.array(dst)))
        expected = [(a + x, b + y) for a, b in expected for x, y in zip(src, dst, strict=True)]
    found = strided_copies(item, 100, 0, pairs)
    assert moved(found) == sorted((a + i, b + i) for a, b in expected for i in range(item))


def test_a_head_range_of_a_page_of_kernel_blocks_is_one_copy():
    # 2 kernel blocks of 16 tokens, 4 heads, 8 bytes: tokens of a head are in two places.
    tokens = np.concatenate([np.arange(16) * 8, 4096 + np.arange(16) * 8])
    heads = np.array([2, 3]) * 128
    (found,) = strided_copies(8, 0, 0, [(heads, heads - 256), (tokens, np.arange(32) * 8 * 2)])
    assert (found.run, found.run_count) == (8, 64)
    assert len(found.loops) == 3


def test_kernel_blocks_cut_in_the_middle_are_the_fewest_copies():
    # Tokens 12..47 of kernel blocks of 16: 4, then two whole ones.
    tokens = np.concatenate([np.arange(16) + base for base in (0, 100, 200)])[12:]
    found = strided_copies(1, 0, 0, [(tokens, np.arange(36) * 1)])
    assert [(copy.run, copy.run_count) for copy in found] == [(4, 1), (16, 2)]


def test_layers_at_regular_distances_are_a_loop_and_others_are_not():
    regular = [StridedCopy(1000 * n, 64 * n, 64) for n in range(5)]
    assert fuse_copies(regular) == (StridedCopy(0, 0, 64, (Loop(5, 1000, 64),)),)
    odd = [*regular, StridedCopy(99_999, 64 * 5, 64)]
    assert sorted(copy.run_count for copy in fuse_copies(odd)) == [1, 5]


def test_expanded_runs_are_merged_across_copies():
    found = expand_copies([StridedCopy(0, 0, 8), StridedCopy(8, 8, 4), StridedCopy(100, 12, 4)])
    assert found.length.tolist() == [12, 4]
