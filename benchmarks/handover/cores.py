"""Bind the computing thread of an engine on a CPU to a core.

vLLM binds the threads that compute, unless it is told not to (`nobind`), as here, because two engines share
few cores. NixlConnector then binds its worker's thread, which also computes, to the last core, whatever else
runs there. With any other connector the thread would move between cores. On a machine of two cores, a forward
pass took 1.3 times as long then.
"""

from __future__ import annotations

import os
from functools import wraps
from typing import Any

_VARIABLE = "KVFERRY_BENCHMARK_CORE"
_ANY = ""


def core_environment(*, first: bool, threads: int) -> dict[str, str]:
    """Return the environment of an engine whose thread is bound to the first or to the last core.

    Several computing threads, of one rank or of several, are left to any core.
    """
    return {_VARIABLE: _ANY if threads > 1 else "0" if first else "-1"}


def bind_thread() -> None:
    """Bind the thread that computes in this process to the core that `_VARIABLE` names, after the start."""
    from vllm.v1.worker.cpu_worker import CPUWorker  # noqa: PLC0415 - imports vLLM

    index, cores = os.environ[_VARIABLE], sorted(os.sched_getaffinity(0))
    warm_up = CPUWorker.compile_or_warm_up_model

    # The last call before an engine serves. NixlConnector has bound the thread by then.
    @wraps(warm_up)
    def compile_or_warm_up_model(self: Any) -> Any:
        found = warm_up(self)
        os.sched_setaffinity(0, cores if index == _ANY else cores[int(index) :][:1])
        return found

    CPUWorker.compile_or_warm_up_model = compile_or_warm_up_model
