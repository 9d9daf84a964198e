"""Run the checks one after another. A check that fails does not keep the others from running."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from benchmarks.gpu_check.busy import check_busy
from benchmarks.gpu_check.content import check_content
from benchmarks.gpu_check.copies import check_copies
from benchmarks.gpu_check.expandable import check_expandable
from benchmarks.gpu_check.host import check_host
from benchmarks.gpu_check.job import GpuCheckJob
from benchmarks.gpu_check.order import check_order
from benchmarks.gpu_check.pair import check_pair
from benchmarks.gpu_check.reads import check_reads
from benchmarks.gpu_check.result import CheckResult, CheckState

CHECKS: Mapping[str, Callable[[GpuCheckJob], CheckResult]] = {
    "reads": check_reads,
    "copies": check_copies,
    "busy": check_busy,
    "host": check_host,
    "order": check_order,
    "content": check_content,
    "expandable": check_expandable,
    "pair": check_pair,
}


@dataclass(frozen=True, slots=True)
class GpuReport:
    """Results of all checks.

    Attributes:
        device: name of the device, and how many there are.
        software: version of each package that takes part; ``missing`` if it is not installed.
        checks: result of each check.
        seconds: time that all checks took.
        on_gpu: True if a GPU was checked.
    """

    device: str
    software: Mapping[str, str]
    checks: tuple[CheckResult, ...]
    seconds: float
    on_gpu: bool = True


def measure(job: GpuCheckJob, parts: Sequence[str], progress: Callable[[str], None]) -> GpuReport:
    """Run checks, and return what they found.

    Args:
        job: device and sizes.
        parts: names of the checks to run, as in `CHECKS`.
        progress: function that is called with a line of text before each check.
    """
    started = time.perf_counter()
    found = []
    for name in parts:
        progress(f"checking {name}")
        try:
            found.append(CHECKS[name](job))
        except Exception as error:  # noqa: BLE001 - whatever fails on a new machine belongs in the report
            found.append(CheckResult(name, CheckState.FAILED, f"{type(error).__name__}: {error}"))
    software = {name: _version(name) for name in ("torch", "triton", "nixl", "kvferry", "vllm")}
    return GpuReport(_device(job), software, tuple(found), time.perf_counter() - started, job.on_gpu)


def _device(job: GpuCheckJob) -> str:
    if not job.on_gpu:
        return "CPU (no GPU was checked)"
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return f"{', '.join(names)}; CUDA {torch.version.cuda}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"
