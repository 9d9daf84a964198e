"""Devices of one machine, divided among engines, and its ports."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import random
import shutil
import socket
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path

import psutil

from kvferry.common.errors import KVFerryError

# Fraction of the memory that the ranks on a device may use in total. On a CPU this is the whole machine's
# memory, so other programs need the rest.
_GPU_SHARE = 0.9
_CPU_SHARE = 0.5
# As uvicorn's: clients that connect at once must not be refused.
_BACKLOG = 2048
# Ports of well-known servers are below.
_LEAST_PORT = 10_240
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_MEMORY_FLAGS = ("--gpu-memory-utilization", "--kv-cache-memory-bytes", "--num-gpu-blocks-override")


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices that engines can run on."""

    # Indices or UUIDs, in the form of ``CUDA_VISIBLE_DEVICES``; empty for a CPU build of vLLM or a machine
    # without GPUs.
    gpus: tuple[str, ...]
    cores: tuple[int, ...]


def visible_devices() -> Devices:
    """Return the devices that this process may use."""
    return Devices(_visible_gpus(), tuple(sorted(os.sched_getaffinity(0))))


def engine_environments(machine: Devices, ranks: Sequence[int]) -> list[dict[str, str]]:
    """Return environment variables that assign devices to each engine.

    Engines share GPUs only if there are fewer GPUs than workers. On a CPU each worker is bound to an equal
    share of the cores. If there are more workers than cores, none is bound, and each has one thread.

    Args:
        ranks: number of workers of each engine, over all parallel dimensions. On GPUs, no engine may have
            more workers than there are GPUs.
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


def memory_arguments(machine: Devices, ranks: Sequence[int], given: Sequence[str]) -> tuple[str, ...]:
    """Return the vLLM arguments that limit the memory of each engine, so that engines can share a device.

    Return none if `given` already sets the size of the KV cache, or if every worker has its own GPU.
    """
    if any(argument.split("=")[0] in _MEMORY_FLAGS for argument in given):
        return ()
    if not machine.gpus:
        return ("--gpu-memory-utilization", f"{_CPU_SHARE / sum(ranks):.3f}")
    sharers = -(-sum(ranks) // len(machine.gpus))
    return ("--gpu-memory-utilization", f"{_GPU_SHARE / sharers:.3f}") if sharers > 1 else ()


def _slots(ranks: Sequence[int]) -> list[range]:
    # In vLLM's order of ranks: data-parallel outermost, tensor-parallel innermost.
    starts = [sum(ranks[:i]) for i in range(len(ranks))]
    return [range(start, start + count) for start, count in zip(starts, ranks, strict=True)]


def _visible_gpus() -> tuple[str, ...]:
    if vllm_is_for_cpu():
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


def vllm_is_for_cpu() -> bool:
    """Return whether the installed vLLM is a CPU build; True also if vLLM is not installed."""
    try:
        return "cpu" in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return True


class ListenError(KVFerryError):
    """Raised if this process cannot listen on an address."""


def free_ports(count: int) -> list[int]:
    """Return `count` distinct free ports. Another process may take them before the caller uses them."""
    # An engine uses its ports a minute later. The system gives ports of its own range to others meanwhile.
    below = _ports_below_ephemeral()
    candidates = chain(random.sample(below, len(below)), repeat(0))
    with ExitStack() as sockets:
        found = list[int]()
        while len(found) < count:
            sock = sockets.enter_context(socket.socket())
            with suppress(OSError):  # the port is taken
                sock.bind(("127.0.0.1", next(candidates)))
                found.append(sock.getsockname()[1])
        return found


def _ports_below_ephemeral() -> range:
    """Return the ports below those that the system gives to whoever asks for any port."""
    try:
        first = int(_EPHEMERAL_PORTS.read_text().split()[0])
    except OSError:
        first = 0
    return range(_LEAST_PORT, first)


def listen(host: str, port: int) -> socket.socket:
    """Open and return a listening socket. Port 0 is any free port.

    Raises:
        ListenError: the process cannot listen on the address, for example because the port is in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        reason = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE and (holder := _port_holder(port)):
            reason += f" by {holder}"
        raise ListenError(
            f"cannot listen on {host}:{port}: {reason}; choose another --host or --port"
        ) from error
    return sock


def _port_holder(port: int) -> str:
    """Return the process that listens on a port, such as ``nginx (process 71)``; empty if it is not known."""
    with suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (process {connection.pid})"
    return ""


def url_of(sock: socket.socket) -> str:
    """Return the HTTP URL with the address and port of a listening socket, without a trailing slash."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if sock.family == socket.AF_INET6 else f"http://{host}:{port}"
