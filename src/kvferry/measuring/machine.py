"""The machine that a measurement runs on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Facts about a machine that affect measurements.

    Attributes:
        cores: processor cores that this process may use.
        cpu: model name of the processor.
        transports: value of UCX_TLS, or None if it is not set.
    """

    cores: int
    cpu: str
    transports: str | None


def machine_facts() -> MachineFacts:
    """Return the facts of this machine, as this process sees it."""
    return MachineFacts(len(os.sched_getaffinity(0)), _cpu_name(), os.environ.get("UCX_TLS"))


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown processor"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown processor"
