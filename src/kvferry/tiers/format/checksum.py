"""The checksums of a chunk file: XXH3 (16 bytes) of every unit, BLAKE3 (32 bytes) of the header.

Units are most of a file, and XXH3 is several times as fast as BLAKE3. It detects accidental damage. Neither
digest has a secret key, so anyone who can write to the storage can forge both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from blake3 import blake3
from xxhash import xxh3_128, xxh3_128_digest

UNIT_DIGEST_BYTES = 16
HEADER_DIGEST_BYTES = 32

_STRETCH_UNITS, _STRETCH_BYTES = 512, 1 << 20
_PAUSE_SECONDS = 20e-6
# Size from which python-xxhash releases the interpreter's lock (`XXHASH_GIL_MINSIZE`).
_LETS_OTHERS_RUN_BYTES = 100 << 10

# Types that hold bytes. Pass an array as `memoryview(array).cast("B")`, which refuses non-contiguous arrays.
Buffer = bytes | bytearray | memoryview


def unit_digests(data: Buffer, unit_bytes: int, sleep: Callable[[float], None] = time.sleep) -> bytes:
    """Return the XXH3 digests of units, 16 bytes each, concatenated.

    Args:
        data: units without gaps between them.
        unit_bytes: bytes of one unit, at least 1.
    """
    view, digests = memoryview(data), list[bytes]()
    stretch = min(_STRETCH_UNITS * unit_bytes, max(_STRETCH_BYTES // unit_bytes, 1) * unit_bytes)
    for begin in range(0, len(view), stretch):
        if begin and unit_bytes < _LETS_OTHERS_RUN_BYTES:
            # Without a pause, the engine's thread would wait for Python's switch interval, 5 ms.
            sleep(_PAUSE_SECONDS)
        end = min(begin + stretch, len(view))
        digests += [xxh3_128_digest(view[at : at + unit_bytes]) for at in range(begin, end, unit_bytes)]
    return b"".join(digests)


def digest_of(pieces: Iterable[Buffer]) -> bytes:
    """Return the XXH3 digest of one unit, 16 bytes. Each piece is digested before the next is requested."""
    digest = xxh3_128()
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def header_digest(data: Buffer) -> bytes:
    """Return the BLAKE3 digest of a header, 32 bytes. `data` is the header up to its digest."""
    return blake3(data).digest(HEADER_DIGEST_BYTES)
