"""Numbers as people read them."""

from __future__ import annotations

import pytest

from kvferry.common.units import format_bytes, format_seconds


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.50 KiB"),
        ((100 << 10) + 300, "100 KiB"),
        (3 << 20, "3 MiB"),
        (5 << 40, "5 TiB"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (42e-6, "42 µs"),
        (0.00042, "420 µs"),
        (0.018, "18 ms"),
        (0.01834, "18.3 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.0 s"),
        (2.06, "2.1 s"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
