"""Plugins of the servers that `benchmarks handover --served` starts. They run in each process of a server."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from benchmarks.handover.cores import bind_thread
from benchmarks.handover.nixl_plus import favour_nixl
from benchmarks.runners import prepare_runner
from benchmarks.without_amx import turn_amx_off

WITHOUT_AMX = "benchmarks: this process computes without AMX"
SECOND_RUNNER = "benchmarks: this engine has the second model runner"
RESTS = "benchmarks: this engine rests between polls"
BOUND = "benchmarks: the thread of this engine that computes has a core"
NIXL_PLUS = "benchmarks: NixlConnector has a sleeping progress thread, huge pages and polls with rests"


def without_amx() -> None:
    """Turn AMX off in this process, and print `WITHOUT_AMX`."""
    turn_amx_off()
    print(WITHOUT_AMX, file=sys.stderr, flush=True)  # noqa: T201 - goes to the server's log


def second_runner() -> None:
    """Prepare this process for vLLM's second model runner, and print `SECOND_RUNNER`."""
    prepare_runner()
    print(SECOND_RUNNER, file=sys.stderr, flush=True)  # noqa: T201 - goes to the server's log


def rests() -> None:
    """Let a vLLM engine on a CPU in this process rest between polls of its queues, and print `RESTS`."""
    from kvferry.engines.vllm.compat.process import sleep_between_polls  # noqa: PLC0415 - imports vLLM

    config: Any = SimpleNamespace(device_config=SimpleNamespace(device_type="cpu"))
    sleep_between_polls(config)
    print(RESTS, file=sys.stderr, flush=True)  # noqa: T201 - goes to the server's log


def bound() -> None:
    """Bind the computing thread of a vLLM engine in this process to a core, and print `BOUND`."""
    bind_thread()
    print(BOUND, file=sys.stderr, flush=True)  # noqa: T201 - goes to the server's log


def nixl_plus() -> None:
    """Give NixlConnector in this process the advantages of ``nixl+``, and print `NIXL_PLUS`."""
    favour_nixl()
    print(NIXL_PLUS, file=sys.stderr, flush=True)  # noqa: T201 - goes to the server's log
