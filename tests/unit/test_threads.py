"""Tests that kvferry's threads run on all cores of the process, wherever their starter is bound."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from kvferry.common.machine import usable_cores
from kvferry.common.threads import Thread, on_any_core

CORES = os.sched_getaffinity(0)
WORKER = """
import multiprocessing, os, sys
from kvferry.common.threads import Thread

def work():
    import torch  # OpenMP binds this thread
    bound = os.sched_getaffinity(0)
    thread = Thread(lambda: print(bound, os.sched_getaffinity(0)), "test")
    thread.start()
    thread.join()

if __name__ == "__main__":
    os.environ["GOMP_CPU_AFFINITY"] = sys.argv[1]
    worker = multiprocessing.get_context("spawn").Process(target=work)
    worker.start()
    worker.join()
"""


@pytest.fixture
def bound_core() -> Iterator[int]:
    """Bind the test's thread to one core, as an engine on a CPU binds the thread that computes."""
    os.sched_setaffinity(0, {core := max(CORES)})
    yield core
    os.sched_setaffinity(0, CORES)


@pytest.fixture
def _unbound_thread() -> Iterator[None]:
    """A thread that was started before, as libraries do."""
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    yield
    ended.set()
    thread.join()


@pytest.mark.usefixtures("_unbound_thread")
def test_threads_of_a_bound_thread_run_on_all_cores(bound_core: int) -> None:
    found: list[set[int]] = []

    def run() -> None:
        found.append(os.sched_getaffinity(0))

    thread = Thread(run, "test")
    thread.start()
    thread.join()
    with on_any_core():
        run()
    run()
    assert found == [CORES, CORES, {bound_core}]
    assert usable_cores() == CORES


@pytest.mark.parametrize("restricted", [False, True])
def test_threads_of_a_worker_that_openmp_binds_run_where_its_parent_may(tmp_path, restricted) -> None:
    core = max(CORES)
    (tmp_path / "worker.py").write_text(WORKER)
    command = ["taskset", "--cpu-list", str(core)] if restricted else []
    command += [sys.executable, str(tmp_path / "worker.py"), str(core)]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    assert found == " ".join(map(str, ({core}, {core} if restricted else CORES)))
