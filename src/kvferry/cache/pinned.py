"""The chunks in host memory that operators have pinned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvferry.tiers.host.tier import HostTier, Slot

# Maximum share of host memory in use that pins may hold, so that other chunks still find room.
_MOST_PINNED = 0.5


class _Pin(NamedTuple):
    slots: Sequence[Slot]
    salt: str


class PinnedChunks:
    """The chunks in host memory that operators have pinned, by name of the pin."""

    def __init__(self, host: HostTier) -> None:
        self._host = host
        self._pins: dict[str, _Pin] = {}
        self._held = 0  # bytes

    def pin(self, name: str, keys: Sequence[bytes], salt: str = "") -> int:
        """Pin those of these chunks that are in host memory. Return their number.

        An earlier pin of the same name is replaced. `keys` are in the order of the prompt: the last chunks,
        beyond the share `_MOST_PINNED`, are not pinned.
        """
        self.unpin(name)
        most = _MOST_PINNED * self._host.capacity_bytes
        slots: list[Slot] = []
        for key in keys:
            slot = self._host.hold(key)
            if slot is None:
                continue
            if self._held + slot.size > most:
                self._host.close(slot)
                break
            self._held += slot.size
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
            self._host.close(slot)
            self._held -= slot.size
        return len(pin.slots)

    def unpin_salt(self, salt: str) -> None:
        """Remove all pins of prompts with a cache salt, because no request can find these chunks any more."""
        for name in [name for name, pin in self._pins.items() if pin.salt == salt]:
            self.unpin(name)

    def clear(self) -> None:
        """Remove all pins, before host memory is cleared."""
        for name in list(self._pins):
            self.unpin(name)
