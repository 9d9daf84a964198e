"""Access to an engine: its secret key, and the addresses of its peers."""

import logging
from dataclasses import replace

import pytest

from kvferry.common.errors import ConfigError
from kvferry.connector.config import ConnectorConfig, parse_config
from kvferry.connector.messages import WorkerInfo
from kvferry.connector.scheduler import (
    check_rank_keys,
    check_reachable,
    machines_of,
    scheduler_keys,
)
from kvferry.geometry import RankGeometry
from kvferry.transport.addresses import ANY_PEER
from kvferry.transport.security import read_keys, write_secret
from support.keys import KEYS, OTHER_KEYS

FAR = {"host": "10.0.0.7"}


@pytest.fixture
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_engine_on_loopback_creates_the_machines_key(state, caplog):
    assert scheduler_keys(parse_config({})) == read_keys(None)
    assert warnings(caplog) == []


def test_an_engine_that_peers_can_reach_logs_once_that_they_need_the_key(state, caplog):
    scheduler_keys(parse_config(FAR))
    (said,) = warnings(caplog)
    assert f"copy {state}/kvferry/key to their machines, or make a file with kvferry keygen FILE" in said


def test_no_key_is_created_with_a_secret_file(state, caplog, tmp_path):
    write_secret(tmp_path / "secret")
    config = parse_config({**FAR, "secret_file": str(tmp_path / "secret")})
    assert scheduler_keys(config) == read_keys(config.secret_file)
    assert (warnings(caplog), state.exists()) == ([], False)


def test_an_engine_of_tiers_alone_needs_no_key(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file" / "state"))
    assert scheduler_keys(parse_config({"tiers": "default"})) is None
    with pytest.raises(ConfigError, match="set secret_file"):
        scheduler_keys(parse_config({"tiers": "default", "transfer": True}))


def test_allowed_peers_follow_the_host_unless_configured():
    assert parse_config({}).allowed_peers().loopback_only
    assert parse_config(FAR).allowed_peers() == ANY_PEER
    assert parse_config({**FAR, "advertise_host": "n7"}).allowed_peers().names == ("n7",)
    listed = parse_config({"peers": ["10.0.0.0/8", "svc"]}).allowed_peers()
    assert (str(listed.networks[0]), listed.names) == ("10.0.0.0/8", ("svc",))


def card(rank: int, key: str | None) -> WorkerInfo:
    geometry = RankGeometry(rank, 2, 0, 1, 1, (), ())
    return WorkerInfo(geometry=geometry, card=None, key=key)


def test_all_ranks_must_have_the_engines_key():
    check_rank_keys(KEYS, [card(0, KEYS.fingerprint), card(1, KEYS.fingerprint)])
    with pytest.raises(ConfigError, match=r"rank TP1 PP0 has a key with fingerprint .* set secret_file"):
        check_rank_keys(KEYS, [card(0, KEYS.fingerprint), card(1, OTHER_KEYS.fingerprint)])


def test_ranks_are_grouped_by_their_machine_and_that_of_the_scheduler_comes_first():
    here, there = card(0, None), replace(card(1, None), machine="another")
    ranks = [here.geometry, there.geometry]
    assert machines_of([here, card(1, None)]) == [ranks]
    assert machines_of([here, there]) == [[ranks[0]], [ranks[1]]]
    assert machines_of([there]) == [[], [ranks[1]]]


def test_machines_of_an_engine_with_tiers_must_reach_each_other():
    here, there = card(0, None).geometry, card(1, None).geometry
    check_reachable(ConnectorConfig(), [[here, there]])
    check_reachable(ConnectorConfig(host="10.0.0.7"), [[here], [there]])
    with pytest.raises(ConfigError, match=r"rank TP1 PP0 runs on another machine .* set host to 'node'"):
        check_reachable(ConnectorConfig(), [[here], [there]])
