"""What clients put into requests that would end the engine, in vLLM's own scheduler."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from kvferry.engines.vllm.compat.arrivals import guard_arrivals
from kvferry.engines.vllm.connector import KVFerryConnector
from kvferry.engines.vllm.multi.connector import FerryMultiConnector
from support.vllm_scheduler import Engine

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def vllms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler as vLLM has it, whatever connector this process has made."""
    add = Scheduler.add_request
    monkeypatch.setattr(Scheduler, "add_request", getattr(add, "__wrapped__", add))


def refused(name: str) -> Request:
    """What vLLM makes of a request that it refused, with the client's ``request_id``."""
    one = Request(name, [0], SamplingParams(max_tokens=1), None)
    one.abort_immediately = True
    return one


def take(engine: Engine, request: Request) -> None:
    """As vLLM's engine core does."""
    engine.scheduler.add_request(request)
    if request.abort_immediately:
        engine.abort(request.request_id)


def test_a_refused_request_with_the_id_of_another_ends_neither_it_nor_the_engine(
    tmp_path: Path,
) -> None:
    engine = Engine(tmp_path)
    one = engine.ask(range(40))
    guard_arrivals()
    take(engine, refused(one.request_id))
    for _ in range(10):
        engine.step()
    assert engine.answered == {one.request_id}
    assert not engine.scheduler.requests


def test_left_to_itself_vllm_ends(tmp_path: Path) -> None:
    """When this fails, vLLM names refused requests itself, which `guard_arrivals` then need not do."""
    engine = Engine(tmp_path)
    one = engine.ask(range(40))
    with pytest.raises(AssertionError, match="duplicate request id"):
        take(engine, refused(one.request_id))


def test_other_requests_keep_their_ids(tmp_path: Path) -> None:
    guard_arrivals()
    guard_arrivals()
    engine = Engine(tmp_path)
    assert engine.ask(range(40)).request_id in engine.scheduler.requests


@pytest.mark.parametrize("multi", [False, True], ids=["KVFerryConnector", "FerryMultiConnector"])
def test_kvferrys_connectors_guard_it(multi: bool, tmp_path: Path) -> None:
    own = {"kv_connector": "KVFerryConnector", "kv_connector_module_path": KVFerryConnector.__module__}
    module = FerryMultiConnector.__module__ if multi else KVFerryConnector.__module__
    name = "FerryMultiConnector" if multi else "KVFerryConnector"
    before = Scheduler.add_request
    Engine(tmp_path, connector=name, connector_module=module, settings={"connectors": [own]} if multi else {})
    assert Scheduler.add_request is not before


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def asked_with(params: Any, folder: Path) -> tuple[SamplingParams, Request, Any]:
    """Sampling parameters with `params`, a request with them, and what a step tells workers of it."""
    engine = Engine(folder)
    given = SamplingParams(max_tokens=3, extra_args={"kv_transfer_params": params, "other": 1})
    request = Request("one", list(range(40)), given, None, block_hasher=engine._hasher)
    engine.scheduler.add_request(request)
    return given, request, engine.scheduler.schedule().scheduled_new_reqs[0].sampling_params


def test_parameters_for_connectors_do_not_travel_to_workers(tmp_path: Path) -> None:
    guard_arrivals()
    params = {"remote_block_ids": nested(600)}
    given, request, told = asked_with(params, tmp_path)
    assert told.extra_args == {"other": 1}
    pickle.dumps(told)
    assert request.kv_transfer_params is params
    assert given.extra_args == {"kv_transfer_params": params, "other": 1}, "others may share it"


def test_left_to_itself_vllm_pickles_them(tmp_path: Path) -> None:
    """When this fails, vLLM keeps them from workers, which `guard_arrivals` then need not do."""
    *_, told = asked_with({"remote_block_ids": nested(600)}, tmp_path)
    with pytest.raises(RecursionError):
        pickle.dumps(told)
