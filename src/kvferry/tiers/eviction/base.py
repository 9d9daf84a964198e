"""The contract of an eviction policy.

A policy ranks keys; it holds no bytes and frees none. It is told what became of every key, and says who goes:

    admit(key, bytes)   the key's bytes are there now; a key that was evicted lately may be ranked by that
    touch(key)          it was used
    pin / unpin         it is in use, and no more
    evict()             who goes: taken off the books, at most remembered as a ghost
    remove(key)         it is gone for another reason: forgotten, no ghost

**What mutates.** Every verb but the queries changes the policy and nothing else. Arguments are not kept,
except the key.

**When a key must be pinned.** As long as anybody reads its bytes: `evict` never names a pinned key, and the
caller may reuse the bytes of what `evict` named at once. Pins do not count: one `pin`, one `unpin`, and a
caller with several readers pins for the first and unpins after the last. Unpinned, a key is ranked as used
just now.

**What is unsafe.** Not thread-safe. The sum of `admit`ted bytes must stay within the capacity: evict first.

Everything is counted in bytes, since keys differ in size, ghosts too: a ghost takes no memory to speak of,
but how many there may be follows from the bytes they stood for. Every verb takes time independent of how many
keys there are; `evict` of S3-FIFO on average over calls.
"""

from __future__ import annotations

from typing import Protocol


class Policy(Protocol):
    """One ranking of keys; see the module for what all of them promise."""

    @property
    def capacity_bytes(self) -> int:
        """What it was made for."""

    @property
    def used_bytes(self) -> int:
        """Bytes of all admitted keys, pinned ones too."""

    def __len__(self) -> int:
        """How many keys are admitted."""

    def __contains__(self, key: object) -> bool:
        """Whether the key is admitted; ghosts are not."""

    def admit(self, key: bytes, size: int) -> None:
        """Rank a new key of `size` bytes, unpinned.

        Raises:
            ValueError: it is admitted already, `size` is not positive, or it exceeds the capacity.
        """

    def touch(self, key: bytes) -> None:
        """The key was used. Raises KeyError if it is not admitted."""

    def pin(self, key: bytes) -> None:
        """Never name it until it is unpinned. Raises KeyError if it is not admitted or is pinned."""

    def unpin(self, key: bytes) -> None:
        """It may be named again. Raises KeyError if it is not pinned."""

    def remove(self, key: bytes) -> None:
        """Forget a key, pinned or not, without a ghost. Raises KeyError if it is not admitted."""

    def evict(self) -> bytes | None:
        """Take off and return the key that goes first; None if all that are left are pinned."""

    def check_integrity(self) -> None:
        """Compare the books with themselves; changes nothing, takes time with the number of keys.

        Raises:
            AssertionError: they contradict each other; the message says where.
        """


def check_admission(policy: Policy, key: bytes, size: int) -> None:
    """What every `admit` refuses.

    Raises:
        ValueError: as of `Policy.admit`.
    """
    if key in policy:
        raise ValueError(f"key {key.hex()} is admitted already")
    if not 0 < size <= policy.capacity_bytes - policy.used_bytes:
        raise ValueError(
            f"{size} bytes for key {key.hex()}, but {policy.used_bytes} of {policy.capacity_bytes} are used; "
            "evict before admitting"
        )
