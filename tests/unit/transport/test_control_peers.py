"""Which machines the control channel lets in and dials, over real ZeroMQ on loopback."""

import contextlib
import logging
import threading
from contextlib import ExitStack

import pytest
import zmq
from msgspec import structs

from kvferry.common.limited_log import LimitedLog
from kvferry.transport import resolver, security
from kvferry.transport.addresses import ANY_PEER, parse_allowed_peers
from kvferry.transport.control_client import ControlClient
from kvferry.transport.control_server import ControlServer, LeaseClaims
from kvferry.transport.handshake import Pending, Unusable
from kvferry.transport.lease import LeaseWord
from kvferry.transport.listener import Listener
from kvferry.transport.messages import PROTOCOL, Hello, Outgoing, PeerInfo, encode
from kvferry.transport.redeem import Grant, PromptContent, Redeem
from kvferry.transport.resolver import PeerResolver
from support.clock import Clock
from support.keys import KEYS
from support.waiting import wait_for
from transport.cards import cards, facts, ticket

pytestmark = pytest.mark.slow

HOST, OTHER_HOST = "127.0.0.1", "127.0.0.2"
HEARTBEAT_SECONDS = 4.0
ONE = parse_allowed_peers([HOST], "10.0.0.1", None)


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


def server(stack, peers=ANY_PEER, ranks=None, resolve=None) -> ControlServer:
    one = ControlServer(HOST, 0, PeerInfo(facts(), ranks or cards()), KEYS, peers, resolve)
    stack.callback(one.close)
    return one


def client(stack, peers=ANY_PEER, **options) -> ControlClient:
    one = ControlClient(facts("D", 9), lambda ranks: None, KEYS, peers, **options)
    stack.callback(one.close)
    return one


def status(one: ControlClient, address):
    """Return the status of a peer when its handshake has ended."""
    return wait_for(lambda: None if isinstance(answer := one.look_up(address, 1), Pending) else answer)


class HangingNames:
    """A name server that answers nothing before `answer` is set.

    Attributes:
        asked: set when it has been asked.
    """

    def __init__(self, stack, addresses=()) -> None:
        self.asked, self.answer, self._addresses = threading.Event(), threading.Event(), addresses
        stack.callback(self.answer.set)

    def resolve(self, name: str):
        self.asked.set()
        return self._addresses if self.answer.wait(60) else []


def claimed(of: ControlServer, name: str) -> bytes:
    """A ticket that the client has redeemed there."""
    of.tickets.publish(ticket(name), name, 4, PromptContent("tokens"), Grant.of(LeaseWord(1, 2, 1), 4, [[5]]))
    of.tickets.redeem(Redeem(0, 9, ticket(name), 4, PromptContent("tokens")))
    return ticket(name)


