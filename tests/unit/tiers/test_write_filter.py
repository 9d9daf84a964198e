"""The admission filter of a tier, and the sketch with which it counts uses."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from kvferry.tiers.write_filter import MOST_DECLINED, DeclineReason, UseSketch, WriteFilter
from support.chunk_files import key

PROMPT = [key(number) for number in range(4)]
LONG = 1000


def chunks(*keys):
    return [(one, f"of {one.hex()}") for one in keys]


def many(count, seed=0):
    return [row.tobytes() for row in np.random.default_rng(seed).integers(0, 256, (count, 32), np.uint8)]


def test_every_chunk_is_admitted_unless_the_settings_say_otherwise():
    assert WriteFilter().admit(chunks(*PROMPT), LONG) == chunks(*PROMPT)


def test_a_chunk_is_written_with_its_second_use():
    admission = WriteFilter(min_uses=2)
    assert admission.admit(chunks(*PROMPT), LONG) == []
    assert admission.declined == {DeclineReason.FEW_USES: 4}
    assert admission.use(PROMPT, LONG) == []
    assert admission.use([*PROMPT[:2], key(9)], LONG) == chunks(*PROMPT[:2])
    assert admission.use(PROMPT[:2], LONG) == [], "each is written once"


def test_a_chunk_that_is_computed_anew_is_written_at_once():
    admission = WriteFilter(min_uses=2)
    admission.use(PROMPT[:2], LONG)
    assert admission.admit(chunks(*PROMPT), LONG) == chunks(*PROMPT[:2])
    assert admission.use(PROMPT, LONG) == []
    assert admission.use(PROMPT, LONG) == chunks(*PROMPT[2:])


def test_short_prompts_use_nothing():
    admission = WriteFilter(min_uses=1, min_prompt_tokens=100)
    assert admission.admit(chunks(key(1)), 99) == []
    assert admission.declined == {DeclineReason.SHORT_PROMPT: 1}
    assert admission.use([key(1)], 99) == []
    assert admission.use([key(1)], 100) == chunks(key(1)), "a long prompt has it too"
    assert admission.admit(chunks(key(2)), 100) == chunks(key(2))
    assert admission.admit(chunks(key(3)), None) == chunks(key(3)), "of another tier"


@pytest.mark.parametrize(("left", "needed"), [(1.0, 1), (0.51, 1), (0.5, 1), (0.49, 2), (0.24, 3), (0.1, 4)])
def test_half_of_the_budget_takes_one_more_use(left, needed):
    admission = WriteFilter()
    for _ in range(needed - 1):
        assert admission.admit(chunks(key(1)), LONG, left) == []
        assert admission.use([key(1)], LONG, left) == []
    assert admission.admit(chunks(key(1)), LONG, left) == chunks(key(1))
    assert admission.declined == Counter({DeclineReason.BUDGET: needed - 1})


def test_nothing_is_admitted_while_the_budget_is_used_up():
    admission = WriteFilter()
    for _ in range(300):
        admission.use([key(1)], LONG, 0.0)
    assert admission.admit(chunks(key(1)), LONG, 0.0) == []
    assert admission.use([key(1)], LONG, 0.6) == chunks(key(1))


def test_declined_chunks_are_forgotten():
    admission = WriteFilter(min_uses=2)
    admission.admit(chunks(key(1)), LONG)
    admission.forget()
    assert admission.use([key(1)], LONG) == admission.use([key(1)], LONG) == []


def test_the_oldest_of_very_many_declined_chunks_is_forgotten():
    admission = WriteFilter(min_uses=2)
    each = many(MOST_DECLINED + 1)
    admission.admit(chunks(*each), LONG)
    ends = [each[0], each[1], each[-1]]
    admission.use(ends, LONG)
    assert admission.use(ends, LONG) == chunks(*ends[1:])


def test_a_sketch_counts_at_least_the_uses():
    sketch, each = UseSketch(1 << 8), many(100)
    for number in range(1, 5):
        assert (sketch.add(each[: 100 // number]) >= number).all()
    assert sketch.uses([each[0], many(1, seed=1)[0]]).tolist() == [4, 0]


def test_a_sketch_counts_no_further_than_a_byte():
    sketch = UseSketch(1 << 8)
    for _ in range(600):
        found = sketch.add([key(1)])
    assert found.tolist() == [255]


def test_a_sketch_forgets_after_many_other_chunks():
    sketch, each = UseSketch(1 << 10), many(1 << 11)
    sketch.add([key(1)])
    for first in range(0, 512, 64):
        sketch.add(each[first : first + 64])
    assert sketch.uses([key(1)]).tolist() == [1]
    for first in range(512, 1280, 64):
        sketch.add(each[first : first + 64])
    assert sketch.uses([key(1)]).tolist() == [0]


def test_chunks_that_are_used_again_do_not_age_a_sketch():
    sketch = UseSketch(1 << 8)
    sketch.add([key(1)])
    for _ in range(1000):
        sketch.add(PROMPT)
    assert sketch.uses([key(1)]).tolist() == [255]
    assert sketch._new <= 5


def test_one_chunk_in_twenty_seems_used_in_a_full_sketch():
    sketch = UseSketch(1 << 14)
    for seed in range(2):
        each = many(sketch.most - 64, seed)
        for first in range(0, len(each), 512):
            sketch.add(each[first : first + 512])
    wrong = (sketch.uses(many(4000, seed=9)) > 0).mean()
    assert 0.01 < wrong < 0.06
