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
    """Message from the scheduler half to the worker halves, once per step.

    Attributes:
        engine_id: id of the engine that runs the step.
        orders: loads, stores and other work.
    """

    engine_id: str
    orders: StepOrders = field(default_factory=StepOrders)


@dataclass(slots=True)
class WorkerMeta(KVConnectorWorkerMetadata):
    """Message from the worker halves to the scheduler half, once per step."""

    reports: StepReports = field(default_factory=StepReports)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, WorkerMeta)
        # vLLM merges the messages of all workers into that of the first.
        self.reports.add(other.reports)
        return self

    def __bool__(self) -> bool:
        return bool(self.reports)
