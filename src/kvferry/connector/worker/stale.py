"""Epochs whose KV must not be stored or loaded, because the weights changed in them.

Names of chunks and offers stand for the weights that the engine was started with. When weights change, the
operator has the engine reset its caches, and from then on its names are new ones. An *epoch* is the time
between two resets; every step says which one it belongs to. The reset may come before the change or after it:

    reset, change: the epoch that has begun has computed nothing with old weights, and its names are good
    change, reset: the epoch that ends has used both weights; nothing of it is stored or loaded any more

Other engines compare weights at their handshake and never again. So after a change no peer may read from this
engine, and it reads from none.
"""

from __future__ import annotations

from dataclasses import dataclass

CHANGED = "the weights of this engine have changed since it was started"


@dataclass(slots=True)
class StaleEpochs:
    """The epochs in which the weights changed. The worker's thread calls it.

    Attributes:
        last: the last stale epoch; None while the weights are those that the engine was started with.
    """

    last: int | None = None
    _current: int = 0

    def __contains__(self, epoch: int) -> bool:
        """Return whether the weights have changed in this epoch or later."""
        return self.last is not None and epoch <= self.last

    def on_step(self, epoch: int) -> None:
        """Note the epoch of a step that computes or loads something."""
        self._current = epoch

    def on_weights_changed(self) -> None:
        """Mark the current epoch stale. The first one always is: its names hold the weights' digest."""
        self.last = self._current
