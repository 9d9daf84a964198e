"""Chunks in host memory that an operator has pinned, so that they are not evicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.cache.chunk_cache import ChunkCache
from kvferry.tiers.host.tier import Slot

MOST_PINNED = 0.5
"""Maximum share of host memory in use that pins may hold, so that other chunks still find room."""


@dataclass(frozen=True, slots=True)
class _Pin:
    """The chunks in host memory that one pin holds, and the cache salt of their prompt."""

    slots: Sequence[Slot]
    salt: str


class PinnedChunks:
    """The pins of operators, by name. Only the engine's thread calls it.

    Args:
        cache: chunks in host memory.
        chunk_bytes: bytes of a chunk, for each KV cache group.
    """

    def __init__(self, cache: ChunkCache, chunk_bytes: Sequence[int]) -> None:
        self._cache, self._chunk_bytes = cache, tuple(chunk_bytes)
        self._pins: dict[str, _Pin] = {}
        self._held = 0

    def pin(self, name: str, keys: Sequence[bytes], salt: str = "") -> int:
        """Pin those of these chunks that are in host memory. Return their number.

        An earlier pin of the same name is replaced. Chunks beyond the share `MOST_PINNED` are not pinned.

        Args:
            name: name of the pin.
            keys: keys of the chunks, the first chunk of the prompt first.
            salt: cache salt of the prompt; empty without one.
        """
        self.unpin(name)
        most = MOST_PINNED * self._cache.host.capacity_bytes
        slots: list[Slot] = []
        for key in keys:
            slot = self._cache.hold(key)
            if slot is None:
                continue
            if self._held + self._chunk_bytes[slot.group] > most:
                self._cache.close(slot)
                break
            self._held += self._chunk_bytes[slot.group]
            slots.append(slot)
        if slots:
            self._pins[name] = _Pin(slots, salt)
        return len(slots)

    def unpin(self, name: str) -> int:
        """Remove a pin. Return the number of chunks that it held; 0 if there is no pin of this name."""
        pin = self._pins.pop(name, None)
        if pin is None:
            return 0
        # In reverse order, so that the end of the prompt is evicted before its start.
        for slot in reversed(pin.slots):
            self._cache.close(slot)
            self._held -= self._chunk_bytes[slot.group]
        return len(pin.slots)

    def unpin_salt(self, salt: str) -> None:
        """Remove all pins of prompts with a cache salt, because no request can find these chunks any more."""
        for name in [name for name, pin in self._pins.items() if pin.salt == salt]:
            self.unpin(name)

    def clear(self) -> None:
        """Remove all pins, before host memory is cleared."""
        for name in list(self._pins):
            self.unpin(name)
