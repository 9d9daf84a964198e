"""The core that a hand-over's engine computes on."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.handover.cores import bind_thread, core_environment

CORES = sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("first", "threads", "cores"), [(True, 1, CORES[:1]), (False, 1, CORES[-1:]), (False, 2, CORES)]
)
def test_one_computing_thread_has_a_core_and_several_have_all(first, threads, cores, monkeypatch):
    from vllm.v1.worker.cpu_worker import CPUWorker

    monkeypatch.setattr(CPUWorker, "compile_or_warm_up_model", lambda self: f"{self} is warm")
    for name, value in core_environment(first=first, threads=threads).items():
        monkeypatch.setenv(name, value)
    bind_thread()

    def started():
        # As NixlConnector does.
        os.sched_setaffinity(0, CORES[-1:])
        return CPUWorker.compile_or_warm_up_model("it"), sorted(os.sched_getaffinity(0))

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(started).result() == ("it is warm", cores)
