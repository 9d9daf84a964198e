"""What was counted, on its way from an engine to /metrics."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, values
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import REGISTRY

from kvferry.engines.vllm.messages import FerryMetrics, FerryStats
from kvferry.observe.metrics import PREFIX, MetricsDelta


def loads(ready: int, pending: int, *seconds: float) -> FerryStats:
    counted = MetricsDelta()
    counted.count("loads", "peer", "ready", by=ready)
    counted.count("load_bytes", "peer", "0 full_attention", "direct", by=ready << 20)
    counted.set("pending_loads", "peer", to=pending)
    counted.sample("load_seconds", "peer", of=seconds)
    return FerryStats(counted.plain())


def test_counts_and_samples_are_added_up_and_of_a_gauge_the_last_value_is_kept() -> None:
    together = loads(1, 3, 0.25).aggregate(loads(2, 0, 0.5, 1.0))
    assert together.data == loads(3, 0, 0.25, 0.5, 1.0).data
    assert together.reduce() == {"peer ready loads": 3, "MiB": 3.0, "hit tokens": 0, "median ms": 500.0}
    together.reset()
    assert together.is_empty()
    assert together.data == FerryStats().data


def test_stats_are_plain_data_between_processes() -> None:
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(loads(1, 2, 0.5).to_dict()))
    assert FerryStats(sent).data == loads(1, 2, 0.5).data


def test_a_gauge_that_has_become_0_is_reported() -> None:
    counted = MetricsDelta()
    counted.set("pending_loads", "peer", to=0)
    assert counted
    assert not FerryStats(counted.plain()).is_empty()


@pytest.fixture
def metrics():
    def made() -> FerryMetrics:
        kinds = {kind: kind for kind in (Counter, Gauge, Histogram)}
        config = type("Config", (), {"kv_transfer_config": None})
        return FerryMetrics(config, kinds, ["engine"], {0: ["0"], 1: ["1"]})

    return made


def told() -> dict[str, float]:
    lines = generate_latest(REGISTRY).decode().splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if line.startswith(PREFIX) and "_created" not in line)
    return {name.removeprefix(PREFIX): float(value) for name, value in found.items()}


def test_every_engine_has_its_own_metrics(metrics) -> None:
    shown = metrics()
    shown.observe(loads(1, 2, 0.25).to_dict())
    shown.observe(loads(1, 1, 0.1).to_dict(), 1)
    shown.observe(loads(1, 0, 0.75).to_dict(), 1)
    values = told()
    assert values['loads_total{engine="0",outcome="ready",source="peer"}'] == 1
    assert values['loads_total{engine="1",outcome="ready",source="peer"}'] == 2
    of = 'engine="1",group="0 full_attention",source="peer",strategy="direct"'
    assert values[f"load_bytes_total{{{of}}}"] == 2 << 20
    assert values['pending_loads{engine="0",source="peer"}'] == 2
    assert values['pending_loads{engine="1",source="peer"}'] == 0
    assert values['load_seconds_bucket{engine="1",le="0.25",source="peer"}'] == 1
    assert values['load_seconds_count{engine="1",source="peer"}'] == 2


def test_a_second_engine_in_the_process_begins_anew(metrics) -> None:
    metrics().observe(loads(1, 0, 0.5).to_dict())
    metrics()
    assert not {name: value for name, value in told().items() if value}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_several_api_servers_add_up_counters_and_show_the_last_value_of_a_gauge(
    metrics, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    for server, pending in (("1", 5), ("2", 3)):
        monkeypatch.setattr(values, "ValueClass", values.MultiProcessValue(lambda server=server: server))
        metrics().observe(loads(2, pending, 0.5).to_dict())
    MultiProcessCollector(registry := CollectorRegistry())
    told = generate_latest(registry).decode()
    assert 'kvferry_loads_total{engine="0",outcome="ready",source="peer"} 4.0' in told
    assert 'kvferry_pending_loads{engine="0",source="peer"} 3.0' in told
    assert 'kvferry_load_seconds_count{engine="0",source="peer"} 2.0' in told
