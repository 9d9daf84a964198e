"""Which way bytes take between two processes of this machine, and how fast.

With ``UCX_TLS=^sm`` the two processes read from each other as if they were on different machines, as far as
their own devices go; the network between machines is not in it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvferry.doctor.finding import Finding, bad, note, ok
from kvferry.doctor.limits import Ended, run_python
from kvferry.doctor.machine import devices
from kvferry.doctor.probes import MODULE, said
from kvferry.units import format_bytes

_SECONDS = 90.0
_TABLE = "remote memory read by ucp_get"


@dataclass(frozen=True, slots=True)
class Reads:
    """READs that were timed.

    Attributes:
        way: transports as UCX names them, as ``cma/memory``.
        timed: (descriptors, bytes, seconds) of each.
        machine: where, as `kvferry bench` names it.
    """

    way: tuple[str, ...]
    timed: tuple[tuple[int, int, float], ...]
    machine: Mapping[str, Any]

    @property
    def gigabytes_per_second(self) -> float:
        """Of the largest descriptors."""
        _, moved, seconds = self.timed[-1]
        return moved / seconds / 1e9

    @property
    def words(self) -> str:
        """In few words."""
        parts = [
            f"{moved / seconds / 1e9:.2g} GB/s in pieces of {format_bytes(moved / count)}"
            for count, moved, seconds in self.timed
        ]
        return f"by {' and '.join(self.way) or 'a way UCX does not name'}: {', '.join(parts)}"


def way_of(out: Iterable[str]) -> tuple[str, ...]:
    """What READs go over, as UCX says it where ``UCX_PROTO_INFO`` is set: the configurations of its table."""
    found: dict[str, None] = {}
    inside = False
    for line in out:
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 1:
            inside = cells[0].startswith(_TABLE)
        elif inside and len(cells) == 3 and cells[0] != "Range":
            emulated = " (emulated)" if "emulation" in cells[1] else ""
            found[cells[2] + emulated] = None
    return tuple(found)


def start_reads(transports: str | None) -> Ended:
    """Have two processes read from each other; with this ``UCX_TLS``, None to leave it as it is."""
    variables = {"UCX_PROTO_INFO": "y", "NIXL_LOG_LEVEL": "ERROR"}
    return run_python(
        ["-m", MODULE, "reads"],
        _SECONDS,
        variables if transports is None else {**variables, "UCX_TLS": transports},
    )


def time_reads(ended: Ended) -> Reads | str:
    """What a probe has measured; or why it has not."""
    lines = said(ended.out)
    timed = tuple((n["descriptors"], n["bytes"], n["seconds"]) for n in lines if "descriptors" in n)
    if len(timed) < 2:
        return ended.last_words
    machine: dict[str, Any] = next((line["machine"] for line in lines if "machine" in line), {})
    return Reads(way_of(ended.out.splitlines()), timed, machine)


def check(
    environment: Mapping[str, str] = os.environ, start: Callable[[str | None], Ended] = start_reads
) -> Iterator[Finding | Reads]:
    """READs between two processes: as they are here, and as if they were on two machines."""
    given = environment.get("UCX_TLS")
    here = time_reads(start(None))
    if isinstance(here, str):
        advice = (
            f"UCX_TLS is {given!r}: unset it, or add tcp, which UCX needs for its messages"
            if given
            else "see what UCX says with UCX_LOG_LEVEL=info kvferry bench transfer"
        )
        yield bad("READ of host memory", f"does not work: {here}", advice)
        return
    yield here
    yield ok("READ of host memory", f"{here.words}{f' (UCX_TLS={given})' if given else ''}")
    if given:
        return
    away = time_reads(start("^sm"))
    subject = "READ past shared memory"
    if isinstance(away, str):
        yield bad(subject, f"does not work: {away}", "check the network devices that UCX finds (ucx_info -d)")
        return
    rdma = devices()
    over_tcp = all(way.startswith("tcp/") for way in away.way)
    if rdma and over_tcp:
        yield bad(
            subject,
            f"{away.words}, though there is {', '.join(rdma)}",
            "see why UCX leaves it out: ulimit -l, permissions on /dev/infiniband, UCX_NET_DEVICES",
        )
    elif over_tcp:
        yield note(
            subject,
            f"{away.words}; no RDMA device here, so engines on other machines are read over TCP",
            "measure between the machines themselves before you rely on it",
        )
    else:
        yield ok(subject, f"{away.words}; local, without the network between machines")
