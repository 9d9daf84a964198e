"""`benchmarks safety`: the cost of each protection, on and off in one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.safety import checksum as checksum_cost, curve, lease as lease_cost
from benchmarks.safety.cost import ProtectionCost, SafetyJob
from kvferry.measuring.machine import MachineFacts, machine_facts

PARTS: Mapping[str, Callable[[SafetyJob, Callable[[str], None]], list[ProtectionCost]]] = {
    "lease": lease_cost.measure,
    "checksum": checksum_cost.measure,
    "curve": curve.measure,
}
"""A protection to what measures it."""


@dataclass(frozen=True, slots=True)
class MeasuredSafety:
    """The costs of all protections, and the machine they were measured on."""

    job: SafetyJob
    machine: MachineFacts
    costs: tuple[ProtectionCost, ...]


def measure(job: SafetyJob, progress: Callable[[str], None]) -> MeasuredSafety:
    """Measure the parts of a job, one after the other.

    Raises:
        ConfigError: memory or NIXL cannot be had.
        TransferError: something could not be moved.
    """
    costs = [cost for part in job.parts for cost in PARTS[part](job, progress)]
    return MeasuredSafety(job, machine_facts(), tuple(costs))
