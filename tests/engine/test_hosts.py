"""Prefill on one host, decode on another: network namespaces, NIXL over TCP, a secret between them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kvferry.tools.doctor.ports import listening_ports
from support.namespaces import Host
from support.open_to_others import session
from support.vllm_engine.inside import distance
from support.vllm_engine.pair import SOON, Pair, Setup, connector, prompt

pytestmark = [pytest.mark.engine, pytest.mark.long]

HANDSHAKE, LOAD = 4.0, 4.0
"""Seconds until a peer is given up, and until a load is."""

PORTS = range(24_000, 24_100)


@pytest.fixture(scope="module")
def pair(
    running: object, hosts: tuple[Host, Host], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    secret = tmp_path_factory.mktemp("hosts") / "secret"
    secret.write_text("what both hosts know and no one else")
    secret.chmod(0o600)
    options, environments = [], []
    everywhere = {"host": "0.0.0.0", "advertise_host": hosts[0].address}
    for host, place, environment in zip(
        hosts,
        (everywhere, {"host": hosts[1].address}),
        ({"UCX_NET_DEVICES": hosts[0].device}, {}),
        strict=True,
    ):
        settings = {**place, "secret_file": str(secret), "ports": f"{PORTS[0]}-{PORTS[-1]}"}
        # In truth both are on one machine, and could share memory.
        settings |= {"handshake_seconds": HANDSHAKE, "load_timeout_seconds": LOAD, "strategy": "direct"}
        options.append({"kv_transfer_config": connector(**settings)})
        environments.append({"UCX_TLS": "tcp,self", "VLLM_HOST_IP": host.address, **environment})
    yield running.pair(
        Setup(
            "gemma3",
            "two-hosts",
            {"max_num_batched_tokens": 256},
            exact=True,
            prefill_options=options[0],
            decode_options=options[1],
            hosts=tuple(host.name for host in hosts),
            environments=tuple(environments),
        )
    )
    running.close()


def test_answer_over_the_network_equals_a_single_engines(pair: Pair, hosts: tuple[Host, Host]) -> None:
    for length in (40, 300, 700):
        text = prompt(length, length)
        before = hosts[1].received_bytes()
        answer = pair.through([text])[0]
        assert answer["moved"]
        assert answer["offer"]["remote_host"] == hosts[0].address
        pages = -(-(length - 1) // 128) * 128 * 2 * 2 * 32 * 4
        assert hosts[1].received_bytes() - before > pages, "the bytes took another way"
        pair.agree(answer, pair.reference([text])[0])
        pair.forget()


def test_every_port_of_an_engine_is_on_its_address_and_in_its_range_or_on_loopback(
    pair: Pair, hosts: tuple[Host, Host]
) -> None:
    ports = [one for process in session(pair.decode.pid) for one in listening_ports(process)]
    assert {one.number for one in ports if one.address == hosts[1].address} <= {*PORTS}
    addresses = [one.address for one in ports]
    assert addresses.count(hosts[1].address) > 2, "both channels and UCX listen"
    assert set(addresses) <= {hosts[1].address, "127.0.0.1"}


def test_a_spoiled_block_changes_the_answer(pair: Pair) -> None:
    text = prompt(60, 11)
    sound = pair.through([text])[0]
    pair.forget()
    pair.decode.call("spoil", 5)
    spoiled = pair.through([text])[0]
    pair.decode.call("spoil", None)
    pair.forget()
    assert distance(spoiled, sound) > 1e-4


def answered(pair: Pair, text: list[int], **wrong: object) -> float:
    """Seconds that an answer takes if the offer says something wrong; checks that it is right."""
    reference = pair.reference([text])[0]
    offer = pair.prefill.call("prefill", [text])[0]["params"]
    started = time.monotonic()
    pair.decode.call("new_loads")
    answer = pair.decode.call("generate", [text], [{**offer, **wrong}])[0]
    took = time.monotonic() - started
    assert pair.decode.call("new_loads") == []
    assert not pair.decode.call("loaded")
    pair.agree(answer, reference)
    return took


@pytest.mark.parametrize("address", ["10.177.0.99", "198.51.100.7", "nowhere.invalid"])
def test_unreachable_address_costs_one_handshake(pair: Pair, address: str) -> None:
    said = len(pair.decode.log.read_text())
    assert answered(pair, prompt(300, 21), remote_host=address) < HANDSHAKE + SOON
    assert "is not served by" in pair.decode.log.read_text()[said:]


def test_broken_link_costs_one_load(pair: Pair, hosts: tuple[Host, Host]) -> None:
    """Last: the hosts do not reach each other after it."""
    text = prompt(400, 22)
    reference = pair.reference([text])[0]
    offer = pair.prefill.call("prefill", [text])[0]["params"]
    hosts[0].cut()
    started = time.monotonic()
    answer = pair.decode.call("generate", [text], [offer])[0]
    assert time.monotonic() - started < LOAD + HANDSHAKE + SOON
    assert not pair.decode.call("loaded")
    pair.agree(answer, reference)
