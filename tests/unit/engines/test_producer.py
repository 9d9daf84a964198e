"""Leases of a producer, as they are told."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest

from kvferry.engines.vllm import compat, producer
from kvferry.engines.vllm.config import ConnectorConfig
from kvferry.engines.vllm.meta import SchedulerMeta
from kvferry.engines.vllm.producer import Producer
from kvferry.engines.vllm.turn_names import TurnNames
from kvferry.observe.events import LeaseEnded, LeaseExtended, LeaseGranted
from kvferry.observe.fold import Fold
from kvferry.observe.watch import Watch
from kvferry.transport.messages import Heartbeat, Release
from support.block_pool import request
from support.clock import Clock

SECONDS = 30.0


@pytest.fixture
def clock(monkeypatch) -> Clock:
    monkeypatch.setattr(producer.time, "monotonic", clock := Clock())
    monkeypatch.setattr(compat, "trim_prompt", lambda *_: True)
    monkeypatch.setattr(compat, "finished_whole", lambda _: True)
    return clock


class Engine:
    def __init__(self) -> None:
        self.told, self.fold = [], Fold()
        parallel = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
        self.producer = Producer(
            SimpleNamespace(parallel_config=parallel, kv_transfer_config=SimpleNamespace(engine_id="e")),
            SimpleNamespace(kv_cache_groups=[], hash_block_size=4),
            ConnectorConfig(lease_seconds=SECONDS),
            (),
            1,
            Watch(self.told.append, self.fold),
            TurnNames(),
        )

    def offer(self, name: str) -> None:
        one = request(name, range(8))
        one.kv_transfer_params = {"do_remote_decode": True}
        self.producer.on_new_request(one)
        assert self.producer.finished(one, ())[0]

    def hear(self, *events: Heartbeat | Release) -> dict[str, int]:
        meta = SchedulerMeta("e")
        self.producer.take_events(deque(events), meta)
        return meta.ended


def test_a_lease_is_told_from_its_grant_to_its_end(clock) -> None:
    engine = Engine()
    for name in ("a", "b"):
        engine.offer(name)
    assert engine.told == [LeaseGranted(name, clock.now, 8, SECONDS) for name in ("a", "b")]
    clock.now += SECONDS / 2
    engine.hear(Heartbeat(["a", "nobody"]))
    assert engine.told[2:] == [LeaseExtended("a", clock.now)]
    clock.now += SECONDS / 2
    assert engine.hear().keys() == {"b"}
    assert engine.told[3:] == [LeaseEnded("b", clock.now, expired=True)]
    assert engine.hear(Release(["a", "b"])).keys() == {"a"}
    assert engine.told[4:] == [LeaseEnded("a", clock.now, expired=False)]
    counted = engine.fold.take()
    assert {" ".join([name, *of]): n for (name, of), n in counted.counters.items()} == {
        "leases_granted": 2, "leases_ended expired": 1, "leases_ended released": 1,
    }  # fmt: skip
    assert counted.gauges == {("leases", ()): 0}
