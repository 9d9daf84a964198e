"""Channels that listen on free ports of a range."""

import errno
import re
import socket
from contextlib import closing

import pytest
import zmq

from kvferry.common.errors import ConfigError
from kvferry.transport.addresses import PortRange, parse_port_range
from kvferry.transport.agent import PORTS_VARIABLE, restrict_ucx_to, ucx_environment
from kvferry.transport.control_server import ControlServer
from kvferry.transport.messages import PeerInfo
from support.keys import KEYS
from support.ports import OWN_ADDRESS as HOST
from transport.cards import cards, facts


@pytest.mark.parametrize(
    "text", ["", "5600", "5600-", "0-5", "5601-5600", "5600-65536", "5600 - 5700", "\u0665-6"]
)
def test_a_malformed_range_of_ports_is_refused(text):
    with pytest.raises(ConfigError, match=re.escape(f"ports is {text!r}; write the first and the last port")):
        parse_port_range(text)


def test_a_range_is_written_as_ucx_reads_it():
    assert str(parse_port_range("5600-5601")) == "5600-5601"
    assert parse_port_range(None) is None


def free_pair() -> PortRange:
    """Return two neighbouring ports that are free, below those that the system gives out."""
    for first in range(30_001, 32_000, 2):
        with socket.socket() as one, socket.socket() as other:
            try:
                one.bind((HOST, first))
                other.bind((HOST, first + 1))
            except OSError:
                continue
            return PortRange(first, first + 1)
    raise AssertionError("no two neighbouring ports are free")


def test_channels_take_free_ports_of_the_range_until_there_is_none():
    ports, card = free_pair(), PeerInfo(facts(), cards())
    with closing(ControlServer(HOST, ports, card, KEYS)) as one:
        with closing(ControlServer(HOST, ports, card, KEYS)) as other:
            assert [one.port, other.port] == [*ports]
            wanted = (
                f"cannot listen on {HOST}, any port of {ports}: Address already in use; set ports to another"
            )
            with pytest.raises(ConfigError, match=re.escape(wanted)):
                ControlServer(HOST, ports, card, KEYS)
        with closing(ControlServer(HOST, ports, card, KEYS)) as again:
            assert again.port == ports.last


def test_a_range_may_begin_at_ports_that_only_root_may_have(monkeypatch):
    ports, card = free_pair(), PeerInfo(facts(), cards())
    refuse_below(ports.last, monkeypatch)
    with closing(ControlServer(HOST, ports, card, KEYS)) as one:
        assert one.port == ports.last
    wanted = f"any port of {ports}: Permission denied; set ports to another range, with free ports from 1024"
    refuse_below(ports.last + 1, monkeypatch)
    with pytest.raises(ConfigError, match=re.escape(wanted)):
        ControlServer(HOST, ports, card, KEYS)


def refuse_below(lowest: int, monkeypatch) -> None:
    """Refuse ports below `lowest`, as Linux refuses those below 1024 to other users than root."""
    bind = zmq.Socket.bind

    def bind_or_refuse(socket: zmq.Socket, endpoint: str) -> object:
        port = endpoint.rpartition(":")[2]
        if port.isdecimal() and int(port) < lowest:
            raise zmq.ZMQError(errno.EACCES)
        return bind(socket, endpoint)

    monkeypatch.setattr(zmq.Socket, "bind", bind_or_refuse)


def test_ucx_gets_the_range_unless_the_operator_has_set_one(monkeypatch, caplog):
    monkeypatch.delenv(PORTS_VARIABLE, raising=False)
    ports = PortRange(5600, 5700)
    assert PORTS_VARIABLE not in ucx_environment(HOST)
    assert ucx_environment(HOST, ports)[PORTS_VARIABLE] == "5600-5700"
    monkeypatch.setenv(PORTS_VARIABLE, "1-2")
    with caplog.at_level("INFO"), restrict_ucx_to(HOST, ports):
        assert PORTS_VARIABLE not in ucx_environment(HOST, ports)
    assert "UCX_TCP_PORT_RANGE=1-2" in caplog.text
