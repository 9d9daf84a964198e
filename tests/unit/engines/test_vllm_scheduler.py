"""The listeners that an engine's scheduler gives to the connector's events."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from kvferry.common.errors import ConfigError
from kvferry.connector.config import ConnectorConfig
from kvferry.engines.vllm.connector import KVFerryConnector
from kvferry.engines.vllm.scheduler import sorted_cards
from kvferry.observe.spans import SpanListener
from support.vllm_config import configured, scheduler_connector


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def scheduler(role: str = "kv_both", endpoint: str | None = None, engines: int = 1) -> KVFerryConnector:
    config = configured(role=role, endpoint=endpoint, engines=engines)
    cache = SimpleNamespace(kv_cache_groups=[], num_blocks=8, hash_block_size=16)
    return scheduler_connector(config, cache, ConnectorConfig())


@pytest.mark.parametrize(
    ("vllms", "ours"), [("kv_producer", "prefill"), ("kv_consumer", "decode"), ("kv_both", "both")]
)
def test_explain_shows_the_role_of_an_engine(vllms, ours):
    assert scheduler(vllms)._explaining._engine.role == ours


@pytest.mark.parametrize(("endpoint", "spans"), [(None, 0), ("http://127.0.0.1:1", 1)])
def test_only_a_traced_engine_makes_spans(endpoint, spans):
    listeners = scheduler(endpoint=endpoint)._events._listeners
    assert sum(isinstance(one, SpanListener) for one in listeners) == spans


def test_a_request_before_the_workers_handshake_is_an_error_that_says_what_to_do():
    connector = scheduler()
    with pytest.raises(ConfigError, match=r"no handshake of the engine's workers.*use FerryMulti"):
        connector.on_new_request(SimpleNamespace(request_id="a", mm_features=[]))
    connector.shutdown()


def test_a_handshake_of_another_connector_is_an_error_that_says_what_to_do():
    with pytest.raises(ConfigError, match=r"handshake is a dict, not KVFerry.*use FerryMulti"):
        sorted_cards({(0, 0): {}})


@pytest.mark.parametrize("engines", [1, 2])
def test_engines_in_data_parallel_compute_in_lockstep(engines):
    assert scheduler(engines=engines)._engine.lockstep == (engines > 1)
