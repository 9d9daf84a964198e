"""Run both routers before the same engines, and take their CPU time per request in turn."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from benchmarks.router.load import request, run_load
from kvferry.common.errors import KVFerryError
from kvferry.tools.serving.devices import free_ports, listen, url_of

_START_SECONDS = 60.0
_CHARACTERS_PER_TOKEN = 4


class RouterStartError(KVFerryError):
    """Raised if a router does not start."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent in each round.

    Attributes:
        requests: number of requests.
        connections: number of requests at a time.
        prompt_tokens: length of the prompt, at four characters per token.
        events: events of a streamed answer.
        rounds: number of rounds of each router, taken in turn.
    """

    requests: int
    connections: int
    prompt_tokens: int
    events: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Cpu:
    """CPU time of one router with one kind of answer.

    Attributes:
        router: name of the router.
        stream: whether answers were streamed.
        milliseconds: CPU time per request, one value for each round.
    """

    router: str
    stream: bool
    milliseconds: tuple[float, ...]


def measure(load: Load, vllm_router: Path | None, folder: Path) -> list[Cpu]:
    """Measure kvferry's router and, if it is installed, `vllm-router`.

    Args:
        load: what to send.
        vllm_router: program of the other router; None to leave it out.
        folder: for the logs of routers.

    Raises:
        RouterStartError: a router did not answer in time.
        BadAnswer: a router answers a request with an error.
    """
    with ExitStack() as stack:
        prefill, decode = (stack.enter_context(_stub(load.events)) for _ in range(2))
        routers = {"kvferry": stack.enter_context(_kvferry(prefill, decode, folder))}
        if vllm_router is not None:
            routers["vllm-router"] = stack.enter_context(_vllm_router(vllm_router, prefill, decode, folder))
        taken: dict[tuple[str, bool], list[float]] = {}
        for number in range(load.rounds + 1):
            for stream in (False, True):
                for name, (url, process) in routers.items():
                    milliseconds = _round(url, process, load, stream=stream)
                    if number:  # the first round warms up
                        taken.setdefault((name, stream), []).append(milliseconds)
    return [Cpu(name, stream, tuple(values)) for (name, stream), values in taken.items()]


def _round(url: str, process: psutil.Process, load: Load, *, stream: bool) -> float:
    raw = request("x" * (load.prompt_tokens * _CHARACTERS_PER_TOKEN), stream=stream)
    before = _cpu_seconds(process)
    asyncio.run(run_load(url, raw, load.requests, load.connections))
    return (_cpu_seconds(process) - before) * 1000 / load.requests


def _cpu_seconds(process: psutil.Process) -> float:
    taken = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return float(sum(one.user + one.system for one in taken))


@contextmanager
def _stub(events: int) -> Iterator[str]:
    with listen("127.0.0.1", 0) as sock:
        command = [sys.executable, "-m", "benchmarks.router.stub", str(sock.fileno()), str(events)]
        with _running(command, pass_fds=[sock.fileno()]):
            yield url_of(sock)


@contextmanager
def _kvferry(prefill: str, decode: str, folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    program = [sys.executable, "-c", "from kvferry.tools.cli.main import main; main()", "router"]
    options = ["--prefill", prefill, "--decode", decode, "--port", "0"]
    with (
        (folder / "kvferry.log").open("w") as log,
        _running([*program, *options], stdout=subprocess.PIPE, stderr=log) as process,
    ):
        line = process.stdout.readline().decode() if process.stdout else ""
        said = re.search(r"http://\S+(?=/v1)", line)
        if said is None:
            raise RouterStartError(f"kvferry's router does not start: {Path(log.name).read_text()[-500:]}")
        yield said[0], psutil.Process(process.pid)


@contextmanager
def _vllm_router(
    program: Path, prefill: str, decode: str, folder: Path
) -> Iterator[tuple[str, psutil.Process]]:
    port, metrics = free_ports(2)
    options = ["--vllm-pd-disaggregation", "--prefill", prefill, "--decode", decode, "--host", "127.0.0.1"]
    options += ["--port", str(port), "--prometheus-port", str(metrics), "--log-level", "warning"]
    with (
        (folder / "vllm-router.log").open("w") as log,
        _running([str(program), *options], stdout=log, stderr=log) as process,
    ):
        deadline = time.monotonic() + _START_SECONDS
        while not _listens(port):
            if time.monotonic() > deadline or process.poll() is not None:
                raise RouterStartError(f"vllm-router does not start: {Path(log.name).read_text()[-500:]}")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)


def _listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def _running(
    command: Sequence[str],
    *,
    pass_fds: Sequence[int] = (),
    stdout: int | IO[str] | None = None,
    stderr: IO[str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command, pass_fds=pass_fds, stdout=stdout, stderr=stderr) as process:
        try:
            yield process
        finally:
            process.kill()
