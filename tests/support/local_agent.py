"""A transport between engines of one process: what is prepared is copied when it is posted."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from kvferry.common.errors import TransferError
from kvferry.geometry import Region
from kvferry.transport.agent import ReadState
from kvferry.transport.messages import RankCard


class Trusting:
    """Lets every peer pass: a local agent's metadata is its name."""

    def validate(self, cards: Sequence[RankCard]) -> Future[str]:
        passed = Future[str]()
        passed.set_result("")
        return passed

    def warm_up(self) -> None:
        pass

    def close(self) -> None:
        pass


class LocalAgent:
    """Stands for `Agent`; nothing may be read that is not registered.

    Attributes:
        held: what has been made and not given back.
        before_post: called with the posted READ's source addresses, before anything is copied.
        gate: while it is clear a finished READ is not seen to be finished.
        reads: (source address, bytes) of every descriptor posted, in order.
    """

    known: dict[str, LocalAgent] = {}  # noqa: RUF012 - all of the process

    def __init__(self, name: str) -> None:
        self.name = name
        self.held = {"peers": 0, "lists": 0, "reads": 0}
        self.before_post: Callable[[np.ndarray], object] = lambda sources: None
        self.gate = threading.Event()
        self.gate.set()
        self.reads: list[tuple[int, int]] = []
        self.regions: list[Region] = []
        self.known[name] = self

    def register(self, regions: list[Region]) -> None:
        self.regions += regions

    def metadata(self) -> bytes:
        return self.name.encode()

    def add_peer(self, metadata: bytes) -> str:
        if metadata.decode() not in self.known:
            raise TransferError("no such agent")
        self.held["peers"] += 1
        return metadata.decode()

    def drop_peer(self, name: str) -> None:
        self.held["peers"] -= 1

    def prepare(self, owner: str | None, region: Region, rows: np.ndarray) -> Any:
        address, length, stride, _ = (np.repeat(column, rows[:, 3]) for column in rows.T)
        first = np.repeat(np.cumsum(rows[:, 3]) - rows[:, 3], rows[:, 3])
        address = address + (np.arange(len(address)) - first) * stride
        inside = np.zeros(len(address), bool)
        for registered in (self.known[owner] if owner else self).regions:
            stop = registered.address + registered.length
            inside |= (address >= registered.address) & (address + length <= stop)
        if not inside.all():
            raise TransferError("not registered")
        self.held["lists"] += 1
        return address, length

    def transfer(self, operation: str, local: Any, here: np.ndarray, remote: Any, there: np.ndarray) -> Any:
        assert operation == "READ"
        for side, indices in ((local, here), (remote, there)):
            assert indices.dtype == np.int32
            assert ((indices >= 0) & (indices < len(side[0]))).all(), "entries that do not exist"
        assert (local[1][here] == remote[1][there]).all(), "paired entries differ in length"
        self.held["reads"] += 1
        return local[0][here], remote[0][there], local[1][here]

    def post(self, handle: Any) -> ReadState:
        self.before_post(handle[1])
        for to, source, length in zip(*(part.tolist() for part in handle), strict=True):
            ctypes.memmove(to, source, length)
            self.reads.append((source, length))
        return ReadState.IN_FLIGHT

    def state(self, handle: Any) -> ReadState:
        return ReadState.DONE if self.gate.is_set() else ReadState.IN_FLIGHT

    def release(self, handle: Any) -> None:
        assert self.gate.is_set(), "a READ was given back in flight"
        self.held["reads"] -= 1

    def release_list(self, handle: Any) -> None:
        self.held["lists"] -= 1

    def close(self) -> None:
        self.regions.clear()
