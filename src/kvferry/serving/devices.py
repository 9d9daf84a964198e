"""How the devices of one machine are shared out among engines."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

# What a fleet takes of the memory that its ranks share; on a CPU that memory is everybody else's too.
_GPU_SHARE = 0.9
_CPU_SHARE = 0.5
_MEMORY_FLAGS = ("--gpu-memory-utilization", "--kv-cache-memory-bytes", "--num-gpu-blocks-override")


@dataclass(frozen=True, slots=True)
class Machine:
    """What engines can run on.

    Attributes:
        gpus: CUDA device names as in ``CUDA_VISIBLE_DEVICES``; empty for a machine that computes on its CPU.
        cores: CPU ids that this process may use.
    """

    gpus: tuple[str, ...]
    cores: tuple[int, ...]


def this_machine() -> Machine:
    """The devices that this process may use."""
    return Machine(_visible_gpus(), tuple(sorted(os.sched_getaffinity(0))))


def engine_environments(machine: Machine, ranks: Sequence[int]) -> list[dict[str, str]]:
    """Variables for each engine that give it devices of its own, as far as there are enough.

    vLLM takes them in the order of its ranks: data-parallel outermost, tensor-parallel innermost.

    Args:
        machine: whose devices.
        ranks: workers of each engine, over all its parallel dimensions; on GPUs no more than there are.

    Returns:
        One mapping per engine. On GPUs: as many devices as it has ranks, others than its neighbours' while
        there are enough. On a CPU: an equal share of the cores per rank, or no binding at all where ranks
        outnumber cores.
    """
    if machine.gpus:
        return [
            {"CUDA_VISIBLE_DEVICES": ",".join(machine.gpus[i % len(machine.gpus)] for i in slots)}
            for slots in _slots(ranks)
        ]
    share = len(machine.cores) // sum(ranks)
    if share == 0:
        return [{"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"} for _ in ranks]
    return [
        {
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(
                ",".join(map(str, machine.cores[i * share : (i + 1) * share])) for i in slots
            ),
            "OMP_NUM_THREADS": str(share),
        }
        for slots in _slots(ranks)
    ]


def memory_arguments(machine: Machine, ranks: Sequence[int], given: Sequence[str]) -> tuple[str, ...]:
    """Arguments that keep engines which share memory from each taking nearly all of it.

    Nothing where `given` already sizes the cache, or where every rank has a GPU of its own.
    """
    if any(argument.split("=")[0] in _MEMORY_FLAGS for argument in given):
        return ()
    if not machine.gpus:
        return ("--gpu-memory-utilization", f"{_CPU_SHARE / sum(ranks):.3f}")
    sharers = -(-sum(ranks) // len(machine.gpus))
    return ("--gpu-memory-utilization", f"{_GPU_SHARE / sharers:.3f}") if sharers > 1 else ()


def _slots(ranks: Sequence[int]) -> list[range]:
    """Consecutive rank numbers over all engines: the share of each."""
    starts = [sum(ranks[:i]) for i in range(len(ranks))]
    return [range(start, start + count) for start, count in zip(starts, ranks, strict=True)]


def _visible_gpus() -> tuple[str, ...]:
    if _vllm_is_for_cpu():
        return ()
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip())
    if (tool := shutil.which("nvidia-smi")) is None:
        return ()
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return tuple(str(i) for i in range(count))


def _vllm_is_for_cpu() -> bool:
    """Builds for CPUs are a distribution of its own, or one whose local version says so."""
    try:
        return "cpu" in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return True
