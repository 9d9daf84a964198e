"""A NIXL agent, reduced to the operations that kvferry uses.

A READ is a one-sided read of remote memory, as in RDMA. `Agent.post` starts it and may run all of it inside
the call, so no engine hook calls it.

NIXL cannot cancel a READ: its bytes still arrive after its handle is released. So release a handle only when
the READ has ended, and keep the destination memory allocated until then.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.errors import ConfigError, ProtocolError, TransferError
from kvferry.geometry import Region
from kvferry.transport.metadata import parse_metadata
from kvferry.transport.nixl_agent import make_nixl_agent
from kvferry.transport.nixl_requirements import missing_requirements

logger = logging.getLogger(__name__)


class ReadState(Enum):
    """State of a READ. The values are NIXL's names."""

    IN_FLIGHT = "PROC"
    DONE = "DONE"
    FAILED = "ERR"


_LOCAL = "NIXL_INIT_AGENT"
_BACKEND = "UCX"


class Agent:
    """A NIXL agent, reduced to the operations that kvferry uses."""

    def __init__(self, name: str, *, progress: bool = True) -> None:
        """Start a NIXL agent with the UCX backend.

        Args:
            name: unique among all agents that ever communicate.
            progress: True to run NIXL's progress thread, which an agent needs if peers read from it. An agent
                that only reads polls the transport itself, and the thread would slow down the start of READs.

        Raises:
            ConfigError: NIXL is missing, cannot start on this machine, or has no UCX backend.
        """
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
        self.name = name
        try:
            self._nixl: Any = make_nixl_agent(name, [_BACKEND], progress=progress)
        except ImportError as error:
            raise ConfigError(f"NIXL cannot be imported ({error}); install the package nixl") from error
        except Exception as error:
            why = (
                " and ".join(missing_requirements())
                or "UCX's lines before this one say why; kvferry doctor may say more"
            )
            raise ConfigError(f"NIXL does not start here ({error}): {why}") from error
        if not self._nixl.backends:
            raise ConfigError(
                f"NIXL has no backend {_BACKEND}; it offers {self._nixl.plugin_list}; "
                "install the wheel of NIXL, which has it"
            )
        self._registered: list[Any] = []
        # NIXL knows a peer by its name, so two connections to one run of a peer share it.
        self._uses: Counter[str] = Counter()

    def register(self, regions: Sequence[Region]) -> None:
        for memory in sorted({region.memory for region in regions}):  # a registration has one kind of memory
            rows = [(r.address, r.length, r.device, "") for r in regions if r.memory == memory]
            self._registered.append(self._nixl.register_memory(rows, memory))

    def metadata(self) -> bytes:
        """Return the metadata that lets another agent read this agent's memory. Send it to peers only.

        Raises:
            ConfigError: the installed NIXL writes a format that peers cannot validate before they load it.
        """
        metadata = bytes(self._nixl.get_agent_metadata())
        try:
            parse_metadata(metadata)
        except ProtocolError as error:
            raise ConfigError(
                f"this NIXL does not write metadata as 1.5 does ({error}), so no peer could check it; "
                "install nixl 1.5"
            ) from error
        return metadata

    def add_peer(self, metadata: bytes) -> str:
        """Load the metadata of another agent and return that agent's name.

        Raises:
            TransferError: NIXL cannot use the metadata, for example because the peer cannot be reached.
            ProtocolError: the data is not valid NIXL metadata.
        """
        # NIXL aborts the process on metadata that it cannot use, so it gets nothing unparsed.
        sealed = parse_metadata(metadata).sealed
        try:
            name = self._nixl.add_remote_agent(sealed)
        except Exception as error:
            raise TransferError(f"NIXL cannot use the peer's metadata: {error}") from error
        name = name.decode() if isinstance(name, bytes) else str(name)
        self._uses[name] += 1
        return name

    def drop_peer(self, name: str) -> None:
        """Undo one `add_peer` of this name. The last removes the peer: none of its READs may be in flight."""
        self._uses[name] -= 1
        if not self._uses[name]:
            self._nixl.remove_remote_agent(name)

    def prepare(self, owner: str | None, region: Region, rows: npt.NDArray[np.int64]) -> Any:
        """Prepare a list of descriptors, from which `read` selects by index, and return NIXL's handle of it.

        Args:
            owner: name of the peer that owns the memory; None for this agent.
            region: one of the owner's registered regions, which gives the list its memory kind and device.
            rows: int64 of shape (n, 4). Each row stands for evenly spaced descriptors of the same length:
                address of the first, length in bytes, distance in bytes from the start of one to the next,
                and their number. The descriptors are numbered from 0, row after row.
        """
        table = np.empty((len(rows), 5), np.uint64)
        table[:, :2], table[:, 2], table[:, 3:] = rows[:, :2], region.device, rows[:, 2:]
        return self._nixl.prep_xfer_dlist(owner or _LOCAL, table, region.memory)

    def read(
        self,
        local: Any,
        local_indices: npt.NDArray[np.int32],
        remote: Any,
        remote_indices: npt.NDArray[np.int32],
    ) -> Any:
        """Create a READ, and return its handle. `post` starts it.

        Args:
            local_indices, remote_indices: descriptors of the prepared lists `local` and `remote`, int32 of
                shape (n,). Those at the same position have the same length.
        """
        return self._nixl.make_prepped_xfer("READ", local, local_indices, remote, remote_indices)

    def post(self, handle: Any) -> ReadState:
        """Start a READ and return its state. The call may block for as long as the READ takes."""
        return ReadState(self._nixl.transfer(handle))

    def state(self, handle: Any) -> ReadState:
        """Poll a READ. If the transport raises an exception, the READ has FAILED."""
        try:
            return ReadState(self._nixl.check_xfer_state(handle))
        except Exception as error:  # noqa: BLE001 - any exception means that the READ failed
            logger.debug("transport error while polling: %s", error)
            return ReadState.FAILED

    def release(self, handle: Any) -> None:
        """Release the handle of a READ, which must not be IN_FLIGHT."""
        try:
            self._nixl.release_xfer_handle(handle)
        except Exception as error:  # noqa: BLE001 - the READ has ended, so no more bytes can arrive
            logger.debug("transport error while releasing a read: %s", error)

    def release_list(self, handle: Any) -> None:
        """Release a prepared list. No READ in flight may use it."""
        self._nixl.release_dlist_handle(handle)

    def close(self) -> None:
        """Deregister all memory and end the agent, so that no peer can read the memory any more. Idempotent.

        No READ from or into this memory may be in flight.
        """
        for descriptors in self._registered:
            self._nixl.deregister_memory(descriptors)
        self._registered.clear()
        # Some transports answer READs in the progress thread without looking up the registration.
        self._nixl = None
