"""What is taken for granted of the installed vLLM: where it changes, this says so before an engine does."""

from __future__ import annotations

import inspect
import time
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.engines.vllm.version import minor_release, vllm_version

pytestmark = pytest.mark.engine

PATCHED = {"on_pause", "on_sleep", "on_asleep", "rest_seconds"}
"""Members that kvferry adds, which vLLM uses as `compat.scheduler` and `compat.process` make it."""
SINCE = {
    "get_external_cache_hit_sources": "0.32",
    "get_loaded_kv_cache_group_ids": "0.32",
    "supports_sleep_mode": "0.33",
    "unregister_kv_caches": "0.33",
    "restore_kv_caches": "0.33",
}
"""Members of vLLM's connector interface that not every supported release has, and the first that has them."""
GONE_SINCE_0_32 = {"kv_buffer_size", "kv_rank", "kv_parallel_size", "kv_ip"}
"""Keys of vLLM's ``KVTransferConfig`` that only 0.31 has. None of its connectors for version 1 reads them."""


def is_before(first: str | None) -> bool:
    """Whether the installed vLLM is older than the first release that has something."""
    return first is not None and as_numbers(minor_release(vllm_version() or "")) < as_numbers(first)


def as_numbers(release: str) -> list[int]:
    return [int(part) for part in release.split(".")]


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_every_hook_of_the_connector_is_one_of_vllms_with_the_same_arguments() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    from kvferry.engines.vllm.connector import KVFerryConnector
    from kvferry.engines.vllm.scheduler import SchedulerHooks

    assert not inspect.isabstract(KVFerryConnector)
    for name, ours in {**vars(SchedulerHooks), **vars(KVFerryConnector)}.items():
        if name.startswith("_") or name in PATCHED or not inspect.isfunction(ours):
            continue
        if is_before(SINCE.get(name)):
            continue
        theirs = getattr(KVConnectorBase_V1, name, None) or getattr(SupportsHMA, name, None)
        assert theirs is not None, f"vLLM has no hook {name}"
        assert len(parameters(ours)) == len(parameters(theirs)), name


def test_requests_have_a_session_and_hints_that_no_http_request_can_set() -> None:
    import msgspec
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
    from vllm.v1.request import Request

    assert {"session_id", "kv_hints"} <= set(parameters(Request.__init__))
    fields = [one.name for one in msgspec.structs.fields(KvHintAction)]
    assert fields == ["action_id", "action_type", "action_version", "payload"]
    assert "actions" in [one.name for one in msgspec.structs.fields(KvHintsEnvelope)]
    for served in (CompletionRequest, ChatCompletionRequest):
        assert "session_id" in served.model_fields
        assert "kv_hints" not in served.model_fields, "docs/hints.md says so"


def test_the_multi_connector_can_read_our_stats_and_show_them() -> None:
    from prometheus_client import Counter, Gauge, Histogram
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
        MultiConnector,
        MultiKVConnectorPromMetrics,
    )

    from kvferry.engines.vllm.connector import KVFerryConnector
    from kvferry.engines.vllm.messages import FerryStats
    from kvferry.observe.metrics import MetricsDelta

    counted = MetricsDelta()
    counted.count("loads", "peer", "failed")
    sent = {"KVFerryConnector": FerryStats(counted.plain()).to_dict()}
    told = MultiConnector.build_kv_connector_stats(sent).reduce()
    assert told["KVFerryConnector"]["peer failed loads"] == 1
    config = type("Config", (), {"kv_transfer_config": None})
    given = config, {kind: kind for kind in (Counter, Gauge, Histogram)}, ["engine"], {0: ["0"]}
    ours = KVFerryConnector.build_prom_metrics(*given)
    MultiKVConnectorPromMetrics(*given, {"KVFerryConnector": ours}).observe(sent)
    KVFerryConnector.build_prom_metrics(*given)


