"""A NIXL agent, reduced to the operations that kvferry uses, and the environment that it is started in.

A READ is a one-sided read of remote memory, as in RDMA, and a WRITE writes to it. `Agent.post` starts either
and may run all of it inside the call, so a hook calls it only for a small READ of an idle engine
(`Lane.read_now`). NIXL cannot cancel a READ or WRITE: its bytes still arrive after its handle is released. So
release a handle only when it has ended, and keep the destination memory until then.
"""

from __future__ import annotations

import ctypes
import ipaddress
import logging
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import cache
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import psutil

from kvferry.common.errors import ConfigError, ProtocolError, TransferError
from kvferry.common.machine import resource
from kvferry.common.threads import on_any_core
from kvferry.common.units import format_bytes
from kvferry.geometry import Region
from kvferry.transport.addresses import IP, PortRange, is_every_address, is_loopback
from kvferry.transport.metadata import parse_metadata

logger = logging.getLogger(__name__)

# Maximum time that the progress thread sleeps. An event wakes the thread at once.
WAIT_MICROSECONDS = 10_000

# Library of the system that NIXL's EFA module links. It needs libibverbs, which needs libnl-route.
LIBRARY = "libefa.so.1"

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the directory of shared memory

# Free bytes in ``/dev/shm`` that suffice for the semaphores and locks of Python and vLLM.
LEAST_BYTES = 1 << 20

# By the name of a resource limit: its least sufficient value, and a message with problem and remedy.
_LIMITS = {
    # The size of an agent's largest queue, rounded up (4,292,720 with the UCX of NIXL 1.5.1).
    "RLIMIT_FSIZE": (5 << 20, "files may have {} bytes (ulimit -f unlimited)"),
    "RLIMIT_NOFILE": (256, "{} files may be open (ulimit -n 65535)"),
    "RLIMIT_AS": (1 << 40, "the address space may have {} bytes (ulimit -v unlimited)"),
}

VARIABLE = "UCX_NET_DEVICES"
PORTS_VARIABLE = "UCX_TCP_PORT_RANGE"
# UCX's settings of TCP connections: connect in the background, and repeat an unanswered request 3 times. With
# 3, Linux 6.18 gave up after 20 s; with its default, not within two minutes. So the blocks of a load that
# waits for a connection are free again before its deadline (`load_timeout_seconds`, 30 s by default).
CONNECTIONS = {"UCX_TCP_CONN_NB": "y", "UCX_TCP_SYN_CNT": "3"}
_lock = threading.Lock()

_BACKEND = "UCX"

Operation: TypeAlias = Literal["READ", "WRITE"]


