"""The arena of another machine than the scheduler's, for its ranks, and over NIXL for the scheduler.

It has the same slots as the arena of the scheduler's machine, at the same offsets. The host tier, in the
scheduler's process, decides for all of them: a slot has the shares of one chunk on all machines.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from kvferry.geometry import Region
from kvferry.memory.shared_memory import SharedFile
from kvferry.tiers.host.arena import Arena
from kvferry.transport.addresses import PortRange
from kvferry.transport.agent import Agent, restrict_ucx_to
from kvferry.transport.lease import new_incarnation


@dataclass(frozen=True, slots=True)
class FarArena:
    """The description of such an arena, by the rank that owns it."""

    handle: SharedFile  # for the other ranks of its machine
    region: Region  # what is allocated and registered of it, at its address in the owner's process
    agent: bytes  # transport metadata of the owner


class ReachableArena:
    """Such an arena, in the process of the rank that owns it.

    Attributes:
        description: for the scheduler's process.
    """

    def __init__(self, size: int, host: str, ports: PortRange | None) -> None:
        """Allocate the arena, wait until its memory is there, and register it with NIXL.

        Args:
            host, ports: as the settings ``host`` and ``ports``.

        Raises:
            ConfigError: the machine has too little memory, or NIXL does not start.
        """
        with ExitStack() as made:
            self.arena = Arena.create(size)
            made.callback(self.arena.close)
            self.arena.wait_allocated()
            with restrict_ucx_to(host, ports):
                agent = Agent(f"kvferry-share/{new_incarnation():x}/{new_incarnation():x}")
            made.callback(agent.close)
            region = Region(self.arena.region.address, self.arena.ready_bytes)
            agent.register([region])
            self.description = FarArena(self.arena.handle, region, agent.metadata())
            self._made = made.pop_all()

    def close(self) -> None:
        """Deregister and unmap the arena. Idempotent."""
        self._made.close()
