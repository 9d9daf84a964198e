"""One shared lease for all samples of a prompt (``n`` above 1).

The engine turns each sample into a request of its own, and each computes the prompt. The response carries the
offer of only one of them, so leases of the others would keep blocks until they expire. Therefore the first
sample that ends gets a lease, and the others repeat its offer, because they have the same prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class Siblings:
    """The offers that the samples of a prompt share. Each is kept until its lease ends."""

    def __init__(self, parent_of: Callable[[str], str | None]) -> None:
        """Create the record without offers.

        Args:
            parent_of: function from a request id to the id that all samples of one prompt share; None for a
                request that is not one of several samples.
        """
        self._parent_of = parent_of
        self._offers: dict[str, tuple[str, dict[str, Any]]] = {}

    def __len__(self) -> int:
        """Return the number of prompts whose samples share a lease."""
        return len(self._offers)

    def offered(self, request_id: str, offer: dict[str, Any]) -> None:
        """Remember the offer of a request whose lease was granted, if it is one of several samples."""
        if (parent := self._parent_of(request_id)) is not None:
            self._offers[parent] = request_id, offer

    def offer_of(self, request_id: str) -> dict[str, Any] | None:
        """Return the offer of another sample of the same prompt; None if there is none."""
        _, offer = self._offers.get(self._parent_of(request_id) or "", ("", None))
        return offer

    def lease_of(self, request_id: str) -> str | None:
        """Return the name of the lease that the samples of this prompt share; None if there is none."""
        name, _ = self._offers.get(self._parent_of(request_id) or "", (None, None))
        return name

    def ended(self, leases: Iterable[str]) -> None:
        """Forget the offers of leases that have ended."""
        for name in leases:
            parent = self._parent_of(name)
            if parent is not None and self.lease_of(name) == name:
                del self._offers[parent]
