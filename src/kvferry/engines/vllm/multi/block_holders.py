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
    """Records which child connectors keep blocks of ended requests, so that the workers can be told.

    A child connector is one of the connectors that a `FerryMultiConnector` runs. Only the engine's thread may
    use this class.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._holders: dict[str, set[int]] = {}
        self._warned_of: set[tuple[str, ...]] = set()

    def join(self, request_id: str, endings: Sequence[Ending]) -> Ending:
        """Merge what all child connectors return when a request ends into one result for vLLM.

        Also records which children keep blocks of the request.

        Args:
            request_id: id of the request.
            endings: result of each child, in the order of the children: True if the child keeps blocks, and
                its ``kv_transfer_params`` for the response (None if it has none).

        Returns:
            True if any child keeps blocks, and the ``kv_transfer_params`` of the first child that has some
            (None if no child has any).
        """
        keeps = self.record(request_id, [held for held, _ in endings])
        said = [(name, params) for name, (_, params) in zip(self._names, endings, strict=True) if params]
        self._warn_once(tuple(name for name, _ in said))
        return keeps, said[0][1] if said else None

    def record(self, request_id: str, held: Sequence[bool]) -> bool:
        """Record which child connectors keep blocks of an ended request; return True if any of them does.

        Args:
            request_id: id of the request.
            held: True for each child that keeps blocks, in the order of the children.
        """
        if any(held):
            child_indices = {child_index for child_index, holds in enumerate(held) if holds}
            self._holders.setdefault(request_id, set()).update(child_indices)
        return any(held)

    def take_new(self) -> dict[str, frozenset[int]]:
        """Return the block holders that were recorded since the last call of this method.

        Returns:
            Indices of the child connectors that keep blocks of an ended request, by id of the request.
        """
        holders, self._holders = self._holders, {}
        return {request_id: frozenset(child_indices) for request_id, child_indices in holders.items()}

    def _warn_once(self, names: tuple[str, ...]) -> None:
        if len(names) > 1 and names not in self._warned_of:
            self._warned_of.add(names)
            logger.warning(
                "%s all answer requests with kv_transfer_params; those of %s, the first in connectors, are "
                "what callers get. Blocks that the others keep for a consumer wait for their own deadline",
                ", ".join(names), names[0],
            )  # fmt: skip
