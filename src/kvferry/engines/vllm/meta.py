"""Messages of the connector, in the classes that vLLM carries between its processes."""

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
    """Handshake of a worker with its scheduler at start.

    Attributes:
        info: facts of its rank.
        built: facts of its models.
    """

    info: WorkerInfo
    built: Built = field(default_factory=Built)


@dataclass(slots=True)
class SchedulerMeta(KVConnectorMetadata):
    """Orders for the workers, once per step.

    Attributes:
        engine_id: the engine whose step it is.
        orders: orders of the scheduler half.
    """

    engine_id: str
    orders: StepOrders = field(default_factory=StepOrders)


@dataclass(slots=True)
class WorkerMeta(KVConnectorWorkerMetadata):
    """Reports of the workers, once per step.

    Attributes:
        reports: reports of all worker halves together.
    """

    reports: StepReports = field(default_factory=StepReports)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Merge another worker's reports into these."""
        assert isinstance(other, WorkerMeta)
        self.reports.add(other.reports)
        return self

    def __bool__(self) -> bool:
        """Return True if there is anything to report."""
        return bool(self.reports)
