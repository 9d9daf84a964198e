"""The device and the sizes of the checks, and how they measure time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kvferry.memory.address_space import AddressSpace

_CALLS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCheckJob:
    """The device to check, and the sizes of the checks.

    Attributes:
        device: ``cuda`` or ``cpu``.
        read_tokens, read_layers: size of the request that is read, in tokens and layers of an 8B model.
        copy_bytes: bytes of a copy.
        copy_runs: run lengths of gathers and scatters, in bytes.
        host_runs: run lengths of copies between GPU and host memory, in bytes, the longest last.
        repeats: number of counted rounds.
        decode_milliseconds: duration of the simulated decode step beside which copies run.
    """

    device: str
    read_tokens: int = 8192
    read_layers: int = 32
    copy_bytes: int = 512 << 20
    copy_runs: tuple[int, ...] = (128, 256, 1024, 4096, 16384)
    host_runs: tuple[int, ...] = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20)
    repeats: int = 9
    decode_milliseconds: float = 20.0

    @property
    def on_gpu(self) -> bool:
        """True if a GPU is checked, False if memory of the CPU stands for a GPU's."""
        return self.device == "cuda"

    @property
    def torch_device(self) -> str:
        """Name of the torch device that is checked."""
        return "cuda:0" if self.on_gpu else "cpu"


SMALL = GpuCheckJob(
    device="cpu",
    read_tokens=256,
    read_layers=2,
    copy_bytes=64 << 10,
    copy_runs=(128, 1024),
    host_runs=(4 << 10, 32 << 10),
    repeats=1,
)
"""The checks in a few seconds, without a GPU."""


class DeviceSpace(AddressSpace):
    """Memory whose copies are those of a GPU, even if it is the CPU's."""

    @property
    def on_host(self) -> bool:
        """False: the copies are those of a GPU."""
        return False


def seconds_of(job: GpuCheckJob, call: Callable[[], object]) -> float:
    """Return the median seconds of a call that queues work on the current stream, without the first round.

    On a GPU, the time is that between two events of the stream, around several calls: while the GPU executes
    one, the CPU prepares the next.

    Args:
        job: device, and number of rounds.
        call: function that queues the work.
    """
    return float(np.median([_once(job, call) for _ in range(job.repeats + 1)][1:]))


def _once(job: GpuCheckJob, call: Callable[[], object]) -> float:
    if not job.on_gpu:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(_CALLS):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / _CALLS
