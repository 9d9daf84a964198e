"""Digests of units, whoever makes them and how many at once."""

from __future__ import annotations

import pytest
from xxhash import xxh3_128_digest

from kvferry.tiers.format.chunk import unit_digests


@pytest.mark.parametrize(
    ("units", "unit_bytes"), [(1, 1), (5, 1000), (1100, 3), (3, 64 << 10), (40, 70_000), (2, 3 << 20)]
)
def test_every_unit_has_a_digest_of_its_own(units, unit_bytes):
    data = bytes(range(251)) * (units * unit_bytes // 251 + 1)
    data = data[: units * unit_bytes]
    expected = [xxh3_128_digest(data[at : at + unit_bytes]) for at in range(0, len(data), unit_bytes)]
    assert unit_digests(data, unit_bytes) == b"".join(expected)


def test_other_threads_run_between_stretches_of_small_units():
    pauses = []
    unit_digests(bytes(4 << 20), 4096, pauses.append)
    assert len(pauses) == 3  # a stretch has 1 MiB
    unit_digests(bytes(512 * 5), 5, pauses.append)
    assert len(pauses) == 3  # or 512 units
    unit_digests(bytes(513 * 5), 5, pauses.append)
    assert len(pauses) == 4
    unit_digests(bytes(4 << 20), 1 << 20, pauses.append)
    assert len(pauses) == 4
