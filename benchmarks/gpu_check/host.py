"""Copies between the device and host memory, as the host tier makes them, against plain pinned copies."""

from __future__ import annotations

import torch

from benchmarks.gpu_check.job import GpuCheckJob, seconds_of
from benchmarks.gpu_check.result import CheckResult, Figure, judged, ratio_figure
from kvferry.common.errors import TransferError
from kvferry.common.units import format_bytes
from kvferry.tools.measuring.raw_reads import HostCopy

LEAST_OF_PINNED = 0.9
_BY_KERNEL, _BY_ENGINE = 1 << 40, 1


def check_host(job: GpuCheckJob) -> CheckResult:
    """Store and load blocks of several sizes by both ways, compare every byte, and compare speeds.

    Args:
        job: device and sizes.

    Raises:
        TransferError: a byte differs.
    """
    figures: list[Figure] = []
    ways = {"kernel": _BY_KERNEL, "copy engine": _BY_ENGINE} if job.on_gpu else {"host": _BY_KERNEL}
    for run in job.host_runs:
        for way, limit in ways.items():
            made = HostCopy(run, job.copy_bytes, job.torch_device, engine_bytes=limit)
            _compare(made, run, way)
            plain = {
                "store": seconds_of(job, lambda m=made: m.host.copy_(m.pool, non_blocking=True)),  # type: ignore[misc]
                "load": seconds_of(job, lambda m=made: m.pool.copy_(m.host, non_blocking=True)),  # type: ignore[misc]
            }
            for name, move in (("store", made.store), ("load", made.load)):
                seconds = seconds_of(job, move)
                what = f"{name}, blocks of {format_bytes(run)}, {way}"
                goal = job.on_gpu and run == job.host_runs[-1] and way == "copy engine"
                figures.append(Figure(what, f"{made.pool.nbytes / seconds / 1e9:.1f} GB/s"))
                figures.append(
                    ratio_figure(
                        f"{what}: ratio to a pinned copy",
                        plain[name] / seconds,
                        LEAST_OF_PINNED if goal else None,
                    )
                )
    says = "Every byte is right in both directions."
    return judged("host memory", says, figures)


def _compare(made: HostCopy, run: int, way: str) -> None:
    content = torch.randint(0, 256, made.pool.shape, dtype=torch.uint8)
    made.pool.copy_(content)
    made.store()
    wanted = content.view(-1, run)[torch.from_numpy(made.order)]
    if not torch.equal(made.host.view(-1, run), wanted):
        raise TransferError(f"a store of blocks of {run} bytes by the {way} wrote wrong bytes")
    made.pool.zero_()
    made.load()
    if not torch.equal(made.pool.cpu(), content):
        raise TransferError(f"a load of blocks of {run} bytes by the {way} wrote wrong bytes")
