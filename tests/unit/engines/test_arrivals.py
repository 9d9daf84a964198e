"""Requests of clients that would end the engine, in vLLM's own scheduler."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from kvferry.engines.vllm.compat.scheduler import guard_arrivals
from kvferry.engines.vllm.connector import KVFerryConnector
from kvferry.engines.vllm.multi.connector import FerryMultiConnector
from support.vllm_scheduler import SETTINGS, VllmScheduler

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def vllms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler as vLLM has it, whatever connector this process has made."""
    add = Scheduler.add_request
    monkeypatch.setattr(Scheduler, "add_request", getattr(add, "__wrapped__", add))


def refused(name: str) -> Request:
    """A request that vLLM refused, with the client's ``request_id``."""
    one = Request(name, [0], SamplingParams(max_tokens=1), None)
    one.abort_immediately = True
    return one


def take(engine: VllmScheduler, request: Request) -> None:
    """As vLLM's engine core does."""
    engine.scheduler.add_request(request)
    if request.abort_immediately:
        engine.abort(request.request_id)


def test_a_refused_request_with_the_id_of_another_ends_neither_it_nor_the_engine() -> None:
    engine = VllmScheduler()
    one = engine.ask(range(40))
    guard_arrivals()
    take(engine, refused(one.request_id))
    for _ in range(10):
        engine.step()
    assert engine.answered == {one.request_id}
    assert not engine.scheduler.requests


def test_vllm_alone_ends_at_a_refused_request_with_a_known_id() -> None:
    """When this fails, vLLM names refused requests itself, which `guard_arrivals` then need not do."""
    engine = VllmScheduler()
    one = engine.ask(range(40))
    with pytest.raises(AssertionError, match="duplicate request id"):
        take(engine, refused(one.request_id))


def test_guarding_twice_keeps_the_ids_of_other_requests() -> None:
    guard_arrivals()
    guard_arrivals()
    engine = VllmScheduler()
    assert engine.ask(range(40)).request_id in engine.scheduler.requests


@pytest.mark.parametrize("connector", [KVFerryConnector, FerryMultiConnector])
def test_kvferrys_connectors_guard_arrivals(connector: Any) -> None:
    before = Scheduler.add_request
    VllmScheduler(connector=connector, settings=SETTINGS[connector])
    assert Scheduler.add_request is not before


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def asked_with(params: Any) -> tuple[SamplingParams, Request, Any]:
    """Sampling parameters with `params`, a request with them, and the parameters that workers get."""
    engine = VllmScheduler()
    given = SamplingParams(max_tokens=3, extra_args={"kv_transfer_params": params, "other": 1})
    request = Request("one", list(range(40)), given, None, block_hasher=engine.block_hasher)
    engine.scheduler.add_request(request)
    return given, request, engine.scheduler.schedule().scheduled_new_reqs[0].sampling_params


def test_parameters_for_connectors_do_not_travel_to_workers() -> None:
    guard_arrivals()
    params = {"remote_block_ids": nested(600)}
    given, request, told = asked_with(params)
    assert told.extra_args == {"other": 1}
    pickle.dumps(told)
    assert request.kv_transfer_params is params
    assert given.extra_args == {"kv_transfer_params": params, "other": 1}, "others may share it"


def test_vllm_alone_sends_parameters_for_connectors_to_workers() -> None:
    """When this fails, vLLM keeps them from workers, which `guard_arrivals` then need not do."""
    *_, told = asked_with({"remote_block_ids": nested(600)})
    with pytest.raises(RecursionError):
        pickle.dumps(told)
