"""What a worker still believes of its engine's names once its weights have changed.

Names of chunks and offers stand for the weights that the engine was started with. The engine is told to reset
its caches when weights change, and from then on its names are new ones. An *epoch* is the time between two
resets; every step says which one it belongs to. Resets and changes come in any order:

    reset, change: the epoch that has begun has seen no old weights, and its names are good
    change, reset: the epoch that ends has seen both; nothing of it is stored or loaded any more

Other engines compare weights at their handshake and never again, so after a change no peer reads here, and
nothing is read from peers.
"""

from __future__ import annotations

from dataclasses import dataclass

CHANGED = "the weights of this engine have changed since it was started"


@dataclass(slots=True)
class StaleEpochs:
    """The epochs whose names are not to be believed. The worker's thread calls it.

    Attributes:
        last: the last of them; None while the weights are those that the engine was started with.
    """

    last: int | None = None
    _at_work: int = 0

    def __contains__(self, epoch: int) -> bool:
        """Return whether the weights have changed in this epoch or later."""
        return self.last is not None and epoch <= self.last

    def works(self, epoch: int) -> None:
        """Note that a step of this epoch computes or loads something."""
        self._at_work = epoch

    def changed(self) -> None:
        """Note that the weights change now. The first epoch is always stale: it is named by their digest."""
        self.last = self._at_work
