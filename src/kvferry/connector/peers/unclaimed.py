"""Early end of unclaimed leases when requests wait for blocks.

A consumer claims the lease of an offer as soon as its request arrives. Some offers are never claimed: the
decode engine refuses the request, or the client disconnects between the two engines. Their leases would keep
blocks until they expire, and prompts would wait that long if no other blocks are left. A consumer that claims
its lease too late finds that it has ended, and computes the prompt.
"""

from __future__ import annotations

from collections.abc import Collection

from kvferry.connector.blocks_wanted import BlocksWanted, choose_leases_to_end
from kvferry.connector.engine import BlockIds, BlockPool
from kvferry.planning.select import NULL_BLOCK
from kvferry.transport.lease import LeaseBook


class UnclaimedLeases:
    """Chooses the unclaimed leases that end early because requests of this engine wait for blocks.

    A lease keeps KV blocks allocated for another engine. The lease is unclaimed until the other engine asks
    for the blocks. Only the engine's thread calls the methods.

    Attributes:
        seconds: minimum age in seconds of an unclaimed lease that ends early.
    """

    def __init__(self, book: LeaseBook, wanted: BlocksWanted) -> None:
        """Create an empty collection of leases. `granted` adds a lease.

        Args:
            book: object that grants leases and records which of them are unclaimed.
            wanted: object that computes the number of blocks that the largest waiting request needs.
        """
        self.seconds = book.seconds / 4
        self._book, self._wanted = book, wanted
        self._pool: BlockPool | None = None
        self._blocks: dict[str, int] = {}
        self._leaving: dict[str, int] = {}

    def start(self, pool: BlockPool) -> None:
        """Set the engine's block pool, whose free blocks are counted from now on."""
        self._pool = pool

    def granted(self, lease: str, block_ids: BlockIds) -> None:
        """Record a new lease and the number of its blocks.

        Args:
            lease: name of the lease.
            block_ids: block table of the leased blocks for each KV cache group.
        """
        self._blocks[lease] = len({block for ids in block_ids for block in ids} - {NULL_BLOCK})

    def ended(self, leases: Collection[str]) -> None:
        """Record that leases have ended. Their blocks become free after every worker has confirmed the end.

        Args:
            leases: names of the leases.
        """
        self._leaving.update({name: self._blocks.pop(name) for name in leases if name in self._blocks})

    def on_blocks_freed(self, lease: str) -> None:
        """Record that the engine has freed the blocks of an ended lease.

        Args:
            lease: name of the lease.
        """
        self._leaving.pop(lease, None)

    def leases_to_end(self) -> list[str]:
        """Return the names of unclaimed leases that must end now because requests wait for blocks.

        The oldest leases are chosen, and only as many as are needed to free enough blocks.
        """
        unclaimed = self._book.unclaimed(self.seconds)
        held = {name: self._blocks[name] for name in unclaimed if name in self._blocks}
        return choose_leases_to_end(held, self._lacking_blocks()) if held else []

    def leases_block(self) -> bool:
        """Return whether requests wait for more blocks than will soon be free, while any lease keeps some."""
        return bool(self._blocks) and self._lacking_blocks() > 0

    def _lacking_blocks(self) -> int:
        """Return how many more blocks the largest waiting request needs than are free or will soon be."""
        if self._pool is None:
            return 0
        return self._wanted.blocks() - self._pool.get_num_free_blocks() - sum(self._leaving.values())
