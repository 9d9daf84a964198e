"""The keys of requests' chunks."""

from __future__ import annotations

import pytest

from kvferry.tools.replay.content import keys_of_each
from support.small_replays import UNIT, prompt


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_chunks_of_one_group_can_be_left_out_of_the_order(groups: int) -> None:
    (keys,) = keys_of_each([prompt(4 * UNIT, *range(4))], UNIT // 2, groups)
    for group in range(groups):
        for kept in ([], [5], [6, 0, 7]):
            left_out = {key for number, key in enumerate(keys.whole[group]) if number not in kept}
            expected = [key for key in keys.in_order(4 * UNIT) if key not in left_out]
            assert keys.in_order_with(group, kept) == expected
