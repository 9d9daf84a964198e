from __future__ import annotations

import pytest

from kvferry.common.errors import ChunkError
from kvferry.tiers.objects.client import OpenObject

WHOLE = bytes(range(100))


def stream(*ends: int) -> OpenObject:
    """The first bytes, in pieces that end there."""
    pieces = (WHOLE[at:end] for at, end in zip((0, *ends), ends, strict=False))
    return OpenObject(len(WHOLE), "", pieces)


@pytest.mark.parametrize("ends", [(100,), (1, 2, 99, 100), (10, 100), (9, 10, 11, 100)])
def test_a_head_is_read_and_the_rest_filled_in_however_it_comes(ends):
    one = stream(*ends)
    assert one.read(0, 4) == WHOLE[:4]
    assert one.read(2, 8) == WHOLE[2:10]
    into = bytearray(90)
    one.fill(10, memoryview(into))
    assert into == WHOLE[10:]


def test_stream_that_ends_early_is_short_or_an_error():
    assert stream(5).read(2, 8) == WHOLE[2:5]
    one = stream(10, 99)
    one.read(0, 10)
    with pytest.raises(ChunkError, match="ends after 89 of 90 bytes"):
        one.fill(10, memoryview(bytearray(90)))


@pytest.mark.parametrize("ends", [(100,), (99, 100), (10, 100)])
def test_stream_that_is_too_long_is_refused(ends):
    with pytest.raises(ChunkError, match="more than the 99 bytes"):
        stream(*ends).fill(0, memoryview(bytearray(99)))
