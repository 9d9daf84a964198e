"""One shared lease for all samples of a prompt (``n`` above 1).

The engine turns each sample into a request of its own, and each computes the prompt. The response carries the
offer of only one of them, so leases of the others would keep blocks until they expire. Therefore the first
sample that ends gets a lease, and the others repeat its offer, because they have the same prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class Siblings:
    """Record of the KV offers that the samples of a prompt share (``n`` above 1).

    The engine computes each sample as a separate request. The first sample that ends gets a lease on its
    blocks. The responses of the other samples repeat the offer of these blocks. The record keeps an offer
    until its lease ends.
    """

    def __init__(self, parent_of: Callable[[str], str | None]) -> None:
        """Create an empty collection of offers.

        Args:
            parent_of: function that takes a request id and returns the id that all samples of its prompt
                share. It returns None for a request whose prompt is sampled only once.
        """
        self._parent_of = parent_of
        self._offers: dict[str, tuple[str, dict[str, Any]]] = {}

    def __len__(self) -> int:
        """Return the number of prompts whose samples share a lease on KV blocks."""
        return len(self._offers)

    def offered(self, request_id: str, offer: dict[str, Any]) -> None:
        """Remember a request's offer of KV if the request is one of several samples of a prompt.

        Args:
            request_id: id of the request, which is also the name of the lease on the request's blocks.
            offer: ``kv_transfer_params`` of the request's response.
        """
        if (parent := self._parent_of(request_id)) is not None:
            self._offers[parent] = request_id, offer

    def offer_of(self, request_id: str) -> dict[str, Any] | None:
        """Return the offer that another sample of the request's prompt has made; None if there is none.

        An offer is the ``kv_transfer_params`` of a response.
        """
        _, offer = self._offers.get(self._parent_of(request_id) or "", ("", None))
        return offer

    def lease_of(self, request_id: str) -> str | None:
        """Return the name of the lease that the samples of the request's prompt share; None if there is none.

        The lease keeps KV blocks allocated until another engine has read them.
        """
        name, _ = self._offers.get(self._parent_of(request_id) or "", (None, None))
        return name

    def ended(self, leases: Iterable[str]) -> None:
        """Forget the offers of KV blocks whose leases have ended.

        Args:
            leases: names of the leases.
        """
        for name in leases:
            parent = self._parent_of(name)
            if parent is not None and self.lease_of(name) == name:
                del self._offers[parent]