def test_requests_report_hits_of_the_engines_own_prefix_cache() -> None:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    from kvferry.engines.vllm.compat.requests import VLLMRequest

    request = Request("r", [1, 2, 3], SamplingParams(max_tokens=8), None)
    ours = VLLMRequest(request)
    request.prefill_stats.set(3, 2, 1)
    assert (ours.own_hit, ours.cached_tokens) == (2, 3)
    ours.report_cached_tokens(1)
    assert (ours.own_hit, ours.cached_tokens) == (2, 1)
    request.num_preemptions = 1
    assert ours.own_hit is None
    request.num_preemptions = 0
    request.take_prefill_stats()
    ours.report_cached_tokens(1)
    assert ours.own_hit is ours.cached_tokens is None


def test_requests_report_features_that_leave_their_content_without_a_certain_name() -> None:
    import torch
    from vllm import SamplingParams
    from vllm.v1.request import Request

    from kvferry.common.errors import Unnameable
    from kvferry.connector.content import Adapters, keys_of
    from kvferry.engines.vllm.compat.requests import VLLMRequest

    def named(tokens: list[int] | None = None, **how: Any) -> Any:
        one = Request("r", tokens, SamplingParams(max_tokens=8), None, **how)
        return keys_of(VLLMRequest(one), list(one.all_token_ids), 2, Adapters(), "")

    assert named([1, 2, 3]).chunks()
    for how in ({"tokens": [1, 2, 3], "resumable": True}, {"prompt_embeds": torch.zeros(3, 4)}):
        with pytest.raises(Unnameable):
            named(**how)


def test_workers_list_their_models() -> None:
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker
    from vllm.v1.worker.worker_base import WorkerBase

    for worker in (CPUWorker, Worker):
        assert issubclass(worker, WorkerBase)
        assert parameters(worker.get_model) == parameters(worker.get_draft_model) == ["self"]


def test_requests_have_the_attributes_that_trimming_a_prompt_changes() -> None:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    from kvferry.engines.vllm.compat.requests import VLLMRequest

    request = Request("r", [1, 2, 3], SamplingParams(max_tokens=8), None)
    assert VLLMRequest(request, 1).trim_prompt()
    assert (request.prompt_token_ids, list(request.all_token_ids)) == ([1, 2], [1, 2])
    assert (request.num_prompt_tokens, request.num_tokens, request.max_tokens) == (2, 2, 1)
    alone = Request("s", [1], SamplingParams(max_tokens=8), None)
    assert not VLLMRequest(alone, 1).trim_prompt()
    assert (alone.num_prompt_tokens, alone.max_tokens) == (1, 8)
    for scored in ({"prompt_logprobs": 0}, {"prompt_logprob_token_ids": [[1], [2]]}):
        request = Request("t", [1, 2, 3], SamplingParams(max_tokens=8, **scored), None)
        assert not VLLMRequest(request, 1).trim_prompt(), "each prompt token has logprobs in the answer"
        assert (request.num_prompt_tokens, request.max_tokens) == (3, 8)


def test_block_pool_counts_references_as_pins_need() -> None:
    from vllm.v1.core.block_pool import BlockPool

    pool = BlockPool(8, enable_caching=True, hash_block_size=16)
    blocks = pool.get_new_blocks(3)
    free = pool.get_num_free_blocks()
    pool.touch(blocks)
    pool.free_blocks(blocks)
    assert pool.get_num_free_blocks() == free, "a pinned block went back to the pool"
    pool.free_blocks(blocks)
    assert pool.get_num_free_blocks() == free + 3
    assert pool.null_block.block_id == 0


def test_queues_between_processes_wait_in_the_way_that_is_replaced_on_a_cpu(monkeypatch) -> None:
    from vllm.distributed.device_communicators import shm_broadcast

    from kvferry.engines.vllm.compat.process import sleep_between_polls

    monkeypatch.setattr(shm_broadcast, "sched_yield", shm_broadcast.sched_yield)
    assert "sched_yield()" in inspect.getsource(shm_broadcast.SpinCondition.wait)
    before = shm_broadcast.sched_yield
    sleep_between_polls(SimpleNamespace(device_config=SimpleNamespace(device_type="cuda")))
    assert shm_broadcast.sched_yield is before
    sleep_between_polls(SimpleNamespace(device_config=SimpleNamespace(device_type="cpu")))
    assert shm_broadcast.sched_yield is not before


