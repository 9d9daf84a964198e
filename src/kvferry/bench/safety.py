"""`kvferry bench safety`: what each protection costs, beside the same work without it, in one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvferry.bench import checksum_cost, curve, lease_cost
from kvferry.bench.safety_cost import Cost, Job
from kvferry.bench.transfer import Machine, machine

PARTS: Mapping[str, Callable[[Job, Callable[[str], None]], list[Cost]]] = {
    "lease": lease_cost.measure,
    "checksum": checksum_cost.measure,
    "curve": curve.measure,
}
"""A protection to what measures it."""


@dataclass(frozen=True, slots=True)
class Measured:
    """All costs, and where they were measured."""

    job: Job
    machine: Machine
    costs: tuple[Cost, ...]


def measure(job: Job, progress: Callable[[str], None]) -> Measured:
    """Measure the parts of a job, one after the other.

    Raises:
        ConfigError: memory or NIXL cannot be had.
        TransferError: something could not be moved.
    """
    costs = [cost for part in job.parts for cost in PARTS[part](job, progress)]
    return Measured(job, machine(), tuple(costs))
