"""Describe the machine on which a measurement runs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """The properties of a machine that affect measurements.

    Attributes:
        cores: number of processor cores that this process may use.
        cpu: model name of the processor.
        transports: value of UCX_TLS; None if it is not set.
    """

    cores: int
    cpu: str
    transports: str | None


def machine_facts() -> MachineFacts:
    """Return the properties of this machine and process."""
    # A container may use fewer cores than the machine has.
    return MachineFacts(len(os.sched_getaffinity(0)), _cpu_name(), os.environ.get("UCX_TLS"))


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown processor"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown processor"