@cache
def preload() -> bool:
    """Load the system's RDMA libraries, before NIXL is imported. Return whether the system has them."""
    try:
        ctypes.CDLL(LIBRARY, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError:
        return False
    return True


def nixl_package() -> str:
    """Return the package that implements NIXL here, such as ``nixl_cu12``, or raise ImportError."""
    preload()
    from nixl import _api  # noqa: PLC0415 - heavy, and may be missing

    return str(_api.nixl_agent.__module__).rpartition(".")[0]


def sleeping_bindings(bindings: Any) -> Any:
    """Return NIXL's bindings, changed so that progress threads of agents made with them sleep while idle."""

    class _SleepingConfig(bindings.nixlAgentConfig):  # type: ignore[misc]
        def __setattr__(self, field: str, value: Any) -> None:
            super().__setattr__(field, WAIT_MICROSECONDS if field == "pthrDelay" else value)

    return SimpleNamespace(**{**vars(bindings), "nixlAgentConfig": _SleepingConfig})


def make_nixl_agent(name: str, backends: list[str], *, progress: bool) -> Any:
    """Create a ``nixl_agent`` whose progress thread, if any, sleeps while idle, or raise ImportError."""
    preload()
    from nixl import _api  # noqa: PLC0415 - heavy, and may be missing

    # Run the same constructor with other globals, so that other users of NIXL in this process are unaffected.
    others = {**vars(_api), "nixlBind": sleeping_bindings(_api.nixlBind)}
    make = FunctionType(_api.nixl_agent.__init__.__code__, others)
    agent = _api.nixl_agent.__new__(_api.nixl_agent)
    config = _api.nixl_agent_config(enable_prog_thread=progress, backends=backends)
    with on_any_core():
        try:
            make(agent, name, config, False)  # noqa: FBT003
        except (AttributeError, TypeError) as error:
            logger.warning(
                "this NIXL differs from 1.5.1 (%s), so its progress thread takes a core; install nixl 1.5.1",
                error,
            )
            return _api.nixl_agent(name, config)
    return agent


def missing_requirements(
    stat: Callable[[str], Any] | None = None, limits: Mapping[int, int] | None = None
) -> Iterator[str]:
    """Yield the problems of this machine that may prevent a NIXL agent from starting, each with its remedy.

    `limits` has the value of each resource limit, negative if unlimited; None for those of this process.
    """
    try:
        found = (stat or os.statvfs)(SHARED_MEMORY)
    except OSError as error:
        yield f"{SHARED_MEMORY} cannot be used: {os.strerror(error.errno or 0)} (mount a tmpfs there)"
    else:
        free = found.f_bavail * found.f_frsize
        if found.f_flag & os.ST_RDONLY:
            yield f"{SHARED_MEMORY} is mounted read-only (mount a tmpfs there for writing)"
        elif free < LEAST_BYTES:
            yield f"{SHARED_MEMORY} has {format_bytes(free)} free (docker: --shm-size=1g)"
    for name, (least, text) in _LIMITS.items():
        limit = getattr(resource, name)
        allowed = resource.getrlimit(limit)[0] if limits is None else limits.get(limit, -1)
        if 0 <= allowed < least:
            yield text.format(f"{allowed:,}")


class ReadState(Enum):
    """State of a READ or WRITE. The values are NIXL's names."""

    IN_FLIGHT = "PROC"
    DONE = "DONE"
    FAILED = "ERR"


class Agent:
    """A NIXL agent, reduced to the operations that kvferry uses."""

    def __init__(self, name: str, *, progress: bool = True) -> None:
        """Start a NIXL agent with the UCX backend. Raise ConfigError if that is not possible here.

        Args:
            name: unique among all agents that ever communicate.
            progress: True to run NIXL's progress thread, which an agent needs if peers read from it. An agent
                that only reads polls the transport itself, and the thread would slow down the start of READs.
        """
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
        self.name = name
        try:
            self._nixl: Any = make_nixl_agent(name, [_BACKEND], progress=progress)
        except ImportError as error:
            raise ConfigError(f"NIXL cannot be imported ({error}); install the package nixl") from error
        except Exception as error:
            why = (
                " and ".join(missing_requirements())
                or "UCX's lines before this one say why; kvferry doctor may say more"
            )
            raise ConfigError(f"NIXL does not start here ({error}): {why}") from error
        if not self._nixl.backends:
            raise ConfigError(
                f"NIXL has no backend {_BACKEND}; it offers {self._nixl.plugin_list}; "
                "install the wheel of NIXL, which has it"
            )
        self._registered: list[Any] = []
        # NIXL knows a peer by its name, so two connections to one run of a peer share it.
        self._uses: Counter[str] = Counter()

    def register(self, regions: Sequence[Region]) -> None:
        for memory in sorted({region.memory for region in regions}):  # a registration has one kind of memory
            rows = [(r.address, r.length, r.device, "") for r in regions if r.memory == memory]
            self._registered.append(self._nixl.register_memory(rows, memory))

    def metadata(self) -> bytes:
        """Return the metadata that lets another agent read this agent's memory. Send it to peers only."""
        metadata = bytes(self._nixl.get_agent_metadata())
        try:
            parse_metadata(metadata)
        except ProtocolError as error:
            raise ConfigError(
                f"this NIXL does not write metadata as 1.5 does ({error}), so no peer could check it; "
                "install nixl 1.5"
            ) from error
        return metadata

    def add_peer(self, metadata: bytes) -> str:
        """Load the metadata of another agent, which may be hostile, and return that agent's name."""
        # NIXL aborts the process on metadata that it cannot use, so it gets nothing unparsed.
        sealed = parse_metadata(metadata).sealed
        try:
            name = self._nixl.add_remote_agent(sealed)
        except Exception as error:
            raise TransferError(f"NIXL cannot use the peer's metadata: {error}") from error
        name = name.decode() if isinstance(name, bytes) else str(name)
        self._uses[name] += 1
        return name

    def drop_peer(self, name: str) -> None:
        """Undo one `add_peer` of this name. The last removes the peer: none of its READs may be in flight."""
        self._uses[name] -= 1
        if not self._uses[name]:
            self._nixl.remove_remote_agent(name)

    def prepare(self, owner: str | None, region: Region, rows: npt.NDArray[np.int64]) -> Any:
        """Prepare a list of descriptors, of which transfers select some by index, and return NIXL's handle.

        Args:
            owner: name of the peer that owns the memory; None for this agent.
            region: gives the list its memory kind and device.
            rows: int64 of shape (n, 4). Each row stands for evenly spaced descriptors: address of the first,
                length and distance in bytes, and number. They are numbered from 0, row after row.
        """
        table = np.empty((len(rows), 5), np.uint64)
        table[:, :2], table[:, 2], table[:, 3:] = rows[:, :2], region.device, rows[:, 2:]
        return self._nixl.prep_xfer_dlist(owner or "NIXL_INIT_AGENT", table, region.memory)

    def transfer(
        self,
        operation: Operation,
        local: Any,
        local_indices: npt.NDArray[np.int32],
        remote: Any,
        remote_indices: npt.NDArray[np.int32],
    ) -> Any:
        """Return the handle of a READ or WRITE for `post`.

        Indices are int32 of shape (n,), pairs of equal length. When a WRITE is DONE, its bytes are in remote
        memory.
        """
        # NIXL's UCX backend flushes the endpoint behind a WRITE, and waits for it (`sendXferRange`).
        return self._nixl.make_prepped_xfer(operation, local, local_indices, remote, remote_indices)

    def post(self, handle: Any) -> ReadState:
        """Start a READ or WRITE and return its state. The call may block for as long as that takes."""
        return ReadState(self._nixl.transfer(handle))

    def state(self, handle: Any) -> ReadState:
        """Poll a READ or WRITE. If the transport raises an exception, it has FAILED."""
        try:
            return ReadState(self._nixl.check_xfer_state(handle))
        except Exception as error:  # noqa: BLE001 - any exception means that the READ failed
            logger.debug("transport error while polling: %s", error)
            return ReadState.FAILED

    def release(self, handle: Any) -> None:
        """Release the handle of a READ or WRITE, which must not be IN_FLIGHT."""
        try:
            self._nixl.release_xfer_handle(handle)
        except Exception as error:  # noqa: BLE001 - the READ has ended, so no more bytes can arrive
            logger.debug("transport error while releasing a read: %s", error)

    def release_list(self, handle: Any) -> None:
        """Release a prepared list. No READ in flight may use it."""
        self._nixl.release_dlist_handle(handle)

    def close(self) -> None:
        """Deregister all memory and end the agent. No READ from or to it may be in flight. Idempotent."""
        for descriptors in self._registered:
            self._nixl.deregister_memory(descriptors)
        self._registered.clear()
        # Some transports answer READs in the progress thread without looking up the registration.
        self._nixl = None


def devices_for(host: str, infiniband: Path = Path("/sys/class/infiniband")) -> tuple[str, ...]:
    """Return the network devices to which UCX is restricted; empty for no restriction.

    For a loopback address, these are the loopback devices; for any other, the devices that have it, and all
    RDMA devices. There is no restriction if `host` stands for every address, or no device has it.
    """
    if is_every_address(host):
        return ()
    if is_loopback(host):
        devices = psutil.net_if_stats().items()
        return tuple(name for name, has in devices if "loopback" in has.flags.split(","))
    if not (found := _with_address(host)):
        return ()
    # As UCX spells RDMA devices: device:port.
    ports = sorted(f"{port.parent.parent.name}:{port.name}" for port in infiniband.glob("*/ports/*"))
    return (*found, *ports)


def is_local_address(host: str) -> bool:
    """Return whether an address, or a name that resolves to one, belongs to this machine."""
    return is_loopback(host) or bool(_with_address(host))


@contextmanager
def restrict_ucx_to(host: str, ports: PortRange | None = None) -> Iterator[None]:
    """Restrict NIXL agents that are created in the ``with`` statement to devices of a host, and to ports."""
    with _lock:
        for name, where, setting, value in (
            (VARIABLE, "the devices", "host", host),
            (PORTS_VARIABLE, "ports", "ports", ports),
        ):
            if value is not None and (given := os.environ.get(name)) is not None:
                logger.info(
                    "UCX listens on %s of %s=%s, whatever %s says (%s)", where, name, given, setting, value
                )
        chosen = ucx_environment(host, ports)
        # UCX reads its settings when an agent is created, and only from the environment.
        os.environ.update(chosen)
        try:
            yield
        finally:
            for name in chosen:
                os.environ.pop(name, None)


def ucx_environment(host: str, ports: PortRange | None = None) -> dict[str, str]:
    """Return the variables that restrict UCX, and its waits, but none that the operator has set."""
    devices, range_text = ",".join(devices_for(host)), "" if ports is None else str(ports)
    wanted = {VARIABLE: devices, PORTS_VARIABLE: range_text, **CONNECTIONS}
    return {name: value for name, value in wanted.items() if value and name not in os.environ}


def addresses() -> Iterator[tuple[str, IP]]:
    """Yield (name of the device, address) for every IP address of this machine."""
    for name, has in psutil.net_if_addrs().items():
        for one in has:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                # A further address may have a label ("eth0:1"); a link-local address names its device
                # ("%eth0").
                yield name.partition(":")[0], ipaddress.ip_address(one.address.partition("%")[0])


def _with_address(host: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    wanted = {ipaddress.ip_address(str(place[0]).partition("%")[0]) for *_, place in found}
    return tuple(sorted({name for name, address in addresses() if address in wanted}))
