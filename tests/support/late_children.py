"""A FerryMultiConnector on vLLM's scheduler whose children are another project's, and report as tests say."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorTransferResults
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvferry.engines.vllm.multi.completions import Completions
from kvferry.engines.vllm.multi.connector import FerryMultiConnector
from kvferry.engines.vllm.multi.stats import MultiWorkerMeta
from support.clock import Clock
from support.vllm_scheduler import VllmScheduler, WithoutWorkers

CHILDREN, WORKERS, DEADLINE = 2, 2, 10.0


class Foreign(WithoutWorkers):
    """A child of another project: it offers every request all tokens but the last."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        tokens = request.num_tokens - 1 - num_computed_tokens
        return tokens, tokens > 0

    def get_finished_count(self) -> int:
        return WORKERS

    def update_state_after_alloc(self, *_: Any) -> None: ...

    def build_connector_meta(self, _: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, *_: Any) -> tuple[bool, None]:
        return False, None


class Multi(FerryMultiConnector):
    """With the clock of a test.

    Attributes:
        metas: messages that the workers have not had yet.
        ends: number of loads that have ended, by (name of the child, outcome).
    """

    now: ClassVar[Clock] = Clock()

    @staticmethod
    def _clock() -> float:
        return Multi.now()

    sources: ClassVar[tuple[Any, ...]] = ()

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.metas: list[Any] = []
        self.ends = Counter[tuple[str, str]]()

    def get_kv_connector_stats(self) -> Any:
        stats = super().get_kv_connector_stats()
        for metric, name, outcome, count in stats.data["more"] if stats is not None else ():
            self.ends[name, outcome] += count * (metric == "loads")
        return stats

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self.metas.append(meta := super().build_connector_meta(scheduler_output))
        return meta


class LateChildren(VllmScheduler):
    """vLLM's scheduler over two such children on two workers, of which vLLM joins the reports.

    Attributes:
        begun: loads that have begun: (id of the request, index of the child), in order.
    """

    def __init__(self, blocks: int) -> None:
        Multi.now = Clock()
        child = {"kv_connector": "Foreign", "kv_connector_module_path": __name__}
        super().__init__(
            blocks=blocks,
            connector=Multi,
            settings={"connectors": [child] * CHILDREN, "load_timeout_seconds": DEADLINE},
        )
        self.begun: list[tuple[str, int]] = []
        self._workers = [Completions() for _ in range(WORKERS)]
        self._aggregator = KVOutputAggregator(WORKERS)

    def step(self) -> None:
        super().step()
        self.report()

    def report(self, said: dict[int, list[tuple[int, str, bool]]] | None = None) -> None:
        """Let the workers hear the scheduler, and report.

        Args:
            said: by worker, (index of the child, id of the request, whether the load failed) of each report.
        """
        metas, self.connector.metas = self.connector.metas, []
        outputs = []
        for number, worker in enumerate(self._workers):
            for meta in metas:
                worker.expect(meta.loads, meta.holders)
                worker.give_up(meta.given_up)
            reports = [KVConnectorTransferResults() for _ in range(CHILDREN)]
            for child, name, failed in (said or {}).get(number, []):
                reports[child].finished_recving.add(name)
                if failed:
                    reports[child].failed_recving.add(name)
            joined = worker.join(reports)
            heard = KVConnectorOutput(
                finished_recving=joined.finished_recving,
                failed_recving=joined.failed_recving,
                kv_connector_worker_meta=MultiWorkerMeta((None,) * CHILDREN, worker.take_ended()),
            )
            outputs.append(ModelRunnerOutput([], {}, kv_connector_output=heard))
        for meta in metas:
            self.begun += meta.loads.items()
        joined = self._aggregator.aggregate(outputs)
        self.scheduler.update_from_output(SchedulerOutput.make_empty(), joined)
