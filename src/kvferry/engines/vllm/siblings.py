"""Samples of one prompt (``n`` above 1) share a lease.

vLLM makes a request of each sample. Each computes the prompt and would offer it, but the response carries the
offer of one of them: the leases of the others would keep blocks until they expire, and nobody would know of
them. So the first sample that ends gets a lease, and the others repeat its offer. They hold the same prompt.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvferry.engines.vllm.compat.request_ids import parent_of


class Siblings:
    """Offers of samples whose leases have not ended, by the request that they are samples of."""

    def __init__(self) -> None:
        self._offers: dict[str, tuple[str, dict[str, Any]]] = {}

    def __len__(self) -> int:
        """Requests of which a sample has a lease."""
        return len(self._offers)

    def offered(self, request_id: str, offer: dict[str, Any]) -> None:
        """A request has got a lease; nothing if it is no sample of several."""
        if (parent := parent_of(request_id)) is not None:
            self._offers[parent] = request_id, offer

    def offer_of(self, request_id: str) -> dict[str, Any] | None:
        """The offer that a sample of the same prompt has made; None if there is none."""
        _, offer = self._offers.get(parent_of(request_id) or "", ("", None))
        return offer

    def lease_of(self, request_id: str) -> str | None:
        """The name of that offer's lease."""
        name, _ = self._offers.get(parent_of(request_id) or "", (None, None))
        return name

    def ended(self, leases: Iterable[str]) -> None:
        """These leases have ended: what they offered is repeated no more."""
        for name in leases:
            parent = parent_of(name)
            if parent is not None and self.lease_of(name) == name:
                del self._offers[parent]
