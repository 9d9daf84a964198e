"""The network devices that UCX may listen on, by the address that the operator chose."""

import os
import queue
import threading

import pytest

from kvferry.transport import agent as network_devices
from kvferry.transport.agent import (
    CONNECTIONS,
    VARIABLE,
    devices_for,
    is_local_address,
    restrict_ucx_to,
    ucx_environment,
)


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in (VARIABLE, *CONNECTIONS):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_is_the_loopback_device_alone(host):
    assert devices_for(host) == ("lo",)
    assert is_local_address(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*", "192.0.2.77", "no-such-host.invalid"])
def test_every_address_and_no_address_of_ours_restrict_nothing(host):
    assert devices_for(host) == ()
    assert ucx_environment(host) == CONNECTIONS


def test_another_address_is_its_device_and_all_rdma_devices(tmp_path):
    for port in ("mlx5_0/ports/1", "mlx5_1/ports/1"):
        (tmp_path / port).mkdir(parents=True)
    for name, address in network_devices.addresses():
        if not address.is_loopback and not address.is_link_local:
            assert devices_for(str(address), tmp_path) == (name, "mlx5_0:1", "mlx5_1:1")


def test_agents_made_in_the_block_are_kept_to_the_device():
    with restrict_ucx_to("127.0.0.1"):
        assert os.environ[VARIABLE] == "lo"
    assert VARIABLE not in os.environ


def test_agents_of_two_threads_are_made_one_after_the_other(monkeypatch):
    """The variable is the whole process's: the block of one would end that of the other."""
    events = queue.Queue()
    lock = network_devices._lock

    class Told:
        """The module's lock, which tells who has to wait for it."""

        def __enter__(self):
            if not lock.acquire(blocking=False):
                events.put("waits")
                lock.acquire()

        def __exit__(self, *_):
            lock.release()

    monkeypatch.setattr(network_devices, "_lock", Told())

    def make():
        with restrict_ucx_to("127.0.0.1"):
            events.put("inside")

    other = threading.Thread(target=make)
    with restrict_ucx_to("127.0.0.1"):
        other.start()
        assert events.get(timeout=60.0) == "waits"
        assert os.environ[VARIABLE] == "lo"
    assert events.get(timeout=60.0) == "inside"
    other.join()
    assert VARIABLE not in os.environ


def test_the_operators_setting_holds_and_is_said(monkeypatch, caplog):
    monkeypatch.setenv(VARIABLE, "eth7")
    with caplog.at_level("INFO"), restrict_ucx_to("127.0.0.1"):
        assert os.environ[VARIABLE] == "eth7"
    assert os.environ[VARIABLE] == "eth7"
    assert ucx_environment("127.0.0.1") == CONNECTIONS
    assert "UCX_NET_DEVICES=eth7" in caplog.text


def test_connections_are_made_in_the_background_unless_the_operator_says_otherwise(monkeypatch):
    with restrict_ucx_to("127.0.0.1"):
        assert CONNECTIONS.items() <= os.environ.items()
    assert CONNECTIONS.keys().isdisjoint(os.environ)
    monkeypatch.setenv("UCX_TCP_CONN_NB", "n")
    with restrict_ucx_to("127.0.0.1"):
        assert os.environ["UCX_TCP_CONN_NB"] == "n"
    assert os.environ["UCX_TCP_CONN_NB"] == "n"