def speaker(stack, port: int, source: str, own=None) -> "zmq.Socket[bytes]":
    """A client that connects from an address, with a key pair of its own or the one that is shared."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    security.secure_client(dealer, KEYS)
    if own is not None:
        dealer.curve_publickey, dealer.curve_secretkey = own
    dealer.connect(f"tcp://{source}:0;{HOST}:{port}")
    stack.callback(context.term)
    stack.callback(dealer.close)
    return dealer


def say(speaker: "zmq.Socket[bytes]", message: bytes) -> None:
    """Send a message, unless the speaker was turned away already."""
    with contextlib.suppress(zmq.Again):
        speaker.send(message, zmq.NOBLOCK)


def test_a_client_from_an_allowed_address_is_let_in_and_another_is_not(stack, caplog):
    at = server(stack, ONE).port
    near, far = speaker(stack, at, HOST), speaker(stack, at, OTHER_HOST)
    for one in (far, near):
        say(one, encode(Hello(PROTOCOL, facts("D"))))
    assert near.poll(10_000)
    assert not far.poll(300)
    assert [record.getMessage() for record in caplog.records] == [
        "a client at 127.0.0.2 has the key of this engine, but is none of its peers; list it in peers"
    ]


def test_a_stranger_at_an_allowed_address_is_not_let_in_and_resolves_no_name(stack):
    asked = []
    listener = Listener(
        "channel",
        HOST,
        0,
        KEYS,
        1 << 20,
        peers=parse_allowed_peers(["svc"], "10.0.0.1", None),
        resolve=lambda name: asked.append(name) or [OTHER_HOST],
    )
    stack.callback(listener.close)
    # It knows the public part of the key, so ZeroMQ asks about it.
    public, own = zmq.curve_keypair()
    stranger = speaker(stack, listener.port, OTHER_HOST, (public, own))
    say(stranger, b"hello")
    assert not any(listener.wait(0.1) for _ in range(5))
    assert asked == []
    friend = speaker(stack, listener.port, OTHER_HOST)
    friend.send(b"hello")
    wait_for(lambda: listener.wait(0.1))  # it is let in when its name has been resolved
    assert (listener.receive()[1], asked) == (b"hello", ["svc"])


def test_a_clients_name_that_hangs_holds_up_no_other_client(stack):
    names = HangingNames(stack)
    at = server(stack, parse_allowed_peers([HOST, "svc"], "10.0.0.1", None), resolve=names.resolve).port
    far = speaker(stack, at, OTHER_HOST)
    say(far, encode(Hello(PROTOCOL, facts("D"))))
    assert names.asked.wait(60)
    near = speaker(stack, at, HOST)
    near.send(encode(Hello(PROTOCOL, facts("D"))))
    assert near.poll(60_000)
    assert not far.poll(0)


def test_an_address_of_a_request_is_dialled_only_if_it_is_allowed(stack):
    at = server(stack).port
    one = client(stack, ONE)
    assert isinstance(status(one, (HOST, at)), PeerInfo)
    with zmq.Context() as context, context.socket(zmq.STREAM) as listening:
        listening.linger = 0
        port = listening.bind_to_random_port(f"tcp://{OTHER_HOST}")
        one.hold((OTHER_HOST, port), ticket("a"))
        answer = status(one, (OTHER_HOST, port))
        assert isinstance(answer, Unusable)
        assert "127.0.0.2 is none of the peers that this engine's configuration allows" in answer.reason
        assert not listening.poll(300), "nobody has connected"


def test_an_engine_on_loopback_dials_no_other_machine(stack):
    answer = status(client(stack, parse_allowed_peers(None, HOST, None)), ("10.255.255.1", 7))
    assert isinstance(answer, Unusable)
    assert "10.255.255.1 is another machine" in answer.reason


def test_a_name_of_a_request_reaches_no_resolver(stack):
    asked = []
    answer = status(client(stack, resolve=lambda name: asked.append(name) or []), ("evil.example.org", 7))
    assert isinstance(answer, Unusable)
    assert "a name that this engine's peers setting does not list" in answer.reason
    assert asked == []


def test_a_listed_name_is_dialled_at_the_address_that_was_found(stack):
    at = server(stack)
    peers = parse_allowed_peers(["svc"], "10.0.0.1", None)
    one = client(stack, peers, heartbeat_seconds=1.0, resolve=lambda name: {"svc": [HOST]}[name])
    first, second = claimed(at, "a"), claimed(at, "b")
    one.hold(("svc", at.port), first)
    one.hold(("svc", at.port), second)
    one.release(("svc", at.port), first)
    assert isinstance(status(one, ("svc", at.port)), PeerInfo)
    heard = wait_for(lambda: len(at.events) > 3 and [at.events.popleft() for _ in range(4)])
    assert heard == [
        LeaseClaims(["a"]),
        LeaseClaims(["b"]),
        LeaseClaims(["a"], released=True),
        LeaseClaims(["b"]),
    ], "in order"


def test_messages_to_a_name_that_is_not_resolved_yet_are_bounded_and_keep_their_order(stack):
    names, at = HangingNames(stack, [HOST]), server(stack)
    peers = parse_allowed_peers([HOST, "svc"], "10.0.0.1", None)
    one = client(stack, peers, clock=Clock(), resolve=names.resolve, max_unresolved=3)
    for name in "abcde":
        one.hold(("svc", at.port), claimed(at, name))
    assert isinstance(status(one, (HOST, server(stack).port)), PeerInfo)  # all before it was executed
    names.answer.set()
    heard = wait_for(lambda: len(at.events) > 2 and list(at.events))
    assert heard == [LeaseClaims(["a"]), LeaseClaims(["b"]), LeaseClaims(["c"])]


def test_a_resolver_that_hangs_delays_no_heartbeat_and_no_other_handshake(stack):
    names, clock, near, other = HangingNames(stack), Clock(), server(stack), server(stack)
    peers = parse_allowed_peers([HOST, "svc", "svc2"], "10.0.0.1", None)
    one = client(stack, peers, clock=clock, resolve=names.resolve, heartbeat_seconds=HEARTBEAT_SECONDS)
    one.hold((HOST, near.port), claimed(near, "a"))
    wait_for(lambda: near.events)
    for name in ("svc", "svc2"):
        one.hold((name, near.port), ticket("b"))
        assert isinstance(one.look_up((name, near.port), 1), Pending)
    assert isinstance(status(one, (HOST, other.port)), PeerInfo)
    near.events.clear()
    clock.now += HEARTBEAT_SECONDS
    wait_for(lambda: near.events)
    assert isinstance(one.look_up(("svc", near.port), 1), Pending)
    clock.now += resolver.PATIENCE_SECONDS
    answer = status(one, ("svc", near.port))
    assert isinstance(answer, Unusable)
    assert "its name has no address: the name server does not answer" in answer.reason


def test_an_address_with_kept_turns_is_remembered_only_if_it_is_allowed(stack):
    asker = server(stack, ONE)
    dealer = speaker(stack, asker.port, HOST)
    for number, host in enumerate((OTHER_HOST, "evil.example.org", HOST), 1):
        dealer.send(encode(Hello(PROTOCOL, structs.replace(facts("D", number), keeps_turns=(host, number)))))
        assert dealer.poll(10_000)
        dealer.recv()
    assert asker.keepers == {(HOST, 3): 3}


@pytest.mark.parametrize(("host", "gathers"), [(HOST, True), (OTHER_HOST, False)])
def test_a_peers_worker_is_known_to_gather_only_where_it_may_be_dialled(stack, host, gathers):
    (card,) = cards()
    outgoing = Outgoing(host, 7, 4096, 4096, 1)
    at = server(stack, ranks=(structs.replace(card, outgoing=outgoing),))
    (found,) = status(client(stack, ONE), (HOST, at.port)).ranks
    assert found.outgoing == (outgoing if gathers else None)


@pytest.mark.parametrize(
    ("host", "dialled"),
    [(HOST, HOST), ("::ffff:127.0.0.1", HOST), (OTHER_HOST, None), ("evil.example.org", None), ("svc", None)],
)
def test_a_worker_gathers_only_where_it_may_be_dialled(caplog, host, dialled):
    (card,) = cards()
    outgoing = Outgoing(host, 7, 4096, 4096, 1)
    peers = parse_allowed_peers([HOST, "svc"], "10.0.0.1", None)
    known, log = PeerResolver(peers, resolve=lambda name: []), LimitedLog(logging.getLogger("kvferry"))
    for _ in range(3):
        found = known.resolve_gathering(structs.replace(card, outgoing=outgoing), ("p", 1), log)
    if dialled is None:
        assert found == structs.replace(card, outgoing=None)
        (said,) = caplog.messages
        assert f"gathers at {host}, which is not dialled" in said
    else:
        assert found.outgoing == structs.replace(outgoing, host=dialled)
    assert known.resolve_gathering(card, ("p", 1), log) == card
