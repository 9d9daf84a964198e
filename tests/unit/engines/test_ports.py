"""Several engines, and data-parallel ranks of one, on one host: each control channel on a port of its own."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from kvferry.common.errors import ConfigError
from kvferry.connector.config import ConnectorConfig
from kvferry.connector.messages import WorkerInfo
from kvferry.engines.vllm.messages import WorkerCard
from kvferry.transport.messages import RankCard
from support.pages import kv_page, rank_of
from support.ports import OWN_ADDRESS
from support.vllm_config import configured, scheduler_connector

PORT = 30_000
"""Below the ports that the system gives out."""


def card(rank, config, read=None):
    return WorkerCard(WorkerInfo(geometry=rank, card=read), config.without_host)


@pytest.fixture
def listen():
    """Start the scheduler half of a data-parallel rank; its port."""
    halves = []

    def start(port, index=0, **settings):
        vllm_config = configured(f"engine_dp{index}", index)
        cache = SimpleNamespace(kv_cache_groups=[], num_blocks=8, hash_block_size=16)
        config = ConnectorConfig(host=OWN_ADDRESS, port=port, explain_requests=0, **settings)
        half = scheduler_connector(vllm_config, cache, config)
        halves.append(half)
        rank = rank_of(kv_page())
        half._start((card(rank, config, RankCard(rank, b"", 0, 8, 1)),))
        return half.half._peering and half.half._peering.server.port

    yield start
    for half in halves:
        half.shutdown()


def test_a_data_parallel_rank_listens_as_many_ports_further(listen):
    assert [listen(PORT, 2), listen(PORT, 0), listen(PORT, 1)] == [PORT + 2, PORT, PORT + 1]


def test_workers_of_another_connector_of_the_engine_are_refused_in_words():
    rank, ours = rank_of(kv_page()), ConnectorConfig(explain_requests=0)
    groups = SimpleNamespace(kv_cache_groups=[], num_blocks=8, hash_block_size=16)
    half = scheduler_connector(configured("engine"), groups, ours)
    with pytest.raises(ConfigError, match=r"that of another KVFerryConnector: .* use FerryMultiConnector"):
        half._start((card(rank, ConnectorConfig(explain_requests=1)),))
    on_another_machine = ConnectorConfig(explain_requests=0, host="10.0.0.7")
    half._start((card(rank, on_another_machine),))
    half.shutdown()


def test_any_free_port_is_one_of_its_own_each(listen):
    assert len({listen(0, index) for index in (0, 1, 1)}) == 3


def test_a_taken_port_is_named_in_the_error(listen):
    listen(PORT)
    with pytest.raises(
        ConfigError, match=f"cannot listen on {OWN_ADDRESS} port {PORT}: Address already in use"
    ):
        listen(PORT)


def test_loads_are_logged_only_if_a_file_is_named_and_engines_exchange_kv(listen, tmp_path):
    log = tmp_path / "log"
    listen(0)
    listen(0, transfer_log=str(log), transfer=False)
    assert not log.exists()
    listen(0, transfer_log=str(log))
    assert log.exists()
    with pytest.raises(ConfigError, match="name a file that can be written"):
        listen(0, transfer_log=str(tmp_path))
