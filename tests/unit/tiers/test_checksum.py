"""Digests of units, whoever makes them and how many at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError

import pytest
from blake3 import blake3

from kvferry.tiers import checksum
from kvferry.tiers.checksum import unit_digests


@pytest.mark.parametrize(("units", "unit_bytes"), [(1, 1), (5, 1000), (3, 64 << 10), (2, 1 << 20)])
def test_every_unit_has_a_digest_of_its_own(units, unit_bytes):
    data = bytes(range(251)) * (units * unit_bytes // 251 + 1)
    data = data[: units * unit_bytes]
    expected = [blake3(data[at : at + unit_bytes]).digest(16) for at in range(0, len(data), unit_bytes)]
    assert unit_digests(data, unit_bytes) == b"".join(expected)


@pytest.mark.parametrize(("unit_bytes", "together"), [(1000, False), (64 << 10, True)])
def test_small_units_are_digested_by_one_thread_at_a_time(monkeypatch, unit_bytes, together):
    two = Barrier(2, timeout=30.0 if together else 0.2)
    monkeypatch.setattr(checksum, "blake3", lambda data: two.wait() is None or blake3(data))
    met = []

    def digests(_):
        try:
            unit_digests(bytes(unit_bytes * 2), unit_bytes)
            met.append(True)
        except BrokenBarrierError:
            met.append(False)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(digests, range(2)))
    assert met == [together] * 2
