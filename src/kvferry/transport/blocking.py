"""READs and WRITEs for threads that wait until they end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from kvferry.common.errors import TransferError
from kvferry.geometry import Region
from kvferry.planning.descriptors import Int64s
from kvferry.transport.agent import Agent, Operation, ReadState

_SHORTEST_NAP, _LONGEST_NAP = 20e-6, 5e-4


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
        """Transfer pieces, and block until no byte moves any more.

        Args:
            peer: name of the agent that owns the memory `there`.
            ours, theirs, length: address of each piece here and there, and its bytes, int64 of shape (n,).

        Raises:
            TransferError: the transfer failed. Some of its bytes may still arrive.
        """
        if not len(length):
            return
        undo: list[Callable[[], None]] = []
        one, numbers = np.ones_like(length), np.arange(len(length), dtype=np.int32)
        try:
            with self.lock:
                rows = np.stack([ours, length, length, one], axis=1)
                local = self.agent.prepare(None, self._memory, rows)
                undo.append(lambda: self.agent.release_list(local))
                rows = np.stack([theirs, length, length, one], axis=1)
                remote = self.agent.prepare(peer, there, rows)
                undo.append(lambda: self.agent.release_list(remote))
                handle = self.agent.transfer(operation, local, numbers, remote, numbers)
                undo.append(lambda: self.agent.release(handle))
                state = self.agent.post(handle)
            nap = _SHORTEST_NAP
            while state is ReadState.IN_FLIGHT:
                time.sleep(nap)
                nap = min(2 * nap, _LONGEST_NAP)
                with self.lock:
                    state = self.agent.state(handle)
        except Exception as error:
            raise TransferError(f"the transport fails: {error}") from error
        finally:
            with self.lock:
                for step in reversed(undo):
                    step()
        if state is ReadState.FAILED:
            raise TransferError("its memory cannot be reached")
