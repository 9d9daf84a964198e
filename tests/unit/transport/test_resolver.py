"""Names of peers, resolved in threads of their own."""

import socket
import threading

import pytest

from kvferry.transport import resolver as resolver_module
from kvferry.transport.addresses import ANY_PEER, AllowedPeers, parse_allowed_peers, parse_ip
from kvferry.transport.resolver import AddressNotAllowed, PeerResolver
from support.clock import Clock
from support.waiting import wait_for


class Resolver:
    """A name server: answers from `book`; names that are not in it hang until the test ends."""

    def __init__(self) -> None:
        self.book: dict[str, list[str] | OSError] = {}
        self.asked: list[str] = []
        self.ended = threading.Event()

    def __call__(self, name: str) -> list[str]:
        self.asked.append(name)
        if name not in self.book:
            assert self.ended.wait(30.0)
            return []
        answer = self.book[name]
        if isinstance(answer, OSError):
            raise answer
        return answer


@pytest.fixture
def resolver():
    resolver = Resolver()
    yield resolver
    resolver.ended.set()


@pytest.fixture
def clock():
    return Clock(1000.0)


def resolving() -> list[threading.Thread]:
    """Return the threads that resolve names."""
    return [one for one in threading.enumerate() if one.name == "kvferry-names"]


def listing(*entries: str) -> AllowedPeers:
    return parse_allowed_peers(entries, "10.0.0.1", None)


def resolved(ask):
    """Return the answer when nothing is being resolved."""
    return wait_for(lambda: None if (answer := ask()) is None else [answer])[0]


def test_a_numeric_address_is_dialled_as_it_is_and_nothing_is_resolved(resolver):
    found = PeerResolver(ANY_PEER, resolve=resolver)
    hosts = "10.0.0.7", "::ffff:10.0.0.7", "[2001:DB8::1]", "localhost"
    assert [found.resolve(host) for host in hosts] == [
        "10.0.0.7", "10.0.0.7", "2001:db8::1", "127.0.0.1",
    ]  # fmt: skip
    assert resolver.asked == []


@pytest.mark.parametrize(
    "host", ["node7", "127.1", "0x7f000001", "010.0.0.1", "evil.example.org", "10.0.0.7."]
)
@pytest.mark.parametrize(
    "peers", [ANY_PEER, listing("node8", "10.0.0.0/8"), parse_allowed_peers(None, "127.0.0.1", None)]
)
def test_a_name_that_is_not_listed_never_reaches_a_resolver(resolver, host, peers):
    found = PeerResolver(peers, resolve=resolver)
    with pytest.raises(AddressNotAllowed, match="a name that this engine's peers setting does not list"):
        found.resolve(host)
    assert resolver.asked == []


def test_an_address_that_is_not_allowed_is_refused_with_what_to_do(resolver):
    with pytest.raises(AddressNotAllowed, match=r"10\.0\.0\.7 is none of the peers .*; list it in peers"):
        PeerResolver(listing("10.1.0.0/16"), resolve=resolver).resolve("10.0.0.7")
    resolver.book["node7"] = ["10.0.0.8"]
    listed = PeerResolver(parse_allowed_peers(["localhost", "node7"], "127.0.0.1", None), resolve=resolver)
    with pytest.raises(AddressNotAllowed, match="is none of the peers"):
        resolved(lambda: listed.resolve("10.0.0.7"))
    with pytest.raises(
        AddressNotAllowed, match=r"10\.0\.0\.7 is another machine, .*listens on loopback; set host"
    ):
        PeerResolver(parse_allowed_peers(None, "127.0.0.1", None), resolve=resolver).resolve("10.0.0.7")
    with pytest.raises(AddressNotAllowed):
        PeerResolver(ANY_PEER, resolve=resolver).resolve("0.0.0.0")


def test_a_listed_name_is_resolved_once_and_dialled_at_the_address_found(resolver):
    resolver.book["node7"] = ["10.0.0.7", "10.0.0.8"]
    told = threading.Event()
    found = PeerResolver(listing("Node7"), told.set, resolver)
    assert found.resolve("NODE7") is None, "nobody waits for a resolver"
    assert told.wait(10.0)
    assert found.resolve("node7.") == "10.0.0.7"
    resolver.book["node7"] = ["192.168.0.1"]
    assert found.resolve("node7") == "10.0.0.7"
    assert resolver.asked == ["node7"]


