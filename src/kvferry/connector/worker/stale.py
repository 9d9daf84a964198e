"""Stale epochs: times in which the model weights changed, so that their KV must not be stored or loaded.

The names of chunks and offers are valid for the weights with which the engine was started. When weights
change, the operator has the engine reset its caches. From then on it uses new names. An *epoch* is the time
between two resets. Each step belongs to one. The reset may come before the change or after it:

    reset, change: the new epoch has computed nothing with the old weights yet, so its names are valid
    change, reset: the old epoch has used both weights, so nothing of it is stored or loaded any more

Engines compare weights only at the handshake. So after a change no peer may read from this engine, and this
engine reads from no peer.

If the engine's KV cache has moved to other memory, all epochs are stale for good, also those that begin
later: transfers and stores know only the memory that was registered. While the engine sleeps, its KV cache
has no memory, so all epochs are stale until it wakes up.
"""

from __future__ import annotations

from dataclasses import dataclass

CHANGED = "the weights of this engine have changed since it was started"
MOVED = "the KV cache of this engine is no longer in the memory that was registered for transfers"
ASLEEP = "this engine sleeps: its KV cache has no memory"


@dataclass(slots=True)
class StaleEpochs:
    """Record of the epochs whose KV must not be stored or loaded. Only the engine's thread calls it.

    Attributes:
        last: number of the last epoch in which the weights changed; None if they have not changed since the
            start.
        moved: True if the KV cache has moved to memory that is not registered.
        asleep: True while the engine sleeps.
    """

    last: int | None = None
    moved: bool = False
    asleep: bool = False
    _current: int = 0

    def __contains__(self, epoch: int) -> bool:
        """Return whether KV of an epoch is stale."""
        return self.moved or self.asleep or (self.last is not None and epoch <= self.last)

    def __bool__(self) -> bool:
        """Return whether any epoch is stale, so that no KV may be exchanged with peers."""
        return self.moved or self.asleep or self.last is not None

    @property
    def reason(self) -> str:
        return MOVED if self.moved else ASLEEP if self.asleep else CHANGED

    def on_step(self, epoch: int) -> None:
        """Record the epoch of a step that computes tokens or begins a load.

        Args:
            epoch: number of cache resets of the engine before the step was scheduled.
        """
        self._current = epoch

    def on_weights_changed(self) -> None:
        """Mark the epoch of the last such step as one in which the weights have changed."""
        # Before the first step this is epoch 0, whose keys are valid only for the weights at the engine's
        # start.
        self.last = self._current
