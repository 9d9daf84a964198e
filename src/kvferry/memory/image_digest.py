"""The digest of an image: the sum of its 32-bit words, each times the key of its position, modulo 2^64.

The sum has no order. So each side of a transfer adds the runs of its blocks as they lie in memory, however
they are cut, and both sums are equal if the bytes are. This is the multilinear hash of Kaser and Lemire,
"Strongly universal string hashing is fast", The Computer Journal 57 (11), 2014. Theirs has a random key of 64
bits per word. Here a key is the product of two odd numbers, one for the word's place in `KEY_BYTES` and one
for the place of these bytes in the image, so that few keys fill the CPU's cache.

A key is odd, so a change within one word is always noticed. Other faults, such as stale, swapped or shifted
bytes, pass with a probability of about 2^-32 at most. The keys are no secret: somebody who chooses the bytes
can forge a digest.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvferry.memory import copy_kernel
from kvferry.planning.descriptors import Int64s

DIGEST_BYTES: Final = 8
WORD_BYTES: Final = 4
KEY_WORDS: Final = 256
KEY_BYTES: Final = KEY_WORDS * WORD_BYTES

_NO_LOOPS: Final = np.empty((0, 3), np.int64)


def split_mix(places: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return numbers of SplitMix64 by their place in its sequence.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.

    >>> hex(split_mix(np.zeros(1, np.uint64))[0])
    '0xe220a8397b1dcdaf'
    """
    x = (places + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def _word_keys() -> npt.NDArray[np.uint32]:
    """Return the keys of the words, and one more for the kernel, at the start of a cache line."""
    line = np.zeros(KEY_WORDS + 1 + 16, np.uint32)
    keys = line[-(line.ctypes.data // WORD_BYTES) % 16 :][: KEY_WORDS + 1]
    # Far from the places that `_packed` takes.
    keys[:] = split_mix(np.arange(KEY_WORDS + 1, dtype=np.uint64) + np.uint64(1 << 63)) >> np.uint64(32) | 1
    return keys


KEYS: Final = _word_keys()


def digest_bytes(packed: npt.NDArray[np.uint8], positions: Int64s) -> int:
    """Return the share of packed bytes in a digest.

    Args:
        packed: contiguous, uint8 of shape (n, bytes).
        positions: bytes from the start of the image to each of the n parts, int64 of shape (n,).
    """
    if (kernel := copy_kernel.KERNEL) is not None:
        sources = packed.ctypes.data + np.arange(len(packed)) * packed.shape[1]
        return kernel.digest(sources, positions, packed.shape[1], _NO_LOOPS, KEYS)
    return sum(map(_packed, packed, positions.tolist()))


def _packed(data: npt.NDArray[np.uint8], position: int) -> int:
    first, lead = divmod(position, KEY_BYTES)
    count = -(-(lead + len(data)) // KEY_BYTES)
    padded = np.zeros(count * KEY_BYTES, np.uint8)
    padded[lead : lead + len(data)] = data
    words = padded.view("<u4").reshape(count, KEY_WORDS).astype(np.uint64)
    keys = split_mix(np.arange(first, first + count, dtype=np.uint64)) | np.uint64(1)
    return int((words @ KEYS[:KEY_WORDS].astype(np.uint64) * keys).sum())