class RestingLoop:
    """An engine whose step computes nothing although it has requests. It stands for an `EngineCoreProc`."""

    engines_running, batch_queue, connector = False, None, None

    def __init__(self) -> None:
        from kvferry.engines.vllm.compat.process import find_waker

        self.input_queue, self.output_queue = Queue[Any](), Queue[Any]()
        self.rests: list[float] = []
        self.input_queue.not_empty.wait = self.rests.append
        self.counts = (0, 0)
        self.scheduler = SimpleNamespace(
            finished_req_ids=set(),
            has_requests=lambda: True,
            get_request_counts=lambda: self.counts,
            get_kv_connector=lambda: self.connector,
        )
        # It finds this object on the call stack.
        self.wake = find_waker()

    def step_fn(self) -> tuple[dict[int, Any], bool]:
        return {}, False

    def post_step(self, model_executed: bool) -> None: ...


def test_an_engine_rests_after_a_step_that_computes_nothing_unless_it_has_input(monkeypatch) -> None:
    from vllm.v1.engine import core

    monkeypatch.setattr(core, "time", core.time)
    monkeypatch.setattr(time, "sleep", pytest.fail)
    loop = RestingLoop()
    core.EngineCoreProc._process_engine_step(loop)
    assert loop.rests == [0.001]
    loop.wake()
    core.EngineCoreProc._process_engine_step(loop)
    assert loop.rests == [0.001]
    assert core.time.monotonic is time.monotonic


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"connector": SimpleNamespace(rest_seconds=0.0)},
        {"connector": SimpleNamespace()},
        {"counts": (0, 1)},
        {"counts": (1, 0)},
        {"engines_running": True},
        {"batch_queue": ["a step under way"]},
        {"ended": {"r"}},
    ],
    ids=["none", "has work", "of others", "waiting", "running", "other engines", "step under way", "ended"],
)
def test_an_engine_that_only_keeps_blocks_for_peers_rests_until_a_lease_ends(monkeypatch, state) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import core

    from kvferry.engines.vllm.connector import KVFerryConnector

    assert isinstance(KVFerryConnector.rest_seconds, property)
    assert all(hasattr(Scheduler, name) for name in ("get_request_counts", "get_kv_connector"))
    assert "self.finished_req_ids" in inspect.getsource(Scheduler.has_finished_requests)
    monkeypatch.setattr(core, "time", core.time)
    loop = RestingLoop()
    loop.connector = SimpleNamespace(rest_seconds=3.0)
    vars(loop).update(state)
    loop.scheduler.finished_req_ids = state.get("ended", set())
    core.EngineCoreProc._process_engine_step(loop)
    assert loop.rests == [0.001 if state else 3]
    loop.wake()
    core.EngineCoreProc._process_engine_step(loop)
    assert len(loop.rests) == 1


def test_scheduler_does_what_the_design_assumes() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    failed = inspect.getsource(Scheduler._handle_failed_recving)
    assert "num_computed_tokens = 0" in failed
    finished = inspect.getsource(Scheduler._update_from_kv_xfer_finished)
    assert finished.index("self.connector.update_connector_output(") < finished.index("_free_blocks("), (
        "reports must be heard before blocks are given back"
    )


