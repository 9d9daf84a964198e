"""Copies beside a busy stream: how much they stretch a decode step, at the speed of a fast network."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks.gpu_check.copies import BlockCopy
from benchmarks.gpu_check.job import GpuCheckJob, seconds_of
from benchmarks.gpu_check.result import CheckResult, CheckState, Figure, judged
from kvferry.memory.address_space import region_over
from kvferry.memory.device_stream import enter_stream
from kvferry.planning.strategy import LARGEST_SEGMENT_BYTES

MOST_STRETCH = 0.05
BYTES_PER_SECOND = 50e9
"""Speed at which segments are gathered: that of a network of 400 Gbit/s."""

_RUN = 256
_NAME = "copies beside a decode step"


def check_busy(job: GpuCheckJob) -> CheckResult:
    """Replay a CUDA graph like a decode step, alone and while another thread gathers segments.

    Args:
        job: device and sizes.
    """
    if not job.on_gpu:
        return CheckResult(_NAME, CheckState.NOT_RUN, "A CPU has no streams.")
    with torch.cuda.stream(torch.cuda.Stream()):
        graph = _decode(job)
        alone = seconds_of(job, graph.replay)
        with _gathering() as gathered:
            beside = seconds_of(job, graph.replay)
    stretch = beside / alone - 1
    figures = [
        Figure("decode step alone", f"{alone * 1e3:.2f} ms"),
        Figure("segments of 16 MiB gathered beside it", f"{len(gathered)}", "at least 1", bool(gathered)),
        Figure(
            f"decode step stretched, gathering {BYTES_PER_SECOND / 1e9:.0f} GB/s",
            f"{stretch:.1%}",
            f"less than {MOST_STRETCH:.0%}",
            stretch < MOST_STRETCH,
        ),
    ]
    return judged(_NAME, "A CUDA graph was replayed beside gathers on another stream.", figures)


def _decode(job: GpuCheckJob) -> torch.cuda.CUDAGraph:
    """Return a graph of small products and reads of much memory, as long as a decode step."""
    weights = torch.randn(4096, 16384, device="cuda", dtype=torch.bfloat16)
    tokens = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(64, 16384, device="cuda", dtype=torch.bfloat16)
    once = seconds_of(job, lambda: torch.mm(tokens, weights, out=out))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(max(1, int(job.decode_milliseconds * 1e-3 / once))):
            torch.mm(tokens, weights, out=out)
    return graph


@contextmanager
def _gathering() -> Iterator[list[float]]:
    """Gather segments in another thread at a steady speed. Yields the list of the seconds that each took."""
    copy = BlockCopy(_RUN, LARGEST_SEGMENT_BYTES, "cuda:0", "src")
    stop, seconds = threading.Event(), list[float]()

    def gather() -> None:
        enter_stream(region_over(copy.pool))
        due = time.perf_counter()
        while not stop.is_set():
            started = time.perf_counter()
            copy.queue()
            copy.wait()
            seconds.append(time.perf_counter() - started)
            due += LARGEST_SEGMENT_BYTES / BYTES_PER_SECOND
            time.sleep(max(0.0, due - time.perf_counter()))

    thread = threading.Thread(target=gather)
    thread.start()
    try:
        yield seconds
    finally:
        stop.set()
        thread.join()
