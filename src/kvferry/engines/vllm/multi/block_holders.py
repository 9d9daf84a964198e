"""Record of ended requests: which children keep their blocks, and the parameters of their responses.

When a request ends, the scheduler half collects the answers of the children here. With the next step, it
tells the workers which children keep blocks of ended requests (`completions`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, TypeAlias

logger = logging.getLogger(__name__)

Ending: TypeAlias = tuple[bool, dict[str, Any] | None]
"""Answer of a connector when a request has ended: (True if it keeps the blocks, ``kv_transfer_params``)."""


class BlockHolders:
    """The children that keep blocks of ended requests. Only the engine's thread may use it."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._holders: dict[str, set[int]] = {}
        self._warned_of: set[tuple[str, ...]] = set()

    def join(self, request_id: str, endings: Sequence[Ending]) -> Ending:
        """Merge what all children return when a request ends, and record which of them keep its blocks.

        Args:
            endings: result of each child, in the order of the children.

        Returns:
            True if any child keeps blocks, and the ``kv_transfer_params`` of the first child that has some
            (None if no child has any).
        """
        keeps = self.record(request_id, [held for held, _ in endings])
        said = [(name, params) for name, (_, params) in zip(self._names, endings, strict=True) if params]
        self._warn_once(tuple(name for name, _ in said))
        return keeps, said[0][1] if said else None

    def record(self, request_id: str, held: Sequence[bool]) -> bool:
        """Record which children keep blocks of an ended request; return True if any of them does.

        Args:
            held: True for each child that keeps blocks, in the order of the children.
        """
        if any(held):
            child_indices = {child_index for child_index, holds in enumerate(held) if holds}
            # A child may tell of blocks twice: at the end of a request, and of its last, partial block.
            self._holders.setdefault(request_id, set()).update(child_indices)
        return any(held)

    def take_new(self) -> dict[str, frozenset[int]]:
        """Return the children that keep blocks, by id of each request that has ended since the last call."""
        holders, self._holders = self._holders, {}
        return {request_id: frozenset(child_indices) for request_id, child_indices in holders.items()}

    def _warn_once(self, names: tuple[str, ...]) -> None:
        # Once for each combination, because every request of a workload has the same one.
        if len(names) > 1 and names not in self._warned_of:
            self._warned_of.add(names)
            logger.warning(
                "%s all answer requests with kv_transfer_params; those of %s, the first in connectors, are "
                "what callers get. Blocks that the others keep for a consumer wait for their own deadline",
                ", ".join(names), names[0],
            )  # fmt: skip
