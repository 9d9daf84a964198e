"""Which machines may be peers."""

import pytest

from kvferry.common.errors import ConfigError
from kvferry.transport.addresses import ANY_PEER, MAX_ENTRIES, parse_allowed_peers, parse_ip

FAR = "10.1.2.3"


def allowed(peers, *hosts: str) -> list[bool]:
    return [peers.allows(parse_ip(host)) for host in hosts]


def test_an_engine_on_loopback_has_peers_on_its_machine_alone():
    for host in ("127.0.0.1", "localhost", "::1", "127.8.8.8"):
        peers = parse_allowed_peers(None, host, None)
        assert allowed(peers, "127.0.0.9", "::1", "::ffff:127.0.0.1", FAR, "0.0.0.0", "::") == [
            True, True, True, False, False, False,
        ]  # fmt: skip
        assert not peers.may_allow("node7")
        assert peers.may_allow("localhost")


def test_an_engine_on_loopback_may_have_other_peers_by_its_configuration():
    assert allowed(parse_allowed_peers(["10.0.0.0/8"], "127.0.0.1", None), FAR, "127.0.0.1") == [True, False]


@pytest.mark.parametrize("host", ["10.0.0.1", "0.0.0.0", "::", "*", "node"])
def test_another_engine_has_peers_at_all_addresses_and_resolves_its_own_name_alone(host):
    peers = parse_allowed_peers(None, host, "Node7.example.org")
    assert allowed(peers, FAR, "127.0.0.1", "2001:db8::1") == [True, True, True]
    assert allowed(peers, "0.0.0.0", "::", "224.0.0.1", "ff02::1") == [False] * 4
    assert (peers.may_allow("node7.example.org."), peers.may_allow("node8.example.org")) == (True, False)
    assert parse_allowed_peers(None, host, FAR) == parse_allowed_peers(None, host, None) == ANY_PEER


def test_addresses_networks_and_names_are_listed():
    peers = parse_allowed_peers(
        ["10.0.0.7", "192.168.0.0/16", "2001:db8::/32", "Prefill.svc", "a-b_c.d", "localhost"], "0", None
    )
    near = ("10.0.0.7", "192.168.9.9", "2001:db8::9", "127.0.0.1", "::ffff:10.0.0.7")
    assert allowed(peers, *near) == [True] * 5
    assert allowed(peers, "10.0.0.8", "192.169.0.1", "2001:db9::1") == [False] * 3
    assert [peers.may_allow(name) for name in ("prefill.svc", "PREFILL.svc.", "other", "a-b_c.d")] == [
        True, True, False, True,
    ]  # fmt: skip
    assert [peers.may_allow(host) for host in ("10.9.9.9", "0.0.0.0", "other")] == [True, False, False]


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([], "peers has 0 entries, expected 1 to 1024; name the engines' machines"),
        (["10.0.0.1"] * (MAX_ENTRIES + 1), "peers has 1025 entries"),
        (
            ["10.0.0.1", "10.0.0.1/8"],
            r"peers\[1\] is '10.0.0.1/8', an address within a network; give 10.0.0.0/8",
        ),
        (["10.0.0.0/33"], r"peers\[0\] is '10.0.0.0/33', which is no network"),
        (["10.0.0.300"], r"peers\[0\] is '10.0.0.300'; give a host name, an address, or a network"),
        (["*.svc"], "a name stands for all its addresses, like that of a headless service"),
        ([""], r"peers\[0\] is ''; give a host name"),
        (["node7:0"], "is 'node7:0'; give a host name"),
        (["node7:65536"], "is 'node7:65536'; give a host name"),
        (["node7:5600:1"], "is 'node7:5600:1'; give a host name"),
        (["10.0.0.0/8:5600"], "which is no network"),
        (["http://node7"], "which is no network"),
        (["a" * 64], "give a host name"),
        (["node7\n"], "give a host name"),
        (["127.1"], "give a host name"),
    ],
)
def test_a_malformed_entry_is_refused_with_one_sentence(entries, said):
    with pytest.raises(ConfigError, match=said) as refused:
        parse_allowed_peers(entries, "10.0.0.1", None)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("entry", "engine", "host"),
    [
        ("10.0.0.1:5600", ("10.0.0.1", 5600), "10.0.0.1"),
        ("[fd00::1]:5600", ("fd00::1", 5600), "fd00::1"),
        ("node7:65535", ("node7", 65535), "node7"),
        ("localhost:5600", ("127.0.0.1", 5600), "127.0.0.1"),
    ],
)
def test_an_entry_with_a_port_allows_the_host_and_names_an_engine_to_meet(entry, engine, host):
    found = parse_allowed_peers([entry], "10.0.0.9", None)
    assert found.engines == (engine,)
    assert found.may_allow(host)
    assert not found.may_allow("10.0.0.2") or found.names
