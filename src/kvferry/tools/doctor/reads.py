"""Time READs between two processes of this machine, find UCX's transports for them, and calibrate costs.

READs of host memory are timed on every machine, READs of GPU memory where there is a GPU. The network between
machines is not measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from kvferry.common.errors import KVFerryError
from kvferry.common.files import expanded
from kvferry.common.units import format_bytes
from kvferry.planning import Costs, Strategy
from kvferry.tools.doctor.finding import Finding, ProcessResult, bad, from_error, note, ok, run_python
from kvferry.tools.doctor.machine import devices
from kvferry.tools.doctor.probes import MODULE, parse_output
from kvferry.tools.measuring.rounds import machine_facts
from kvferry.transport import default_costs_path, write_costs

if TYPE_CHECKING:
    from kvferry.tools.measuring.calibrate import CalibrationResult


_SECONDS = 90.0
# Heading of the table in which UCX names the transports of READs, with UCX_PROTO_INFO.
_TABLE = "remote memory read by ucp_get"
# Beginnings of UCX's names of RDMA transports that read GPU memory.
_RDMA = ("rc", "dc", "gga")
# Meaning, scale and unit of each field of `Costs`.
_WHAT = {
    "read_descriptor_seconds": ("READ, per descriptor", 1e6, "µs"),
    "read_byte_seconds": ("READ, per byte", 1e12, "ps"),
    "copy_call_seconds": ("gather or scatter, per call", 1e6, "µs"),
    "copy_run_seconds": ("gather or scatter, per run", 1e9, "ns"),
    "copy_byte_seconds": ("gather or scatter, per byte", 1e12, "ps"),
    "ask_seconds": ("request for a gather", 1e6, "µs"),
    "lanes_work_gain": ("gain of more lanes, short runs", 1, ""),
    "lanes_byte_gain": ("gain of more lanes, long runs", 1, ""),
    "copy_engine_bytes": ("shortest run for a GPU's copy engine", 2**-10, "KiB"),
    "overlap": ("gathering hidden behind reading", 1e2, "%"),
}
_ESTIMATE = (
    "this is an estimate on one machine; kvferry cannot measure between machines, so use a network tool "
    "such as iperf3"
)


@dataclass(frozen=True, slots=True)
class ReadTimings:
    """Measured times of READs between two processes.

    Attributes:
        transports: UCX's names of the transports, for example ``cma/memory``.
        timed: (number of descriptors, total bytes, median seconds) of one READ per size of descriptors, the
            smallest size first.
        strategy: strategy by which kvferry then moved KV between the two processes.
        not_shared: why the processes cannot share host memory; empty if they can.
    """

    transports: tuple[str, ...]
    timed: tuple[tuple[int, int, float], ...]
    machine: Mapping[str, Any]
    strategy: str = ""
    not_shared: str = ""

    @property
    def summary(self) -> str:
        parts = [
            f"{moved / seconds / 1e9:.2g} GB/s in pieces of {format_bytes(moved / count)}"
            for count, moved, seconds in self.timed
        ]
        return (
            f"by {' and '.join(self.transports) or 'a transport that UCX does not name'}: {', '.join(parts)}"
        )

    @property
    def choice(self) -> str:
        """Kvferry's choice for engines of this machine, to be appended to a finding."""
        if self.strategy == Strategy.SHARED:
            return "; engines of this machine copy through shared host memory instead (strategy shared)"
        apart = f", because they cannot share host memory ({self.not_shared})" if self.not_shared else ""
        return f"; engines of this machine read so (strategy {self.strategy}){apart}"


def transport_of(out: Iterable[str], memory: str = "") -> tuple[str, ...]:
    """Return UCX's names of the transports that READs used, e.g. ``cma/memory``.

    `memory` is UCX's name of the kind that was read, e.g. ``cuda``; empty for any.
    """
    found: dict[str, None] = {}
    inside = False
    for line in out:
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        # The heading of a table is one cell; its rows are range, protocol and transport.
        if len(cells) == 1:
            inside = cells[0].startswith(_TABLE) and memory in cells[0]
        elif inside and len(cells) == 3 and cells[0] != "Range":
            emulated = " (emulated)" if "emulation" in cells[1] else ""
            found[cells[2] + emulated] = None
    return tuple(found)


def start_reads(transports: str | None, device: str = "cpu") -> ProcessResult:
    """Time READs between two other processes, and return the result of the first.

    `transports` is the value of ``UCX_TLS``; None leaves the variable as it is.
    """
    variables = {"UCX_PROTO_INFO": "y", "NIXL_LOG_LEVEL": "ERROR"}
    return run_python(
        ["-m", MODULE, "reads", device],
        _SECONDS,
        variables if transports is None else {**variables, "UCX_TLS": transports},
    )


def parse_timings(ended: ProcessResult, memory: str = "") -> ReadTimings | str:
    """Return the times of READs that `start_reads` printed, or the reason why there are none."""
    lines = parse_output(ended.out)
    timed = tuple((n["descriptors"], n["bytes"], n["seconds"]) for n in lines if "descriptors" in n)
    if len(timed) < 2:
        return ended.last_words
    machine: dict[str, Any] = next((line["machine"] for line in lines if "machine" in line), {})
    chosen: dict[str, str] = next((line for line in lines if "strategy" in line), {})
    return ReadTimings(transport_of(ended.out.splitlines(), memory), timed, machine, **chosen)


