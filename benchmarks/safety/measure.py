"""`benchmarks safety`: measure the cost of each protection, with it and without it in one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.safety import checksum as checksum_cost, curve, encryption, lease as lease_cost, verify
from benchmarks.safety.cost import ProtectionCost, SafetyJob
from kvferry.tools.measuring.rounds import MachineFacts, machine_facts

PARTS: Mapping[str, Callable[[SafetyJob, Callable[[str], None]], list[ProtectionCost]]] = {
    "lease": lease_cost.measure,
    "verify": verify.measure,
    "checksum": checksum_cost.measure,
    "encrypt": encryption.measure,
    "curve": curve.measure,
}
"""Functions that measure the cost of a protection, by its name."""


@dataclass(frozen=True, slots=True)
class MeasuredSafety:
    """The results of the benchmark: its settings, the machine, and the costs of all protections."""

    job: SafetyJob
    machine: MachineFacts
    costs: tuple[ProtectionCost, ...]


def measure(job: SafetyJob, progress: Callable[[str], None]) -> MeasuredSafety:
    """Measure the costs of all protections in the job, one after the other.

    Args:
        job: protections and settings.
        progress: function that is called with a line of text before each step.

    Raises:
        ConfigError: memory or NIXL cannot be used.
        TransferError: something could not be moved.
    """
    costs = [cost for part in job.parts for cost in PARTS[part](job, progress)]
    return MeasuredSafety(job, machine_facts(), tuple(costs))
