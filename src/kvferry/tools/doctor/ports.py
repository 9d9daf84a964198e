"""Find the ports that an engine listens on, and who can use them."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from kvferry.tools.doctor.finding import Finding, note, ok

_PROC = Path("/proc")
# The state TCP_LISTEN in the tables of /proc.
_LISTEN = "0A"
# Addresses of sockets that listen on all addresses.
_ANY = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared, not bound
_TABLES = (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6))
_API = "API server"
# The module that runs in this process stands in its command line.
_CHILD = "kvferry.transport.metadata_sandbox"
_SHUT = "let only peers reach it; docs/network.md has a firewall rule and a NetworkPolicy"


@dataclass(frozen=True, slots=True, order=True)
class Port:
    """A listening TCP socket. `address` is an IP address; ``0.0.0.0`` or ``::`` for all addresses."""

    process: int
    address: str
    number: int

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can reach the port."""
        address = ipaddress.ip_address(self.address)
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback


def listening_ports(process: int) -> list[Port]:
    """Return the listening TCP ports of a process; empty if it has ended or belongs to another user."""
    found = _open_files(process)
    return sorted(
        Port(process, address, number)
        for address, number, inode in _sockets(process)
        if f"socket:[{inode}]" in found
    )


def _open_files(process: int) -> set[str]:
    """Return the targets of the links in ``/proc/<process>/fd``, such as ``socket:[4711]``."""
    found = set()
    with suppress(OSError):
        for entry in os.scandir(_PROC / str(process) / "fd"):
            with suppress(OSError):
                found.add(str(Path(entry.path).readlink()))
    return found


def _sockets(process: int) -> Iterator[tuple[str, int, str]]:
    """Yield (IP address, port, inode) of every listening TCP socket in a process's network namespace."""
    # proc(5) describes the format: words of addresses are in the byte order of the machine.
    # psutil reads only this process's network namespace, so it finds no ports of engines in containers.
    for table, family in _TABLES:
        with suppress(OSError):
            for line in (_PROC / str(process) / "net" / table).read_text().splitlines()[1:]:
                columns = line.split()
                if columns[3] == _LISTEN:
                    digits, _, port = columns[1].partition(":")
                    words = [bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8)]
                    yield socket.inet_ntop(family, b"".join(words)), int(port, 16), columns[9]


def network_namespace(process: int) -> str:
    """Return the name of a process's network namespace; empty if this user may not know it."""
    try:
        return str((_PROC / str(process) / "ns" / "net").readlink())
    except OSError:
        return ""


def engine_of(host: str, port: int, namespace_of: Callable[[int], str] = network_namespace) -> dict[int, str]:
    """Return the processes of the engine that listens on an address of this machine.

    Containers have network namespaces of their own, in which engines may listen on equal ports. A process in
    this process's namespace comes first. Without one, the port may be forwarded to a container, and a single
    process that listens on it in another namespace is taken.

    Args:
        host: IP address, or a name that resolves to one.

    Returns:
        Command line of each process, by process id. Empty if no process that this user can inspect listens
        there, or if engines of several containers may.
    """
    here, elsewhere = list[psutil.Process](), dict[str, psutil.Process]()
    own, addresses = namespace_of(os.getpid()), _ip_addresses(host)
    # Once per namespace: a busy machine has thousands of connections and hundreds of processes.
    tables = {own: _sockets_at(os.getpid(), port)}
    for process in psutil.process_iter():
        namespace = namespace_of(process.pid)
        table = tables[own] if namespace == own else tables.get(namespace) or _sockets_at(process.pid, port)
        if namespace != own and table:
            tables[namespace] = table
        bound = {table[name] for name in table.keys() & _open_files(process.pid)} if table else set()
        if namespace == own and bound & (addresses | _ANY):
            here.append(process)
        elif namespace != own and bound:
            elsewhere.setdefault(namespace, process)
    if here:
        return _engine_of_process(here[0])
    return _engine_of_process(*elsewhere.values()) if len(elsewhere) == 1 else {}


def _sockets_at(process: int, port: int) -> dict[str, str]:
    """Return the IP address by socket, as `_open_files` names it, of those that listen on a port."""
    return {f"socket:[{inode}]": address for address, number, inode in _sockets(process) if number == port}


def _engine_of_process(process: psutil.Process) -> dict[int, str]:
    with suppress(psutil.Error):  # a process has just ended
        while (parent := process.parent()) is not None and "vllm" in _command(parent).lower():
            process = parent
        return {one.pid: _command(one) for one in (process, *process.children(recursive=True))}
    return {}


def _ip_addresses(host: str) -> set[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return set()
    return {str(place[0]).partition("%")[0] for *_, place in found}


def _command(process: psutil.Process) -> str:
    """Return the command line of a process; empty if the process has ended or belongs to another user."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def findings(processes: Mapping[int, str], known: Mapping[int, str]) -> list[Finding]:
    """Return findings on an engine's listening ports: their purpose, and who can use them.

    Args:
        processes: command lines of the engine's processes, by process id.
        known: purposes of the ports that accept only clients with the engine's key, by port number.
    """
    seen: dict[tuple[str, int], Port] = {}
    for process in processes:
        for port in listening_ports(process):
            seen.setdefault((port.address, port.number), port)
    # UCX listens on several ports per process: what is the same is said once.
    alike = defaultdict[tuple[str, str, str | None], list[Port]](list)
    for port in seen.values():
        alike[port.address, _role(processes[port.process]), known.get(port.number)].append(port)
    return [_finding(found, role, purpose) for (_, role, purpose), found in alike.items()]


def _finding(found: Sequence[Port], role: str, purpose: str | None) -> Finding:
    """Return the finding on ports of one address. Those with a purpose accept only clients with the key."""
    first = found[0]
    where = f"[{first.address}]" if ":" in first.address else first.address
    numbers = ", ".join(str(port.number) for port in sorted(found, key=lambda port: port.number))
    subject = f"port {where}:{numbers}" if len(found) == 1 else f"{len(found)} ports of {where}"
    listed = f"{numbers}: " if len(found) > 1 else ""
    ids = sorted({port.process for port in found})
    whose = f"process{'es' if len(ids) > 1 else ''} {', '.join(map(str, ids))}, {role}"
    if purpose is not None:
        return ok(subject, f"{listed}{purpose} ({whose}); only clients with the key are let in")
    who = "processes of this machine" if first.is_loopback else "everyone who can reach it"
    if role == _API:
        text = f"vLLM's API, or a channel between its processes ({whose}); open to {who}"
    else:
        text = f"UCX, or vLLM's own ({whose}); open to {who}, who can end the process with random bytes"
    text = f"{listed}{text}"
    return ok(subject, text) if first.is_loopback else note(subject, text, _SHUT)


def _role(command: str) -> str:
    if _CHILD in command:
        return "child process that validates peers' metadata"
    name = command.split(" ", maxsplit=1)[0]
    if name.startswith("VLLM::"):
        return name.partition("_")[0]  # without its rank
    return _API if "vllm" in command.lower() else "unknown"
