from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from kvferry.tools.replay.trace.workload import Outline, Passage, write_out
from support.examples import examples

UNIT = 16


def shared_units(one, other):
    pairs = zip(one.prefix_ids.tolist(), other.prefix_ids.tolist(), strict=False)
    return sum(first == second for first, second in pairs)


@examples(60)
@given(st.integers(1, 100), st.integers(0, 100), st.integers(1, 100), st.integers(1, 20))
def test_requests_share_the_units_before_their_texts_differ(fork, output, more, unit):
    shared, *others = [
        Outline(0.0, fork + more, output, [Passage(0, 1)]),
        Outline(1.0, fork + more, output, [Passage(0, 1), Passage(fork, 2)]),
        Outline(2.0, fork + more, output, [Passage(0, 1), Passage(fork, 3)]),
    ]
    first, *rest = write_out([shared, *others], unit)
    assert len(first.prefix_ids) == (fork + more + output) // unit
    assert [shared_units(first, each) for each in rest] == [fork // unit] * 2
    assert shared_units(*rest) == fork // unit


@pytest.mark.parametrize("unit", [1, 16])
def test_units_and_prompts_of_small_seeds_are_all_different(unit):
    requests = list(write_out([Outline(0.0, 100, 60, [Passage(0, seed)]) for seed in range(20)], unit))
    found = [one for each in requests for one in (*each.prefix_ids.tolist(), each.prompt_id)]
    assert len(set(found)) == len(found) == 20 * (160 // unit + 1)


def test_a_prompts_identity_depends_on_its_length_and_its_last_text():
    outlines = [
        Outline(0.0, 40, 0, [Passage(0, 1)]),
        Outline(0.0, 41, 0, [Passage(0, 1)]),
        Outline(0.0, 40, 0, [Passage(0, 1), Passage(39, 2)]),
        Outline(0.0, 40, 9, [Passage(0, 1), Passage(40, 2)]),
    ]
    first, longer, other, continued = (each.prompt_id for each in write_out(outlines, UNIT))
    assert first == continued
    assert len({first, longer, other}) == 3


@pytest.mark.parametrize("limit", [1, 3, 1000])
def test_requests_do_not_depend_on_the_batches(limit):
    outlines = [
        Outline(float(n), 20 + n, n, [Passage(0, 1), Passage(n, 2)][: 1 + n % 2], str(n)) for n in range(9)
    ]
    alone = [next(write_out([each], UNIT)) for each in outlines]
    for outline, one, other in zip(outlines, alone, write_out(outlines, UNIT, limit), strict=True):
        assert (other.arrival, other.prompt_tokens, other.output_tokens) == outline[:3]
        assert (other.session, other.unit_tokens) == (outline.session, UNIT)
        assert (other.prefix_ids.tolist(), other.prompt_id) == (one.prefix_ids.tolist(), one.prompt_id)