def test_addresses_of_a_listed_name_are_allowed_and_others_are_not(resolver):
    resolver.book["node7"] = ["10.0.0.7"]
    found = PeerResolver(listing("node7", "192.168.0.0/16"), resolve=resolver)
    assert found.is_allowed(parse_ip("10.0.0.7")) is None, "its name is being resolved"
    assert resolved(lambda: found.is_allowed(parse_ip("10.0.0.7"))) is True
    assert found.resolve("10.0.0.7") == "10.0.0.7"
    assert found.is_allowed(parse_ip("192.168.3.3")) is True
    assert found.is_allowed(parse_ip("10.0.0.8")) is False


def test_an_address_that_is_new_for_a_name_is_learned(resolver, clock):
    resolver.book["svc"] = ["10.0.0.7"]
    found = PeerResolver(listing("svc"), resolve=resolver, clock=clock)
    resolved(lambda: found.resolve("svc"))
    resolver.book["svc"] = ["10.0.0.8"]
    assert found.is_allowed(parse_ip("10.0.0.8")) is False, "it was resolved just now"
    clock.now += resolver_module.NEW_SECONDS
    assert found.is_allowed(parse_ip("10.0.0.8")) is None
    assert resolved(lambda: found.is_allowed(parse_ip("10.0.0.8"))) is True
    assert found.is_allowed(parse_ip("10.0.0.7")) is False, "the name has left it"


def test_old_addresses_serve_while_the_resolver_hangs_and_are_forgotten_after_a_while(resolver, clock):
    resolver.book["svc"] = ["10.0.0.7"]
    found = PeerResolver(listing("svc"), resolve=resolver, clock=clock)
    resolved(lambda: found.resolve("svc"))
    del resolver.book["svc"]
    clock.now += resolver_module.FRESH_SECONDS
    assert found.resolve("svc") == "10.0.0.7"
    clock.now += resolver_module.STALE_SECONDS
    with pytest.raises(AddressNotAllowed, match="the name server does not answer"):
        found.resolve("svc")
    assert found.is_allowed(parse_ip("10.0.0.7")) is False
    wait_for(lambda: len(resolver.asked) == 2)
    clock.now += resolver_module.FRESH_SECONDS
    with pytest.raises(AddressNotAllowed):
        found.resolve("svc")
    resolver.ended.set()
    wait_for(lambda: not resolving())
    assert resolver.asked == ["svc", "svc"], "a name that hangs is not asked for again"


def test_a_name_without_an_address_is_refused_in_words_and_tried_again(resolver, clock):
    resolver.book["svc"] = socket.gaierror(-2, "Name or service not known")
    found = PeerResolver(listing("svc"), resolve=resolver, clock=clock)

    def refused() -> str | None:
        try:
            return found.resolve("svc")
        except AddressNotAllowed as error:
            return str(error)

    assert resolved(refused) == "its name has no address: Name or service not known"
    assert resolver.asked == ["svc"]
    resolver.book["svc"] = ["0.0.0.0", "ff02::1", "10.0.0.9"]
    clock.now += resolver_module.RETRY_SECONDS
    found.resolve("svc")
    assert resolved(refused) == "10.0.0.9"


def test_few_threads_resolve_however_many_names_hang(resolver):
    found = PeerResolver(listing(*(f"n{i}" for i in range(50))), resolve=resolver)
    for number in range(50):
        assert found.resolve(f"n{number}") is None
    assert found.is_allowed(parse_ip("10.0.0.1")) is None
    assert 1 <= len(resolving()) <= resolver_module.THREADS
    assert len(resolver.asked) <= resolver_module.THREADS


def test_answers_after_the_end_are_told_to_nobody(resolver):
    told = []
    found = PeerResolver(listing("svc"), lambda: told.append(1), resolver)
    assert found.resolve("svc") is None
    found.close()
    resolver.ended.set()
    wait_for(lambda: not resolving())
    assert told == []


def test_the_systems_resolver_is_asked():
    name = socket.gethostname()
    found = PeerResolver(listing(name))
    assert resolved(lambda: found.resolve(name)) in {place[0] for *_, place in socket.getaddrinfo(name, None)}
