"""READs and WRITEs for threads that wait until they end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvferry.common.errors import TransferError
from kvferry.geometry import Region
from kvferry.planning.descriptors import Int64s
from kvferry.transport.agent import Agent, Operation, ReadState

_SHORTEST_NAP, _LONGEST_NAP = 20e-6, 5e-4


class PostedTransfer:
    """A READ or WRITE that has begun. Any thread may use it, with the lock of its `BlockingTransfers`.

    NIXL cannot cancel it, so its memory must not be used for anything else before it is `over`.
    """

    def __init__(self, agent: Agent, lock: threading.Lock, handle: Any, release: Callable[[], None]) -> None:
        self._agent, self._lock, self._handle = agent, lock, handle
        self._release: Callable[[], None] | None = release
        self._state = agent.post(handle)

    @property
    def over(self) -> bool:
        """Whether no byte moves any more. The first time, NIXL's handles are released."""
        with self._lock:
            if self._state is ReadState.IN_FLIGHT:
                self._state = self._agent.state(self._handle)
            if self._state is ReadState.IN_FLIGHT:
                return False
            if self._release is not None:
                self._release()
                self._release = None
            return True

    def wait(self, seconds: float = float("inf")) -> bool:
        """Block until the transfer is over. Return False if it is not after so many seconds.

        Raises:
            TransferError: it failed. Some of its bytes may still arrive.
        """
        ends, nap = time.monotonic() + seconds, _SHORTEST_NAP
        while not self.over:
            if time.monotonic() >= ends:
                return False
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)
        if self._state is ReadState.FAILED:
            raise TransferError("its memory cannot be reached")
        return True


class BlockingTransfers:
    """READs and WRITEs between registered memory of this process and memory of peers. Any thread may use it.

    NIXL gets one call at a time, which lasts as long as the transfer with some transports.

    Attributes:
        agent: agent with which `memory` is registered.
        lock: held during each call of the agent. Take it for other calls.
    """

    def __init__(self, agent: Agent, memory: Region) -> None:
        self.agent, self.lock, self._memory = agent, threading.Lock(), memory

    def run(
        self, operation: Operation, peer: str, there: Region, ours: Int64s, theirs: Int64s, length: Int64s
    ) -> None:
        """Transfer pieces as `post` does, and block until no byte moves any more.

        Raises:
            TransferError: the transfer failed. Some of its bytes may still arrive.
        """
        if len(length):
            self.post(operation, peer, there, ours, theirs, length).wait()

    def post(
        self, operation: Operation, peer: str, there: Region, ours: Int64s, theirs: Int64s, length: Int64s
    ) -> PostedTransfer:
        """Begin to transfer pieces.

        Args:
            peer: name of the agent that owns the memory `there`.
            ours, theirs, length: address of each piece here and there, and its bytes, int64 of shape (n,). n
                is not 0.

        Raises:
            TransferError: NIXL refuses the transfer, so none of its bytes move.
        """
        undo: list[Callable[[], None]] = []

        def release() -> None:
            for step in reversed(undo):
                step()

        one, numbers = np.ones_like(length), np.arange(len(length), dtype=np.int32)
        with self.lock:
            try:
                rows = np.stack([ours, length, length, one], axis=1)
                local = self.agent.prepare(None, self._memory, rows)
                undo.append(lambda: self.agent.release_list(local))
                rows = np.stack([theirs, length, length, one], axis=1)
                remote = self.agent.prepare(peer, there, rows)
                undo.append(lambda: self.agent.release_list(remote))
                handle = self.agent.transfer(operation, local, numbers, remote, numbers)
                undo.append(lambda: self.agent.release(handle))
                return PostedTransfer(self.agent, self.lock, handle, release)
            except Exception as error:
                release()
                raise TransferError(f"the transport fails: {error}") from error
