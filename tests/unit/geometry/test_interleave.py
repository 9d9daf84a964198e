"""Elements of a sequence that a rank holds, against the turns written out."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvferry.common.errors import GeometryError
from kvferry.geometry import NOT_INTERLEAVED, TOKEN, Axis, Field, Interleave, PageFormat
from support.examples import examples

INTERLEAVES = st.builds(
    lambda ranks, rank, interleave: (
        Interleave(rank % ranks, ranks, interleave) if ranks > 1 else NOT_INTERLEAVED
    ),
    st.integers(1, 6),
    st.integers(0, 5),
    st.integers(1, 9),
)


def turns(interleave: Interleave, length: int) -> list[int]:
    """The elements that the rank takes of a sequence, one turn after another."""
    found, at, whose = [], 0, 0
    while at < length:
        found += [n for n in range(at, at + interleave.size) if whose == interleave.rank and n < length]
        at, whose = at + interleave.size, (whose + 1) % interleave.ranks
    return found


@examples(100)
@given(INTERLEAVES, st.integers(1, 200))
def test_a_rank_holds_the_elements_of_its_turns_in_their_order(interleave, length):
    held = turns(interleave, length)
    assert np.flatnonzero(interleave.holds(np.arange(length))).tolist() == held
    assert interleave.held(len(held)).tolist() == held
    assert interleave.index_of(np.array(held, np.int64)).tolist() == list(range(len(held)))


@examples(200)
@given(INTERLEAVES, INTERLEAVES)
def test_ranks_meet_if_both_hold_some_element(one, other):
    length = one.period * other.period
    both = set(turns(one, length)) & set(turns(other, length))
    assert one.meets(other) == other.meets(one) == bool(both)


@pytest.mark.parametrize("interleave", [(2, 2, 1), (-1, 2, 1), (0, 2, 0), (0, 0, 1), (0, 1, 2)])
def test_what_no_rank_can_hold_is_refused(interleave):
    with pytest.raises(GeometryError, match="expected"):
        Interleave(*interleave)


def page(tokens: int, interleave: Interleave, elements: int = 8, *, name: str = TOKEN) -> PageFormat:
    return PageFormat("x", tokens, 8, (Field("kv", 1, 0, (Axis(name, ((elements, 1),)),)),), interleave)


def test_an_element_stands_for_as_many_tokens_as_the_page_holds_of_them():
    assert page(64, Interleave(0, 2, 4)).element_tokens(page(64, Interleave(0, 2, 4)).fields[0]) == 4
    assert page(64, NOT_INTERLEAVED).element_tokens(page(64, NOT_INTERLEAVED).fields[0]) == 8


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ((8, Interleave(0, 2, 8), 4), "whole turns"),
        ((64, Interleave(0, 2, 2)), "of a multiple of 4 tokens"),
        ((0, Interleave(0, 2, 1)), "whole turns"),
        ((20, Interleave(0, 2, 1)), "a divisor of the page's 10 tokens"),
    ],
)
def test_a_page_whose_turns_do_not_fit_its_block_is_refused(made, says):
    with pytest.raises(GeometryError, match=says):
        page(*made)


def test_pages_without_a_token_axis_are_not_divided():
    with pytest.raises(GeometryError, match=r"fields \['kv'\] have no token axis"):
        page(16, Interleave(0, 2, 1), name="content")
