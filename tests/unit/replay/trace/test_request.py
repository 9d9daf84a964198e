from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from kvferry.tools.replay.trace.base import chained_each
from support.examples import examples
from support.replayed import chained

requests = st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=8)


@examples(60)
@given(requests)
def test_identities_are_equal_exactly_if_all_units_so_far_are_equal(hash_ids):
    counts = np.array([len(each) for each in hash_ids])
    found = chained_each(np.array([one for each in hash_ids for one in each], np.uint64), counts)
    prefixes = [tuple(each[: end + 1]) for each in hash_ids for end in range(len(each))]
    assert len(set(found.tolist())) == len(set(prefixes))
    assert len(set(zip(found.tolist(), prefixes, strict=True))) == len(set(prefixes))


@examples(60)
@given(requests)
def test_identities_do_not_depend_on_the_requests_beside(hash_ids):
    counts = np.array([len(each) for each in hash_ids])
    found = chained_each(np.array([one for each in hash_ids for one in each], np.uint64), counts)
    assert found.tolist() == [one for each in hash_ids for one in chained(each).tolist()]
