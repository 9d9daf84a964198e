"""Choose the devices of a measurement, and find the run length from which a GPU's copy engine is faster."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvferry.common.errors import ConfigError


def source_and_destination(device: str) -> tuple[str, str]:
    """Return the torch devices to read from and into: ``auto`` is ``cuda`` if there is a GPU, else ``cpu``.

    Raises:
        ConfigError: there is no such device.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cpu" or (device == "auto" and not gpus):
        return "cpu", "cpu"
    if device not in ("cuda", "auto"):
        raise ConfigError(f"--device {device} is not known; choose one of auto, cpu, cuda")
    if not gpus:
        raise ConfigError("--device cuda: torch finds no GPU here; choose cpu, or install a driver")
    # Different GPUs if there are two, as those of two engines are.
    return ("cuda:1" if gpus > 1 else "cuda:0"), "cuda:0"


def shortest_engine_run(runs: Sequence[int], kernel: Sequence[float], engine: Sequence[float]) -> int:
    """Return the run length from which the copy engine is at least as fast as the kernel.

    It is as fast for this run and for all longer ones. If the kernel is faster for the longest run, return
    twice the longest run.

    >>> shortest_engine_run([64, 128, 256], kernel=[1.0, 1.0, 1.0], engine=[3.0, 0.9, 0.8])
    128
    >>> shortest_engine_run([64, 128, 256], kernel=[1.0, 1.0, 1.0], engine=[0.9, 0.9, 1.1])
    512

    Args:
        runs: run lengths in bytes, ascending.
        kernel, engine: seconds that each takes to copy the same bytes in runs of each length.
    """
    found = 2 * runs[-1]
    for run, by_kernel, by_engine in sorted(zip(runs, kernel, engine, strict=True), reverse=True):
        if by_engine > by_kernel:
            break
        found = run
    return found