def test_a_request_has_a_position_at_which_the_scheduler_ends_a_step_and_keeps_the_state() -> None:
    from vllm import SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager, SingleTypeKVCacheManager
    from vllm.v1.request import Request

    from kvferry.engines.vllm.compat.requests import VLLMRequest

    request = Request("r", [1, 2, 3], SamplingParams(max_tokens=8), None)
    assert VLLMRequest(request).snapshot_at == 0
    VLLMRequest(request).take_snapshot_at(2)
    assert VLLMRequest(request).snapshot_at == request.shared_prefix_boundary == 2
    position = "request.shared_prefix_boundary"
    for reader in (Scheduler._mamba_block_aligned_split, SingleTypeKVCacheManager.cache_blocks):
        assert position in inspect.getsource(reader)
    assert "super().cache_blocks(" in inspect.getsource(MambaManager.cache_blocks)
    admits = inspect.getsource(Scheduler.schedule)
    assert admits.index(position) < admits.index("self.connector.get_num_new_matched_tokens("), (
        "vLLM must set the position before it asks the connector, which changes it"
    )


def test_every_member_of_vllms_connector_is_handed_on_to_children_or_left_for_a_reason() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    from kvferry.engines.vllm.multi.connector import NOT_FORWARDED, FerryMultiConnector

    assert not inspect.isabstract(FerryMultiConnector)
    theirs = {
        name: member
        for base in (KVConnectorBase_V1, SupportsHMA)
        for name, member in vars(base).items()
        if not name.startswith("_")
    }
    own = {"sub_connectors", *PATCHED, *(name for name, first in SINCE.items() if is_before(first))}
    classes = FerryMultiConnector.__mro__[: FerryMultiConnector.__mro__.index(KVConnectorBase_V1)]
    ours = {name for one in classes for name in vars(one) if not name.startswith("_")} - own
    assert ours <= theirs.keys(), "vLLM has no such members"
    assert theirs.keys() - ours == {name for name in NOT_FORWARDED if not is_before(SINCE.get(name))}
    for name in ours:
        mine, base = getattr(FerryMultiConnector, name), getattr(KVConnectorBase_V1, name, theirs[name])
        if callable(mine):
            assert parameters(mine) == parameters(base) or name == "request_finished", name


def test_sleep_and_wake_up_go_through_the_calls_that_are_hooked() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    for worker in (CPUWorker, Worker):
        assert parameters(worker.sleep) == ["self", "level"]
        assert parameters(worker.discard) == parameters(worker.wake_up) == ["self", "tags"]
    sleep, release = map(inspect.getsource, (EngineCore.sleep, EngineCore.release_kv_cache_memory))
    assert sleep.index("self.pause_scheduler(") < sleep.index("model_executor.sleep("), "leases end first"
    assert release.index("self._reset_caches(") < release.index("model_executor.discard(")
    shares = hasattr(EngineCore, "_set_kv_connector_handshake_metadata")
    assert shares == hasattr(KVConnectorBase_V1, "restore_kv_caches"), "or none or both would pass cards on"
    if shares:
        wakes = inspect.getsource(EngineCore.wake_up)
        assert wakes.index("model_executor.wake_up(") < wakes.index("_set_kv_connector_handshake_metadata(")


def test_entries_of_connectors_have_the_keys_of_vllms_own_setting() -> None:
    import dataclasses

    from vllm.config import KVTransferConfig

    from kvferry.engines.vllm.config import TRANSFER_KEYS

    installed = {field.name for field in dataclasses.fields(KVTransferConfig)}
    assert installed - GONE_SINCE_0_32 == set(TRANSFER_KEYS)


def test_a_request_has_its_trace_headers_and_an_id_that_callers_know_without_its_end() -> None:
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.request import Request

    from kvferry.engines.vllm.compat.requests import external_id

    given = {"arrival_time": 0.0, "lora_request": None, "cache_salt": None, "data_parallel_rank": None}
    sent = EngineCoreRequest(
        request_id="cmpl-a-0", prompt_token_ids=[1], mm_features=None, sampling_params=SamplingParams(),
        pooling_params=None, trace_headers={"traceparent": "00-1-2-01"}, **given,
    )  # fmt: skip
    InputProcessor.assign_request_id(sent)
    assert sent.request_id != sent.external_req_id == external_id(sent.request_id) == "cmpl-a-0"
    assert Request.from_engine_core_request(sent, None).trace_headers == {"traceparent": "00-1-2-01"}