def check(
    environment: Mapping[str, str] = os.environ,
    start: Callable[[str | None], ProcessResult] = start_reads,
    *,
    several_machines: bool = False,
    rdma_devices: Callable[[], list[str]] = devices,
) -> Iterator[Finding | ReadTimings]:
    """Check READs between two processes with all transports, which are timed, and without shared memory."""
    given = environment.get("UCX_TLS")
    shared = parse_timings(start(None))
    if isinstance(shared, str):
        advice = (
            f"UCX_TLS is {given!r}: unset it, or add tcp, which UCX needs for its messages"
            if given
            else "run UCX_LOG_LEVEL=info kvferry bench transfer, and read UCX's messages"
        )
        yield bad("NIXL reads of host memory", f"does not work: {shared}", advice)
        return
    yield shared
    with_setting = f"{shared.summary}{f' (UCX_TLS={given})' if given else ''}"
    yield ok("NIXL reads of host memory", f"{with_setting}{shared.choice}")
    # The user has chosen the transports: others would say nothing about the engines.
    if given:
        return
    # Without shared memory UCX uses the network devices, as between two machines.
    remote = parse_timings(start("^sm"))
    subject = "NIXL reads without shared memory"
    if isinstance(remote, str):
        advice = "check the network devices that UCX finds (ucx_info -d)"
        yield bad(subject, f"does not work: {remote}", advice)
        return
    rdma = rdma_devices()
    over_tcp = all(transports.startswith("tcp/") for transports in remote.transports)
    if rdma and over_tcp:
        yield bad(
            subject,
            f"{remote.summary}, although this machine has {', '.join(rdma)}",
            "find out why UCX does not use it: ulimit -l, permissions on /dev/infiniband, UCX_NET_DEVICES",
        )
    elif over_tcp:
        found = f"{remote.summary}; no RDMA device here, so engines on other machines are read over TCP"
        yield note(subject, found, _ESTIMATE) if several_machines else ok(subject, found)
    else:
        yield ok(subject, f"{remote.summary}; measured on this machine, without a network between machines")


def check_gpu(
    gpus: Sequence[str], start: Callable[[], ProcessResult] = lambda: start_reads(None, "cuda")
) -> Iterator[Finding]:
    """Check which transport carries GPU memory between two processes, and yield its measured speed."""
    subject = "NIXL reads of GPU memory"
    if not gpus:
        yield ok(subject, "not measured: no GPU here that the installed vLLM uses")
        return
    timed = parse_timings(start(), "cuda")
    if isinstance(timed, str):
        yield bad(
            subject,
            f"does not work: {timed}",
            "check that UCX of the installed NIXL supports this CUDA (ucx_info -d lists cuda_ipc, cuda_copy)",
        )
        return
    where = "between two GPUs" if len(gpus) > 1 else "inside of the only GPU"
    ways = " ".join(timed.transports)
    if "cuda_ipc" in ways:
        directly = f"directly {where} (CUDA IPC, over NVLink where they have it)"
        yield ok(subject, f"{timed.summary}; {directly}{timed.choice}")
    elif any(name.startswith(_RDMA) for name in timed.transports) and "emulated" not in ways:
        yield ok(subject, f"{timed.summary}; directly by RDMA {where}{timed.choice}")
    else:
        yield note(
            subject,
            f"{timed.summary}; UCX bounces it through host memory{timed.choice}",
            "see why UCX has no cuda_ipc: UCX_TLS must allow it, and containers must share the IPC namespace "
            "and see both GPUs",
        )


def _measure(progress: Callable[[str], None]) -> CalibrationResult:
    from kvferry.tools.measuring.calibrate import (  # noqa: PLC0415 - loads torch and NIXL
        CalibrationJob,
        calibrate,
    )

    return calibrate(CalibrationJob(device="auto"), progress)


def calibrate(
    path: str | None,
    progress: Callable[[str], None],
    measure: Callable[[Callable[[str], None]], CalibrationResult] = _measure,
) -> Iterable[Finding]:
    """Measure the costs of transfers, write them to a file, and yield findings with the values."""
    try:
        found = measure(progress)
        file = expanded(path) if path else default_costs_path()
        errors = {
            what: {"median": fitted.median_error, "worst": fitted.worst_error}
            for what, fitted in (("reads", found.reads), ("copies", found.copies))
        }
        facts = {**asdict(machine_facts()), "errors": errors}
        write_costs(file, found.costs, datetime.now(UTC).isoformat(timespec="seconds"), facts)
    except KVFerryError as error:
        yield from_error("calibration", error, "run kvferry doctor, and repair what it finds")
        return
    yield from describe(found)
    yield ok("costs file", f"written to {file}; engines read it when they start")


def describe(found: CalibrationResult) -> Iterable[Finding]:
    """Yield a finding for each cost, and one on how well the costs predict the measured times."""
    built_in = Costs()
    for name, (what, scale, unit) in _WHAT.items():
        here, there = (
            f"{getattr(costs, name) * scale:.3g} {unit}".strip() for costs in (found.costs, built_in)
        )
        yield ok(what, f"{here}; built in: {there}")
    fits = [
        f"{len(fitted.errors)} kinds of {what} within {fitted.median_error:.0%} (median), "
        f"{fitted.worst_error:.0%} (worst)"
        for what, fitted in (("reads", found.reads), ("copies", found.copies))
    ]
    yield ok("prediction", "; ".join(fits))
