"""The checksums of a chunk file: BLAKE3, 16 bytes for a unit, 32 bytes for the header."""

from __future__ import annotations

from contextlib import nullcontext
from threading import Lock

from blake3 import blake3

UNIT_DIGEST_BYTES = 16
HEADER_DIGEST_BYTES = 32

# A digest lets other threads run, which takes longer than the digest of a unit smaller than this: where
# several threads digest such units at once they halt one another, and an engine's thread with them.
_SMALL_BYTES = 64 << 10
_small = Lock()

# What holds bytes here. Arrays come as `memoryview(array).cast("B")`, which refuses what is not contiguous.
Buffer = bytes | bytearray | memoryview


def unit_digests(data: Buffer, unit_bytes: int) -> bytes:
    """Digests of the units in `data`, one after another.

    Args:
        data: units of `unit_bytes` bytes each, without gaps; its length is a multiple of `unit_bytes`.
        unit_bytes: bytes of one unit, at least 1.
    """
    view = memoryview(data)
    starts = range(0, len(view), unit_bytes)
    with _small if unit_bytes < min(_SMALL_BYTES, len(view)) else nullcontext():
        return b"".join([blake3(view[at : at + unit_bytes]).digest(UNIT_DIGEST_BYTES) for at in starts])


def header_digest(data: Buffer) -> bytes:
    """Digest of the bytes of a header that precede it."""
    return blake3(data).digest(HEADER_DIGEST_BYTES)
