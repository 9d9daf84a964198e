"""Messages between the connector's scheduler half and worker halves, as subclasses of vLLM's classes."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.connector.messages import StepOrders, StepReports, WorkerInfo
from kvferry.engines.vllm.built import Built
from kvferry.engines.vllm.compat.contract import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass(frozen=True, slots=True)
class WorkerCard(KVConnectorHandshakeMetadata):
    """Handshake with which a worker describes itself to the connector's scheduler half at the engine's start.

    Attributes:
        info: memory layout, address and settings of the worker's rank.
        built: properties of the model that the worker has built, to compare with those of other engines.
    """

    info: WorkerInfo
    built: Built = field(default_factory=Built)


@dataclass(slots=True)
class SchedulerMeta(KVConnectorMetadata):
    """Message from the connector's scheduler half to its worker halves, once per step.

    Attributes:
        engine_id: id of the engine that runs the step.
        orders: loads, stores and other work for the worker halves.
    """

    engine_id: str
    orders: StepOrders = field(default_factory=StepOrders)


@dataclass(slots=True)
class WorkerMeta(KVConnectorWorkerMetadata):
    """Message from the connector's worker halves to its scheduler half, once per step.

    Attributes:
        reports: reports of a worker half, or of all worker halves after vLLM has merged them.
    """

    reports: StepReports = field(default_factory=StepReports)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Merge the reports of another worker into this object, and return this object."""
        assert isinstance(other, WorkerMeta)
        self.reports.add(other.reports)
        return self

    def __bool__(self) -> bool:
        """Return True if there is anything to report."""
        return bool(self.reports)
