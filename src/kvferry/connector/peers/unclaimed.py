"""Early end of unclaimed leases.

A consumer claims the lease of an offer as soon as its request arrives. Some offers are never claimed: the
decode engine refuses the request, or the client disconnects between the two engines. Their leases would keep
blocks until they expire. They end earlier in three cases:

- The router says that the KV is unwanted.
- The engine is paused, which vLLM completes only when no lease is held.
- Requests wait for blocks.

A consumer that claims its lease too late finds that it has ended, and computes the prompt.
"""

from __future__ import annotations

from collections.abc import Collection

from kvferry.connector.blocks_wanted import BlocksWanted, choose_leases_to_end
from kvferry.connector.engine import BlockIds, BlockPool, Request
from kvferry.connector.peers.offer import MAX_UNWANTED, read_wanted
from kvferry.planning.select import NULL_BLOCK
from kvferry.transport.lease import LeaseBook

_PAUSED_SECONDS = 1.0
"""Minimum age of an unclaimed lease that ends because of a pause: its ticket may be on its way."""


class UnclaimedLeases:
    """Chooses the unclaimed leases that end early. Only the engine's thread calls it.

    Attributes:
        seconds: minimum age of an unclaimed lease that ends because requests wait for blocks.
        paused: True while the engine is paused.
    """

    def __init__(self, book: LeaseBook, wanted: BlocksWanted) -> None:
        """Create an empty collection of leases. `granted` adds a lease.

        Args:
            book: book of all leases.
            wanted: computes the number of blocks that the largest waiting request needs.
        """
        self.seconds = book.seconds / 4
        self.paused = False
        self._book, self._wanted = book, wanted
        self._pool: BlockPool | None = None
        self._blocks: dict[str, int] = {}
        self._leaving: dict[str, int] = {}
        self._names: dict[str, str] = {}  # the router's name of each lease
        self._leases: dict[str, str] = {}  # lease by name
        self._unwanted: dict[str, None] = {}  # names, the latest last

    def start(self, pool: BlockPool) -> None:
        self._pool = pool

    def on_new_request(self, request: Request) -> None:
        """Record the KV that the router no longer wants, according to its request for a prefill."""
        for name in read_wanted(request.kv_transfer_params).remote_unwanted:
            self._unwanted[name] = None
        # A name may be that of a prompt that is still computed, whose lease then ends at once. Routers
        # send more names over time, so the oldest are forgotten.
        for name in list(self._unwanted)[:-MAX_UNWANTED]:
            del self._unwanted[name]

    def granted(self, lease: str, block_ids: BlockIds, name: str | None = None) -> None:
        """Record a new lease and the number of its blocks.

        Args:
            lease: name of the lease.
            block_ids: leased blocks, for each KV cache group.
            name: the router's name for the KV; None without one.
        """
        if name is not None:
            self._names[lease], self._leases[name] = name, lease
        self._blocks[lease] = len({block for ids in block_ids for block in ids} - {NULL_BLOCK})

    def ended(self, leases: Collection[str]) -> None:
        """Record that leases have ended.

        Their blocks become free after every worker has confirmed the end.
        """
        self._leaving.update({name: self._blocks.pop(name) for name in leases if name in self._blocks})
        for lease in leases:
            if (name := self._names.pop(lease, None)) is not None:
                self._leases.pop(name, None)
                self._unwanted.pop(name, None)

    def on_blocks_freed(self, lease: str) -> None:
        """Record that the engine has freed the blocks of an ended lease."""
        self._leaving.pop(lease, None)

    def leases_given_up(self) -> list[str]:
        """Return the names of unclaimed leases that must end because the router or a pause wants it."""
        unwanted = [self._leases[name] for name in self._unwanted if name in self._leases]
        found = {lease for lease in unwanted if self._book.is_unclaimed(lease)}
        if self.paused:
            found.update(self._book.unclaimed(_PAUSED_SECONDS))
        return [lease for lease in found if lease in self._blocks]

    def leases_to_end(self) -> list[str]:
        """Return the unclaimed leases that must end now because requests wait for blocks.

        These are the oldest, and only as many as are needed to free enough blocks.
        """
        unclaimed = self._book.unclaimed(self.seconds)
        held = {name: self._blocks[name] for name in unclaimed if name in self._blocks}
        return choose_leases_to_end(held, self._lacking_blocks()) if held else []

    def leases_block(self) -> bool:
        """Return whether requests wait for more blocks than will soon be free, while any lease keeps some."""
        # Without leases, requests wait only for running requests, which end by themselves.
        return bool(self._blocks) and self._lacking_blocks() > 0

    def _lacking_blocks(self) -> int:
        """Return how many more blocks the largest waiting request needs than are free or will soon be."""
        if self._pool is None:
            return 0
        return self._wanted.blocks() - self._pool.get_num_free_blocks() - sum(self._leaving.values())
