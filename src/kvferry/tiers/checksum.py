"""The checksums of a chunk file: BLAKE3, 16 bytes for a unit, 32 bytes for the header."""

from __future__ import annotations

from blake3 import blake3

UNIT_DIGEST_BYTES = 16
HEADER_DIGEST_BYTES = 32

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
    return b"".join(blake3(view[at : at + unit_bytes]).digest(UNIT_DIGEST_BYTES) for at in starts)


def header_digest(data: Buffer) -> bytes:
    """Digest of the bytes of a header that precede it."""
    return blake3(data).digest(HEADER_DIGEST_BYTES)
