"""Which configuration of the cache a worker's half is started with."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.common.errors import ConfigError
from kvferry.connector.config import ConnectorConfig
from kvferry.engines.vllm import connector
from kvferry.engines.vllm.compat.connectors import KVConnectorRole
from kvferry.engines.vllm.connector import KVFerryConnector

SCHEDULER, WORKER = KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER


class Half:
    """A worker's half that remembers what it is started with."""

    def __init__(self, vllm_config: Any, caches: Any) -> None:
        self.engine_id = vllm_config.kv_transfer_config.engine_id
        self.again: list[Any] = []
        self.woken = False

    def start(self, kv_cache_config: Any) -> Any:
        return kv_cache_config

    def register_again(self, caches: Any) -> None:
        self.again.append(caches)


@pytest.fixture(autouse=True)
def halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector, "VLLMWorker", Half)
    monkeypatch.setattr(KVFerryConnector, "_open_scheduler", lambda *of: None)
    monkeypatch.setattr(connector, "read_settings", lambda of: ConnectorConfig())


def config_of(engine: str) -> Any:
    transfer = SimpleNamespace(engine_id=engine, is_kv_consumer=True, kv_port=14579)
    device, model = SimpleNamespace(device_type="meta"), SimpleNamespace(enable_sleep_mode=False)
    return SimpleNamespace(kv_transfer_config=transfer, device_config=device, model_config=model)


def registered(worker: KVFerryConnector, engine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the half is started with of the engine that is being set up."""
    monkeypatch.setattr(connector, "current_config", lambda: engine)
    worker.register_kv_caches({})
    return worker.get_handshake_metadata()


def test_a_worker_has_each_layers_own_spec_and_a_second_engine_the_schedulers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A scheduler's configuration names one layer's spec for all layers of a group."""
    first, second = config_of("first"), config_of("second")
    worker = KVFerryConnector(first, WORKER, "specs by layer")
    KVFerryConnector(first, SCHEDULER, "one spec for all")
    assert registered(worker, first, monkeypatch) == "specs by layer"
    KVFerryConnector(second, SCHEDULER, "of the second")
    assert registered(worker, second, monkeypatch) == "of the second"


def test_a_worker_in_a_process_of_its_own_has_its_own_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = config_of("of ranks")
    assert registered(KVFerryConnector(engine, WORKER, "its own"), engine, monkeypatch) == "its own"


def test_caches_that_are_registered_again_are_compared_and_start_no_second_half(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = config_of("registers twice")
    worker = KVFerryConnector(engine, WORKER, "specs by layer")
    KVFerryConnector(engine, SCHEDULER, "one spec for all")
    registered(worker, engine, monkeypatch)
    half = worker._workers["registers twice"]
    worker.register_kv_caches({"layer": "elsewhere"})
    assert half.again == [{"layer": "elsewhere"}]
    worker.get_handshake_metadata()
    assert worker._workers == {"registers twice": half}


def test_a_worker_is_described_again_only_after_it_has_woken_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when another engine of the process has run the last step."""
    first, second = config_of("first to sleep"), config_of("second to sleep")
    worker = KVFerryConnector(first, WORKER, "of the first")
    registered(worker, first, monkeypatch)
    KVFerryConnector(second, SCHEDULER, "of the second")
    registered(worker, second, monkeypatch)
    assert worker.get_handshake_metadata() is None
    KVFerryConnector(first, SCHEDULER, "of the first, again")
    worker._workers["first to sleep"].woken = True
    assert worker.get_handshake_metadata() == "of the first, again"


@pytest.mark.parametrize("role", [SCHEDULER, WORKER])
def test_an_engine_that_could_not_use_its_own_files_gets_no_connector(role: KVConnectorRole) -> None:
    before = os.umask(0o777)
    try:
        with pytest.raises(ConfigError, match="umask is 0777"):
            KVFerryConnector(config_of("umask"), role, "its own")
    finally:
        os.umask(before)
