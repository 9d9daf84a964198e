"""What one lane hands to its connections and reads: agent, memory and settings."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq

from kvferry.geometry import RankGeometry, Region
from kvferry.transport.agent import Agent
from kvferry.transport.settings import TransferSettings
from kvferry.transport.staging import StagingArea


@dataclass(frozen=True, slots=True)
class LaneResources:
    """The agent, memory and settings of a lane. Only the lane's thread uses them.

    Attributes:
        agent: NIXL agent of the lane.
        geometry: KV cache of this rank.
        landing: staging area into which images are read. All lanes share it.
        words: memory into which words of peers are read, uint64 of shape (n,). The lane registers it.
        context: ZeroMQ context of the gather channels.
        free_words: indices of the elements of `words` that packed reads may take. Mutated by them.
        clock: current time in seconds.
    """

    agent: Agent
    geometry: RankGeometry
    landing: StagingArea
    words: npt.NDArray[np.uint64]
    context: zmq.Context[Any]
    free_words: list[int] = field(default_factory=list)
    settings: TransferSettings = field(default_factory=TransferSettings)
    clock: Callable[[], float] = time.monotonic

    @property
    def words_region(self) -> Region:
        return Region(int(self.words.ctypes.data), self.words.nbytes)
