"""What is counted of loads, and how it is added up on its way to /metrics."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client import Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import REGISTRY

from kvferry.engines.vllm.meta import Report
from kvferry.engines.vllm.stats import PREFIX, TransferMetrics, TransferStats

LABELS = ("0 full_attention", "1 sliding_window(64)")
READY = Report(None, False, (300, 0), 7, 3, 100, 0.0, 0.25, 0.0, ("direct", ""))  # noqa: FBT003
MIXED = Report(None, False, (100, 50), 2, 1, 100, 0.0, 0.75, 0.0, ("staged", "direct"))  # noqa: FBT003


def stats(*reports: Report) -> TransferStats:
    noted = TransferStats()
    for report in reports:
        noted.note(report, LABELS)
    return noted


def test_loads_are_counted_by_outcome_and_bytes_by_group_and_strategy() -> None:
    noted = stats(READY, MIXED, Report("gone"), Report("late", late=True), Report("late", late=True))
    assert noted.data == {
        "loads": {"ready": 2, "failed": 1, "expired": 2},
        "bytes": [[LABELS[0], "direct", 300], [LABELS[0], "staged", 100], [LABELS[1], "direct", 50]],
        "descriptors": 4,
        "pages": 9,
        "seconds": [0.25, 0.75],
        "tiers": [],
    }
    assert noted.reduce() == {
        "ready loads": 2, "failed loads": 1, "expired loads": 2, "MiB": 0.0, "tokens from tiers": 0,
        "median ms": 500.0,
    }  # fmt: skip


def test_adding_up_counts_everything_once_and_looking_empties() -> None:
    together = stats(READY).aggregate(stats(MIXED, Report("gone")))
    assert together.data == stats(READY, MIXED, Report("gone")).data
    together.reset()
    assert together.is_empty()
    assert together.data == TransferStats().data


def test_it_is_plain_data_on_its_way_between_processes() -> None:
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(stats(READY, MIXED).to_dict()))
    assert TransferStats(sent).data == stats(READY, MIXED).data


@pytest.fixture
def metrics():
    def made() -> TransferMetrics:
        kinds = {kind: kind for kind in (Counter, Gauge, Histogram)}
        config = type("Config", (), {"kv_transfer_config": None})
        return TransferMetrics(config, kinds, ["engine"], {0: ["0"], 1: ["1"]})

    yield made
    for collector in [
        c for c in REGISTRY._collector_to_names if getattr(c, "_name", "").startswith("kvferry_")
    ]:
        REGISTRY.unregister(collector)


def told(prefix: str = PREFIX) -> dict[str, float]:
    lines = generate_latest(REGISTRY).decode().splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if line.startswith(prefix) and "_created" not in line)
    return {name.removeprefix(f"{prefix}_"): float(value) for name, value in found.items()}


def test_every_engine_has_its_own_metrics(metrics) -> None:
    shown = metrics()
    shown.observe(stats(READY, Report("gone")).to_dict())
    shown.observe(stats(READY).to_dict(), 1)
    shown.observe(stats(MIXED).to_dict(), 1)
    values = told()
    assert values['loads_total{engine="0",outcome="ready"}'] == 1
    assert values['loads_total{engine="0",outcome="failed"}'] == 1
    assert values['loads_total{engine="1",outcome="ready"}'] == 2
    assert values['bytes_total{engine="1",group="0 full_attention",strategy="direct"}'] == 300
    assert values['bytes_total{engine="1",group="0 full_attention",strategy="staged"}'] == 100
    assert values['descriptors_total{engine="1"}'] == 4
    assert values['pages_total{engine="1"}'] == 9
    assert values['seconds_bucket{engine="1",le="0.25"}'] == 1
    assert values['seconds_count{engine="1"}'] == 2


def test_a_second_engine_in_the_process_begins_anew(metrics) -> None:
    metrics().observe(stats(READY).to_dict())
    metrics()
    assert not told()


def test_what_tiers_counted_is_added_with_its_labels(metrics) -> None:
    shown, noted = metrics(), stats()
    noted.data["tiers"] = [("missed_chunks", ("file", "corrupt"), 2), ("hit_tokens", (), 512)]
    assert not noted.is_empty()
    assert noted.reduce()["tokens from tiers"] == 512
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(noted.aggregate(noted).to_dict()))
    shown.observe(sent)
    values = told("kvferry_tier")
    assert values['missed_chunks_total{engine="0",reason="corrupt",tier="file"}'] == 4
    assert values['hit_tokens_total{engine="0"}'] == 1024
