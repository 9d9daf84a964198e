"""Both ends of the control channel over real ZeroMQ on loopback."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import pytest
import zmq
from msgspec import structs

from kvferry.common.errors import ConfigError, Incompatible
from kvferry.keys.chunk import ChunkKeys
from kvferry.transport import handshake, security, sockets as control_socket
from kvferry.transport.addresses import ANY_PEER
from kvferry.transport.control_client import ControlClient
from kvferry.transport.control_server import (
    MAX_PER_SENDER,
    ControlServer,
    LeaseClaims,
)
from kvferry.transport.handshake import Pending, Unusable
from kvferry.transport.lease import LeaseWord
from kvferry.transport.messages import (
    MAX_TICKETS,
    PROTOCOL,
    Claim,
    Hello,
    KeptTurn,
    PeerInfo,
    Refused,
    decode_request,
    encode,
)
from kvferry.transport.redeem import Grant, PromptContent, Redeem, Redeemed, Unchanged
from kvferry.transport.redemptions import SILENT, Redemption
from kvferry.transport.seal import SealBinding, seal_grant
from kvferry.transport.turns import TurnContent
from support.clock import Clock
from support.keys import KEYS, OTHER_KEYS
from support.waiting import wait_for
from transport.cards import cards, facts, ticket

pytestmark = pytest.mark.slow

HOST = "127.0.0.1"
LEASE, MARK = ticket("lease"), ticket("mark")
CONTENT = PromptContent("tokens")
GRANT = Grant.of(LeaseWord(1, 2, 1), 4, [[5], [6]])
KEPT = structs.replace(GRANT, incarnation=3, tokens=600)


@pytest.fixture
def ends():
    """Start servers and clients that end with the test."""
    with ExitStack() as stack:
        yield Ends(stack)


class Ends:
    """Both ends of the channel.

    Attributes:
        heard: messages to servers that `fake` has started.
    """

    def __init__(self, stack: ExitStack) -> None:
        self._stack, self.heard = stack, list[bytes]()

    def server(self, of=None, port=0, keys=KEYS, peers=ANY_PEER) -> ControlServer:
        server = ControlServer(HOST, port, PeerInfo(of or facts(), cards()), keys, peers)
        self._stack.callback(server.close)
        return server

    def client(self, of=None, check=lambda ranks: None, keys=KEYS, **options) -> ControlClient:
        client = ControlClient(of or facts("D", 9), check, keys, **options)
        self._stack.callback(client.close)
        return client

    def fake(self, *replies: bytes) -> int:
        """A server that sends these, whatever it is asked; returns its port."""
        context = zmq.Context()
        router = context.socket(zmq.ROUTER)
        router.linger = 0
        security.secure_server(router, KEYS)
        port = router.bind_to_random_port(f"tcp://{HOST}")
        stop = threading.Event()

        def run() -> None:
            while not stop.is_set():
                if router.poll(20):
                    sender, message = router.recv_multipart()
                    self.heard.append(message)
                    for reply in replies:
                        router.send_multipart([sender, reply])

        thread = threading.Thread(target=run)
        thread.start()
        self._stack.callback(context.term)
        self._stack.callback(router.close)
        self._stack.callback(thread.join)
        self._stack.callback(stop.set)
        return port

    def raw(self, port: int) -> "zmq.Socket[bytes]":
        """A socket that says what it likes."""
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 1000
        security.secure_client(dealer, KEYS)
        dealer.connect(f"tcp://{HOST}:{port}")
        self._stack.callback(context.term)
        self._stack.callback(dealer.close)
        return dealer


def status(client: ControlClient, port: int, incarnation: int = 1, host: str = HOST):
    """Return the status of a peer when its handshake has ended."""
    return wait_for(
        lambda: None if isinstance(answer := client.look_up((host, port), incarnation), Pending) else answer
    )


def execute(client: ControlClient, server: ControlServer) -> None:
    """Wait until the client has executed all that it was asked before. It connects to the server."""
    server.turns.publish(content(600), KeptTurn("D", MARK, KEPT, 1, 0, []), "mark")
    client.hold((HOST, server.port), MARK)
    wait_for(lambda: LeaseClaims(["mark"]) in server.events)


def publish(server: ControlServer, named: bytes, lease: str = "lease") -> None:
    server.tickets.publish(named, lease, 4, CONTENT, GRANT)


@contextmanager
def stopped(server: ControlServer) -> Iterator[None]:
    """Have the server answer no ticket within the block."""
    redeem, may_go_on = server.tickets.redeem, threading.Event()

    def late(asked: Any) -> Any:
        may_go_on.wait(30)
        return redeem(asked)

    server.tickets.redeem = late
    try:
        yield
    finally:
        may_go_on.set()


def granted(client: ControlClient, claim: Redemption):
    """Return a redemption's answer."""
    return wait_for(lambda: None if isinstance(answer := client.answer(claim, 0.01), Pending) else answer)


def redeem(
    client: ControlClient, server: ControlServer, named: bytes, lease: str = "lease", publishes: bool = True
) -> Redemption:
    """Claim a lease, which the server has granted."""
    if publishes:
        publish(server, named, lease)
    status(client, server.port)
    claim = client.redeem((HOST, server.port), named, 4, CONTENT)
    assert granted(client, claim).grant == GRANT
    return claim


def test_a_handshake_ends_with_the_ranks_of_the_peer(ends):
    server, client = ends.server(), ends.client()
    assert isinstance(client.look_up((HOST, server.port), 1), Pending), "the first answer does not wait"
    answer = status(client, server.port)
    assert answer == PeerInfo(facts(), cards(), server.seal_key)


def test_the_ranks_are_checked_before_they_are_known(ends):
    def check(ranks):
        assert ranks == cards()
        raise Incompatible(["first difference", "second difference"])

    server = ends.server()
    answer = status(ends.client(check=check), server.port)
    assert answer == Unusable("first difference; second difference")


def test_a_check_that_breaks_costs_that_peer_only(ends):
    calls = []

    def check(ranks):
        calls.append(ranks)
        if len(calls) == 1:
            raise OverflowError("Python int too large to convert to C long")

    client = ends.client(check=check)
    assert "too large" in status(client, ends.server().port).reason
    assert isinstance(status(client, ends.server().port), PeerInfo)


def raising_once(function):
    """Return a function that raises at its first call, and calls `function` later."""
    broken = iter([True])

    def call(*arguments):
        if next(broken, False):
            raise RuntimeError("nobody expects this")
        return function(*arguments)

    return call


def test_a_message_at_which_the_server_raises_costs_that_message_only(ends, caplog):
    clock, server = Clock(), ends.server()
    client = ends.client(clock=clock)
    publish(server, LEASE)
    status(client, server.port)
    server.tickets.redeem = raising_once(server.tickets.redeem)
    lost = client.redeem((HOST, server.port), LEASE, 4, CONTENT)
    wait_for(lambda: "nobody expects this" in caplog.text)
    clock.now += 6.0
    assert granted(client, lost).reason.startswith("it did not answer")
    client.end(lost)
    again = client.redeem((HOST, server.port), LEASE, 4, CONTENT)
    assert granted(client, again) == Redeemed(again.message.number, GRANT)


def test_an_answer_at_which_the_client_raises_silences_no_other_peer(ends, monkeypatch, caplog):
    server, client = ends.server(), ends.client(handshake_seconds=2.0)
    monkeypatch.setattr(ControlClient, "_receive", raising_once(ControlClient._receive))
    wait_for(lambda: not isinstance(status(client, server.port), Unusable))
    wait_for(lambda: "nobody expects this" in caplog.text)
    claim = client.redeem((HOST, server.port), ticket("other"), 4, CONTENT)
    assert granted(client, claim).reason.startswith("it does not know the ticket")


def test_a_refusal_names_every_difference(ends):
    server = ends.server(facts(weights="theirs", extra="1"))
    answer = status(ends.client(facts("D", 9, weights="ours", **{"model dtype": "bfloat16"})), server.port)
    assert isinstance(answer, Unusable)
    assert "weights: theirs there, ours here" in answer.reason
    assert "model dtype: float32 there, bfloat16 here" in answer.reason
    assert "extra" not in answer.reason


def test_a_peer_that_accepts_what_differs_is_refused_all_the_same(ends):
    port = ends.fake(encode(PeerInfo(facts(weights="theirs"), cards())))
    answer = status(ends.client(facts("D", 9, weights="ours")), port)
    assert isinstance(answer, Unusable)
    assert "weights: theirs there, ours here" in answer.reason


@pytest.mark.parametrize(
    ("hello", "said"),
    [
        (
            Hello(PROTOCOL - 1, facts("D")),
            "protocol {theirs} there, {ours} here; run the same release of kvferry on both",
        ),
        (Hello(PROTOCOL, facts("D", weights="others")), "weights: {theirs} there, {ours} here"),
    ],
)
def test_a_refusal_is_said_on_both_sides(ends, caplog, hello, said):
    server = ends.server()
    raw = ends.raw(server.port)
    raw.send(encode(hello))
    assert raw.poll(5000)
    refused = msgspec.msgpack.decode(raw.recv(), type=Refused)
    mine, other = ("abc", "others") if hello.protocol == PROTOCOL else (PROTOCOL, hello.protocol)
    assert refused.differences == [said.format(theirs=mine, ours=other)]
    wait_for(lambda: caplog.messages)
    assert caplog.messages == ["engine D cannot read from this one: " + said.format(theirs=other, ours=mine)]


def test_a_refused_client_does_not_see_transport_metadata(ends):
    server = ends.server()
    raw = ends.raw(server.port)
    raw.send(encode(Hello(PROTOCOL, facts("D", weights="others"))))
    assert raw.poll(5000)
    refused = msgspec.msgpack.decode(raw.recv(), type=Refused)
    assert refused.differences == ["weights: abc there, others here"]


def test_a_silent_peer_is_given_up_after_handshake_seconds(ends):
    with socket.create_server((HOST, 0)) as silent:
        clock, server, address = Clock(), ends.server(), (HOST, silent.getsockname()[1])
        client = ends.client(handshake_seconds=30.0, clock=clock)
        client.look_up(address)
        execute(client, server)
        clock.now = 29.9
        status(client, server.port)
        assert isinstance(client.look_up(address), Pending)
        clock.now = 30.0
        reason = "no answer within 30 s; is it up and reachable, and does it have the same key?"
        assert status(client, address[1]) == Unusable(reason, gone=True)


def test_a_peer_nobody_listens_for_is_given_up_at_once_and_soon_asked_anew(ends):
    with socket.create_server((HOST, 0)) as gone:
        port = gone.getsockname()[1]
    clock = Clock()
    client = ends.client(clock=clock)
    assert status(client, port) == Unusable(handshake.GONE, gone=True)
    ends.server(port=port)
    assert status(client, port) == Unusable(handshake.GONE, gone=True)
    clock.now += handshake.GONE_SECONDS + 0.1
    assert isinstance(status(client, port), PeerInfo)


def test_a_refusal_stands_for_a_while_and_is_then_asked_anew(ends):
    clock, refuses = Clock(), iter([True])

    def check(ranks):
        if next(refuses, False):
            raise Incompatible(["a difference"])

    server, client = ends.server(), ends.client(check=check, clock=clock)
    assert isinstance(status(client, server.port), Unusable)
    clock.now += handshake.REFUSAL_SECONDS
    assert isinstance(client.look_up((HOST, server.port), 1), Unusable)
    clock.now += 0.1
    assert isinstance(status(client, server.port), PeerInfo)


@pytest.mark.parametrize(
    "greeting",
    [b"HTTP/1.1 502 Bad Gateway\r\n\r\n", b"", b"\xff" + bytes(63)],
    ids=["text", "nothing", "another version"],
)
def test_a_peer_is_connected_anew_after_a_fault_that_passes(ends, greeting):
    """Something else answers first, as a load balancer does for an engine that starts; a lease is held."""
    clock = Clock()
    with socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
        client = ends.client(clock=clock)
        client.hold((HOST, port), LEASE)
        taken, _ = other.accept()
        taken.sendall(greeting)
        taken.close()
        client.look_up((HOST, port))
        execute(client, ends.server())
        clock.now += 5.0
        assert isinstance(status(client, port), Unusable)
    ends.server(port=port)
    clock.now += handshake.REFUSAL_SECONDS + 1.0
    assert isinstance(status(client, port), PeerInfo)
    client.release((HOST, port), LEASE)


def test_a_peer_that_is_met_anew_still_hears_of_the_leases_held_there(ends):
    server, client = ends.server(), ends.client(heartbeat_seconds=0.05)
    status(client, server.port)
    redeem(client, server, LEASE)
    client.forget((HOST, server.port))
    status(client, server.port)
    server.events.clear()
    wait_for(lambda: LeaseClaims(["lease"]) in server.events)


def test_a_peer_that_was_given_up_has_its_full_time_when_it_is_asked_anew(ends):
    with socket.create_server((HOST, 0)) as silent:
        clock, server, address = Clock(), ends.server(), (HOST, silent.getsockname()[1])
        client = ends.client(handshake_seconds=30.0, clock=clock)
        for _ in range(2):
            client.look_up(address)
            execute(client, server)
            clock.now += 29.9
            status(client, server.port)
            assert isinstance(client.look_up(address), Pending)
            clock.now += 0.1
            assert isinstance(status(client, address[1]), Unusable)
            client.forget(address)
            server.events.clear()


def test_a_restarted_peer_is_asked_anew(ends):
    first = ends.server(facts(incarnation=1))
    client = ends.client()
    assert status(client, first.port, 1).facts.incarnation == 1
    first.close()
    ends.server(facts(incarnation=2), port=first.port)
    assert status(client, first.port, 2).facts.incarnation == 2


def test_a_ticket_of_a_run_that_is_over_is_answered_not_asked_for_ever(ends):
    server = ends.server(facts(incarnation=2))
    client = ends.client()
    for incarnation in (2, 1, 3, 1, 2):
        answer = status(client, server.port, incarnation)
        assert isinstance(answer, PeerInfo)
        assert answer.facts.incarnation == 2, "the caller sees that this is another run"


def test_a_forgotten_peer_is_asked_anew(ends):
    server, client = ends.server(), ends.client()
    status(client, server.port)
    client.forget((HOST, server.port))
    assert isinstance(client.look_up((HOST, server.port), 1), Pending)
    assert isinstance(status(client, server.port), PeerInfo)


def test_garbage_costs_the_server_nothing_and_is_counted(ends):
    server = ends.server()
    raw = ends.raw(server.port)
    junk = [b"", b"\x00", b"\xff" * 1000, b"\x81\xa4type\xa7unknown", encode(Hello(PROTOCOL, facts()))[:-3]]
    junk.append(encode(Hello(PROTOCOL, facts("x"))).replace(b"\xa1x", b"\xa1\x80"))
    for message in junk:
        raw.send(message)
    raw.send_multipart([b"too", b"many", b"frames"])
    wait_for(lambda: server.rejected == len(junk) + 1)
    assert isinstance(status(ends.client(), server.port), PeerInfo)
    assert not server.events


@pytest.mark.parametrize(
    "replies",
    [
        [b""],
        [b"\xff\xff\xff"],
        [encode(PeerInfo(facts(), ()))],
        [encode(PeerInfo(facts(), cards()))[:-1]],
        [encode(PeerInfo(facts("x"), cards())).replace(b"\xa1x", b"\xa1\x80")],
        [encode(Hello(PROTOCOL, facts()))],
    ],
    ids=["empty", "random", "no ranks", "cut short", "not UTF-8", "a request"],
)
def test_a_garbled_answer_refuses_that_peer_only(ends, replies):
    client = ends.client()
    bad, good = ends.fake(*replies), ends.server().port
    assert isinstance(status(client, bad), Unusable)
    assert isinstance(status(client, good), PeerInfo)


def test_a_refusal_without_a_reason_is_a_refusal(ends):
    assert status(ends.client(), ends.fake(encode(Refused([])))) == Unusable("it gave no reason")


@pytest.mark.parametrize(
    "host", ["no such host, this", "", "a b", "[", "\ud800", "nul\0byte", "x" * 3000, "*"]
)
def test_an_address_that_is_none_refuses_that_peer_only(ends, host):
    client = ends.client(handshake_seconds=2.0)
    client.hold((host, 1234), LEASE)
    assert isinstance(status(client, 1234, host=host), Unusable)
    client.release((host, 1234), LEASE)
    assert isinstance(status(client, ends.server().port), PeerInfo)


def test_many_peers_shake_hands_at_the_same_time(ends):
    with socket.create_server((HOST, 0)) as silent:
        client = ends.client(handshake_seconds=600.0)
        client.look_up((HOST, silent.getsockname()[1]), 1)
        ports = [ends.server(facts(f"P{n}", n)).port for n in range(10)]
        for n, port in enumerate(ports):
            client.look_up((HOST, port), n)
        for n, port in enumerate(ports):
            assert status(client, port, n).facts.engine_id == f"P{n}"
        silent_one = client.look_up((HOST, silent.getsockname()[1]), 1)
        assert isinstance(silent_one, Pending), "nobody waits for the silent one"


def test_one_server_answers_many_clients(ends):
    server = ends.server()
    clients = [ends.client(facts(f"D{n}", n)) for n in range(8)]
    for client in clients:
        client.look_up((HOST, server.port), 1)
    assert all(isinstance(status(client, server.port), PeerInfo) for client in clients)


def test_heartbeats_come_while_a_lease_is_held_and_stop_with_its_release(ends):
    server = ends.server()
    client = ends.client(heartbeat_seconds=0.05)
    first, second = (redeem(client, server, ticket(name), name) for name in "ab")
    wait_for(lambda: sum(event == LeaseClaims(["a", "b"]) for event in list(server.events)) >= 3)
    client.end(first)
    wait_for(lambda: LeaseClaims(["a"], released=True) in server.events)
    server.events.clear()
    wait_for(lambda: len(server.events) >= 2)
    assert all(event == LeaseClaims(["b"]) for event in list(server.events)), (
        "a released lease is not kept alive"
    )
    client.end(second)
    wait_for(lambda: LeaseClaims(["b"], released=True) in server.events)
    server.events.clear()
    execute(client, server)
    wait_for(lambda: len(server.events) >= 3)  # heartbeats go on, for the lease that is held now
    assert all(event == LeaseClaims(["mark"]) for event in list(server.events))


def test_a_reply_that_comes_after_a_heartbeat_is_heard(ends):
    clock, server, other, asked = Clock(), ends.server(), ends.server(), threading.Event()
    client = ends.client(clock=clock, heartbeat_seconds=0.1)
    find = server.turns.find
    server.turns.find = lambda question: asked.wait() and find(question)
    try:
        number = client.ask_turn({(HOST, server.port): 1}, content(600))
        execute(client, other)
        clock.now += 0.2
        execute(client, other)
        execute(client, other)
        assert client.turns(number) is None
    finally:
        asked.set()
    wait_for(lambda: client.turns(number) == [])


def test_an_engine_that_runs_no_steps_keeps_no_lease_alive(ends):
    clock, running, server = Clock(), threading.Event(), ends.server()
    client = ends.client(clock=clock, runs=running.is_set)
    redeem(client, server, ticket("a"), "a")

    def beats() -> bool:
        server.events.clear()
        clock.now += 5.0
        execute(client, server)
        execute(client, server)
        return any("a" in event.leases for event in list(server.events))

    assert not any(beats() for _ in range(5))
    running.set()
    wait_for(beats)


def test_heartbeats_of_many_leases_travel_in_messages_of_bounded_length(ends):
    clock, at = Clock(), (HOST, ends.fake())
    client = ends.client(clock=clock)
    for number in range(MAX_TICKETS + 2):
        client.hold(at, number.to_bytes(16, "big"))
    execute(client, ends.server())

    def beats() -> set[int]:
        clock.now += 5.0
        sizes = {len(decode_request(message).tickets) for message in list(ends.heard)}
        return sizes - {1}  # a ticket alone is said when it is held

    wait_for(lambda: beats() == {MAX_TICKETS, 2})


def test_a_lease_is_claimed_at_once_and_not_with_the_next_heartbeat(ends):
    server = ends.server()
    client = ends.client(heartbeat_seconds=600.0)
    for name in "ab":
        redeem(client, server, ticket(name), name)
    wait_for(lambda: list(server.events) == [LeaseClaims(["a"]), LeaseClaims(["b"])])


def test_a_release_right_before_the_end_still_goes_out(ends):
    server = ends.server()
    client = ControlClient(facts("D"), lambda ranks: None, KEYS)
    client.end(redeem(client, server, LEASE))
    client.close()
    wait_for(lambda: LeaseClaims(["lease"], released=True) in server.events)


def test_a_message_right_before_the_end_still_goes_out_to_a_peer_that_was_just_dialled():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        security.secure_server(router, KEYS)
        address = (HOST, router.bind_to_random_port(f"tcp://{HOST}"))
        client = ControlClient(facts("D", 9), lambda ranks: None, KEYS, linger_seconds=60.0)
        client.look_up(address)
        client.release(address, LEASE)
        client.close()
        assert router.poll(60_000)
        router.recv_multipart()
        assert router.poll(60_000)
        assert router.recv_multipart()[-1] == encode(Claim(9, [LEASE], released=True))


def test_a_ticket_travels_behind_the_first_message_to_a_new_peer(ends):
    server, client = ends.server(), ends.client()
    publish(server, LEASE)
    assert isinstance(client.look_up((HOST, server.port)), Pending)
    claim = client.redeem((HOST, server.port), LEASE, 4, CONTENT)
    assert isinstance(client.answer(claim), Pending), "the first answer does not wait"
    assert granted(client, claim) == Redeemed(claim.message.number, GRANT)
    assert status(client, server.port) == PeerInfo(facts(), cards(), server.seal_key)


def test_a_ticket_alone_opens_no_connection(ends):
    """Its address came with a request; the handshake decides whether anybody is spoken to there."""
    server, other, client = ends.server(), ends.server(), ends.client()
    publish(server, LEASE)
    claim = client.redeem((HOST, server.port), LEASE, 4, CONTENT)
    execute(client, other)
    assert client.connections == 1, "to the other server"
    assert isinstance(client.answer(claim), Pending)
    status(client, server.port)
    assert granted(client, claim) == Redeemed(claim.message.number, GRANT)


def test_a_ticket_that_is_refused_says_why_and_claims_nothing(ends):
    server, client = ends.server(), ends.client()
    publish(server, LEASE)
    status(client, server.port)
    at = HOST, server.port
    for asked, tokens, content, says in (
        (ticket("guessed"), 4, CONTENT, "it does not know the ticket"),
        (LEASE, 5, CONTENT, "the ticket is for 4 tokens, not for 5"),
        (LEASE, 4, PromptContent("other"), "the offered blocks hold other tokens than this prompt"),
    ):
        claim = client.redeem(at, asked, tokens, content)
        assert granted(client, claim).reason.startswith(says)
        client.end(claim)
        client.release(at, asked)
    client.end(redeem(client, server, LEASE, publishes=False))
    wait_for(lambda: list(server.events) == [LeaseClaims(["lease"]), LeaseClaims(["lease"], released=True)])


def holding_up(server: ControlServer) -> threading.Event:
    """Let a server redeem no ticket before the event that this returns is set."""
    begun, redeem = threading.Event(), server.tickets.redeem

    def slow(message):
        begun.wait()
        return redeem(message)

    server.tickets.redeem = slow
    return begun


def test_a_producer_that_does_not_answer_a_ticket_is_given_up_and_met_anew(ends):
    clock, server = Clock(), ends.server()
    client = ends.client(handshake_seconds=5.0, clock=clock)
    status(client, server.port)
    publish(server, LEASE)
    begun = holding_up(server)
    claim = client.redeem((HOST, server.port), LEASE, 4, CONTENT)
    clock.now = 4.9
    assert isinstance(client.answer(claim, 0.05), Pending)
    clock.now = 5.0
    assert granted(client, claim) == Unusable(SILENT.format(seconds=5), gone=True)
    assert isinstance(client.look_up((HOST, server.port)), Pending)
    client.end(claim)
    begun.set()
    wait_for(lambda: LeaseClaims(["lease"], released=True) in server.events)  # it may have claimed the lease


def test_a_producer_that_has_ended_is_given_up_although_no_time_passes(ends):
    """Its control thread has taken the question."""
    server, client = ends.server(), ends.client(clock=Clock())
    status(client, server.port)
    begun = holding_up(server)
    claim = client.redeem((HOST, server.port), LEASE, 4, CONTENT)
    assert isinstance(client.answer(claim, 0.05), Pending)
    begun.set()
    server.tickets.redeem = lambda message: None  # an engine that dies answers nothing
    server.close()
    again = client.redeem((HOST, server.port), MARK, 4, CONTENT)
    assert granted(client, again) == Unusable(handshake.GONE, gone=True)


def test_a_configured_peer_is_met_although_it_starts_later_and_nothing_is_asked_of_it(ends):
    with socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
    met = threading.Event()
    client = ends.client(meets=[(HOST, port)], on_news=met.set, heartbeat_seconds=0.05)
    assert client.known((HOST, port)) is None
    server = ends.server(port=port)
    wait_for(lambda: client.known((HOST, port)) == PeerInfo(facts(), cards(), server.seal_key))
    wait_for(met.is_set)


def test_a_producers_answer_is_news(ends):
    """An engine that rests between two steps then goes on at once."""
    server, news = ends.server(), threading.Event()
    client = ends.client(on_news=news.set)
    status(client, server.port)
    assert not news.is_set()
    publish(server, MARK, "mark")
    binding = SealBinding((HOST, server.port), MARK, 4, CONTENT)
    sealed = seal_grant(server.seal_key, GRANT, binding)
    known = client.redeem((HOST, server.port), MARK, 4, CONTENT, sealed=sealed)
    wait_for(lambda: known.granted)
    execute(client, server)
    assert not news.is_set(), "no request has waited for it"
    claim = client.redeem((HOST, server.port), LEASE, 4, CONTENT)
    assert isinstance(granted(client, claim), Unusable)
    assert news.wait(10)


def test_a_busy_thread_is_woken_once_for_all_that_it_is_asked(ends, monkeypatch):
    """Each time it is woken, it may take the interpreter from the engine's thread."""
    busy, go_on, woken = threading.Event(), threading.Event(), list[None]()
    monkeypatch.setattr(control_socket.SocketPoller, "wake", noted(control_socket.SocketPoller.wake, woken))

    def check(ranks):
        busy.set()
        go_on.wait(10)

    server = ends.server()
    publish(server, LEASE)
    client = ends.client(check=check)
    client.look_up((HOST, server.port))
    assert busy.wait(10)
    woken.clear()
    claims = [client.redeem((HOST, server.port), ticket(str(number)), 4, CONTENT) for number in range(8)]
    claims.append(client.redeem((HOST, server.port), LEASE, 4, CONTENT))
    assert len(woken) == 1
    go_on.set()
    assert granted(client, claims[-1]).grant == GRANT
    assert all(isinstance(granted(client, claim), Unusable) for claim in claims[:-1])


def noted(function, calls):
    """The same function, which adds each call to a list."""
    return lambda *arguments: calls.append(None) or function(*arguments)


def test_a_ticket_that_arrives_before_its_producer_is_known_is_redeemed_once(ends):
    server, client, asked = ends.server(), ends.client(), list[bytes]()
    redeem = server.tickets.redeem
    server.tickets.redeem = lambda message: asked.append(message.ticket) or redeem(message)
    publish(server, LEASE)
    client.look_up((HOST, server.port))
    claim = client.redeem((HOST, server.port), LEASE, 4, CONTENT)
    assert granted(client, claim).grant == GRANT
    status(client, server.port)
    execute(client, server)
    assert asked == [LEASE]


def test_tickets_that_are_given_back_at_once_end_their_leases(ends):
    """Most are given back before the client's thread has sent them."""
    server, client = ends.server(), ends.client()
    status(client, server.port)
    names = [f"lease {number}" for number in range(50)]
    for name in names:
        publish(server, ticket(name), name)
    for name in names:
        claim = client.redeem((HOST, server.port), ticket(name), 4, CONTENT)
        client.end(claim)
    wait_for(lambda: all(LeaseClaims([name], released=True) in server.events for name in names))


def test_a_question_whose_answer_was_lost_with_the_connection_is_asked_again(ends):
    """The port is the same, as after a restart, or if the network has ended the connection."""
    first = ends.server()
    client, port = ends.client(clock=Clock()), first.port
    status(client, port)
    first.tickets.redeem = lambda message: Unchanged(message.number + 1)
    claim = client.redeem((HOST, port), LEASE, 4, CONTENT)
    assert isinstance(client.answer(claim, 0.05), Pending)
    first.close()
    second = ends.server(facts("P", 2), port)
    publish(second, LEASE)
    assert wait_for(lambda: isinstance(answer := client.answer(claim), Redeemed) and answer)
    assert status(client, port, 2).facts.incarnation == 2


def test_an_unanswered_ticket_is_asked_again_on_a_new_connection(ends):
    """Another request may find its peer restarted while the answer to this one is under way."""
    server, client = ends.server(), ends.client()
    status(client, server.port)
    publish(server, LEASE)
    server.tickets.redeem = raising_once(server.tickets.redeem)
    claim = client.redeem((HOST, server.port), LEASE, 4, CONTENT)
    execute(client, server)
    client.forget((HOST, server.port))
    status(client, server.port)
    assert granted(client, claim) == Redeemed(claim.message.number, GRANT)


def sealed_by(server: ControlServer, run: int = 1, key: bytes = b"") -> str:
    """Return the grant of `LEASE`, as the server's engine would add it to its offer."""
    binding = SealBinding((HOST, server.port), LEASE, 4, CONTENT)
    return seal_grant(key or server.seal_key, structs.replace(GRANT, incarnation=run), binding)


def test_a_sealed_grant_is_had_at_once_and_its_lease_is_claimed(ends):
    server, client = ends.server(), ends.client()
    status(client, server.port)
    publish(server, LEASE)
    with stopped(server):
        claim = client.redeem((HOST, server.port), LEASE, 4, CONTENT, sealed=sealed_by(server))
        assert client.answer(claim) == Redeemed(0, GRANT)
    wait_for(lambda: LeaseClaims(["lease"]) in server.events)
    wait_for(lambda: not claim.asked)
    assert client.answer(claim) == Redeemed(claim.message.number, GRANT)
    client.end(claim)
    wait_for(lambda: LeaseClaims(["lease"], released=True) in server.events)


def test_a_read_that_is_over_before_its_claim_is_heard_releases_the_lease(ends):
    server, client = ends.server(), ends.client()
    status(client, server.port)
    publish(server, LEASE)
    with stopped(server):
        claim = client.redeem((HOST, server.port), LEASE, 4, CONTENT, sealed=sealed_by(server))
        client.end(claim)
    wait_for(lambda: LeaseClaims(["lease"], released=True) in server.events)
    assert len(server.tickets) == 0


@pytest.mark.parametrize("of", ["another engine", "another run", "another server", "nothing", "too much"])
def test_without_a_grant_that_opens_the_producer_is_asked(ends, of, caplog):
    server, client = ends.server(), ends.client()
    status(client, server.port)
    publish(server, LEASE)
    sealed = {
        "another engine": lambda: sealed_by(server, key=ends.server().seal_key),
        "another run": lambda: sealed_by(server, run=2),
        "another server": lambda: sealed_by(ends.server()),
        "nothing": lambda: "",
        "too much": lambda: sealed_by(server) * 99,
    }[of]()
    with stopped(server):
        claim = client.redeem((HOST, server.port), LEASE, 4, CONTENT, sealed=sealed)
        assert isinstance(client.answer(claim), Pending)
    assert granted(client, claim) == Redeemed(claim.message.number, GRANT)
    client.look_up((HOST, server.port), 1)
    assert isinstance(client.known((HOST, server.port)), PeerInfo), "nobody shakes hands again"
    said = [
        record.getMessage() for record in caplog.records if "the ticket is redeemed" in record.getMessage()
    ]
    assert len(said) == (of not in ("another run", "nothing"))


def test_claim_of_a_sealed_grant_and_its_release_wait_until_the_engine_computes(ends, monkeypatch):
    server, client = ends.server(), ends.client()
    status(client, server.port)
    publish(server, LEASE)
    woken = threading.Event()
    monkeypatch.setattr(client._poller, "wake", woken.set)
    claim = client.redeem((HOST, server.port), LEASE, 4, CONTENT, sealed=sealed_by(server))
    client.end(claim)
    assert not woken.is_set()
    client.redeem((HOST, server.port), MARK, 4, CONTENT)
    assert woken.is_set()


def test_a_sealed_grant_of_a_peer_that_is_not_known_waits_for_the_answer(ends):
    server, client = ends.server(), ends.client()
    publish(server, LEASE)
    claim = client.redeem((HOST, server.port), LEASE, 4, CONTENT, sealed=sealed_by(server))
    assert isinstance(client.answer(claim), Pending)
    status(client, server.port)
    assert granted(client, claim).grant == GRANT


def test_an_engine_takes_a_sealed_grant_back_if_its_claim_is_refused(ends):
    server, client = ends.server(), ends.client()
    status(client, server.port)
    claim = client.redeem((HOST, server.port), LEASE, 4, CONTENT, sealed=sealed_by(server))
    wait_for(lambda: isinstance(client.answer(claim), Unusable))
    assert client.answer(claim).reason.startswith("it does not know the ticket")


def test_a_ticket_that_two_decode_engines_have_redeemed_ends_with_the_last_of_them(ends):
    server, one, other = ends.server(), ends.client(), ends.client(facts("E", 10))
    first = redeem(one, server, LEASE)
    last = redeem(other, server, LEASE, publishes=False)
    one.end(first)
    again = one.redeem((HOST, server.port), LEASE, 4, CONTENT)
    assert granted(one, again).reason == "this engine has redeemed the ticket before, and released it"
    assert LeaseClaims(["lease"], released=True) not in server.events
    other.end(last)
    wait_for(lambda: LeaseClaims(["lease"], released=True) in server.events)


def test_a_release_is_heard_however_many_heartbeats_wait_for_the_engine(ends):
    server, client = ends.server(), ends.client(heartbeat_seconds=600.0)
    redeem(client, server, LEASE)
    for _ in range(MAX_PER_SENDER + 1):
        client.hold((HOST, server.port), LEASE)
    wait_for(lambda: server.events.dropped)
    client.release((HOST, server.port), LEASE)
    wait_for(lambda: list(server.events)[-1] == LeaseClaims(["lease"], released=True))


def test_leases_of_others_are_neither_extended_nor_released(ends):
    server, reader, other = ends.server(), ends.client(), ends.client(facts("E", 10))
    redeem(reader, server, LEASE)
    wait_for(lambda: server.events)
    server.events.clear()
    other.hold((HOST, server.port), LEASE)
    other.release((HOST, server.port), LEASE)
    granted(other, other.redeem((HOST, server.port), ticket("unknown"), 1, CONTENT))  # all before was heard
    assert not server.events


def test_a_turn_that_a_heartbeat_names_often_is_one_lease(ends):
    server = ends.server()
    server.turns.publish(content(600), KeptTurn("D", LEASE, KEPT, 1, 0, []), "turn")
    ends.raw(server.port).send(encode(Claim(7, [LEASE] * 1000)))
    wait_for(lambda: server.events)
    assert list(server.events) == [LeaseClaims(["turn"])]


def test_an_earlier_turn_is_kept_alive_by_whoever_has_found_it(ends):
    server, client = ends.server(), ends.client()
    turn = KeptTurn("D", LEASE, KEPT, 1, 0, [])
    server.turns.publish(content(600), turn, "turn")
    client.hold((HOST, server.port), LEASE)
    client.release((HOST, server.port), LEASE)
    granted(client, client.redeem((HOST, server.port), LEASE, 1, CONTENT))
    assert list(server.events) == [LeaseClaims(["turn"])], "it is kept for its time, and no ticket redeems it"


@pytest.mark.parametrize("released", [False, True])
def test_messages_with_tickets_of_another_length_or_too_many_are_dropped(ends, released):
    server = ends.server()
    raw = ends.raw(server.port)
    for tickets in ([b"x" * 15], [b"x" * 4_000_000], [bytes(16)] * (MAX_TICKETS + 1)):
        raw.send(encode(Claim(9, tickets, released)))
    wait_for(lambda: server.rejected == 3)
    raw.send(encode(Claim(9, [bytes(16)] * MAX_TICKETS, released)))
    redeem(ends.client(), server, LEASE)
    wait_for(lambda: list(server.events) == [LeaseClaims(["lease"])])


def test_a_port_in_use_is_a_setting_to_change(ends):
    with socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            ConfigError,
            match=rf"cannot listen on {HOST} port {port}: Address already in use; set another port, or 0",
        ):
            ControlServer(HOST, port, PeerInfo(facts(), cards()), KEYS)


def test_an_answer_that_is_too_long_is_not_taken(ends, monkeypatch):
    monkeypatch.setattr(control_socket, "MAX_REPLY_BYTES", 10_000)
    answer = status(ends.client(handshake_seconds=1.0), ends.fake(bytes(10_001)))
    assert isinstance(answer, Unusable)
    assert answer.reason.startswith("no answer within 1 s")


def test_a_process_without_room_for_another_socket_refuses_that_peer_only(ends):
    client, server, other = ends.client(), ends.server(), ends.server()
    client._context.max_sockets = control_socket.SOCKETS
    assert isinstance(status(client, server.port), PeerInfo)
    assert status(client, other.port) == Unusable("it cannot be asked: Too many open files")
    server.tickets.publish(LEASE, "lease", 4, CONTENT, GRANT)
    assert granted(client, client.redeem((HOST, server.port), LEASE, 4, CONTENT)).grant == GRANT


def test_made_up_addresses_do_not_open_sockets_without_end(ends):
    client = ends.client(clock=Clock())
    with socket.create_server(("0.0.0.0", 0), backlog=128) as silent:
        for last in range(1, handshake.MAX_HANDSHAKES + 20):
            assert isinstance(client.look_up((f"127.0.0.{last}", silent.getsockname()[1])), Pending)
        execute(client, ends.server())
        assert client.connections == handshake.MAX_HANDSHAKES + 1


def test_an_address_of_another_machine_is_a_host_to_change():
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.1 port 7: .*; set host to an"):
        ControlServer("203.0.113.1", 7, PeerInfo(facts(), cards()), KEYS)


def test_the_socket_to_a_refused_address_is_closed_without_waiting_for_a_heartbeat(ends):
    client = ends.client(handshake_seconds=0.05, heartbeat_seconds=600.0)
    for port in range(1, 9):
        status(client, port)
    wait_for(lambda: client.connections == 0)


def test_a_lease_at_a_peer_that_refuses_the_next_handshake_is_kept_alive(ends):
    client, server = ends.client(heartbeat_seconds=0.05), ends.server(facts(weights="theirs"))
    publish(server, LEASE)
    server.tickets.redeem(Redeem(0, 9, LEASE, 4, CONTENT))
    client.hold((HOST, server.port), LEASE)
    assert isinstance(status(client, server.port), Unusable)
    server.events.clear()
    wait_for(lambda: len(server.events) > 2)


def test_addresses_that_were_never_asked_are_forgotten_once_no_lease_is_held_there(ends):
    client = ends.client(heartbeat_seconds=0.05)
    for port in range(1, 9):
        client.hold((HOST, port), LEASE)
        client.hold((HOST, port), ticket("another"))
        client.release((HOST, port), LEASE)
    server = ends.server()
    execute(client, server)
    server.events.clear()
    wait_for(lambda: len(server.events) >= 2)  # it has sent heartbeats, after which unused sockets are closed
    assert client.connections == 8 + 1
    for port in range(1, 9):
        client.release((HOST, port), ticket("another"))
    wait_for(lambda: client.connections == 1)


def test_ipv6_loopback_works_too(ends):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    server = ControlServer("::1", 0, PeerInfo(facts(), cards()), KEYS)
    client = ends.client()
    answer = status(client, server.port, host="::1")
    server.close()
    assert isinstance(answer, PeerInfo)


def test_a_port_is_free_again_after_the_server_was_closed(ends):
    server = ends.server()
    server.close()
    ends.server(port=server.port)


def test_a_client_with_the_key_may_speak(ends):
    server = ends.server()
    client = ends.client(heartbeat_seconds=0.05)
    assert isinstance(status(client, server.port), PeerInfo)
    redeem(client, server, LEASE)
    wait_for(lambda: server.events)


def test_a_client_with_another_key_gets_nothing_and_both_sides_say_so(ends, caplog):
    server = ends.server()
    client = ends.client(keys=OTHER_KEYS, heartbeat_seconds=0.05, handshake_seconds=0.5)
    client.hold((HOST, server.port), LEASE)
    client.redeem((HOST, server.port), LEASE, 4, CONTENT)
    publish(server, LEASE)
    assert isinstance(status(client, server.port), Unusable)
    assert not server.events
    assert server.rejected == 0, "it did not get as far as a message"
    here, there = "a client was turned away because it has another key", "does it have the same key?"
    wait_for(lambda: all(any(text in said for said in caplog.messages) for text in (here, there)))


def stranger(port: int, public: bytes = b"") -> "zmq.Socket[bytes]":
    """Somebody without the key, who may know the public part of it."""
    raw = zmq.Context.instance().socket(zmq.DEALER)
    raw.linger = 0
    if public:
        raw.curve_publickey, raw.curve_secretkey = zmq.curve_keypair()
        raw.curve_serverkey = public
    raw.connect(f"tcp://{HOST}:{port}")
    with contextlib.suppress(zmq.Again):  # the server may have turned it away already
        raw.send(encode(Hello(PROTOCOL, facts())), zmq.NOBLOCK)
    return raw


@pytest.mark.parametrize("public", [b"", KEYS.public])
def test_a_client_without_the_secret_key_gets_nothing(ends, public):
    server = ends.server()
    raw = stranger(server.port, public)
    assert not raw.poll(500)
    raw.close()
    assert server.rejected == 0, "it did not get as far as a message"
    assert isinstance(status(ends.client(), server.port), PeerInfo)


def test_a_client_with_a_key_says_nothing_to_a_server_without_one(ends):
    with zmq.Context() as context, context.socket(zmq.ROUTER) as plain:
        plain.linger = 0
        port = plain.bind_to_random_port(f"tcp://{HOST}")
        assert isinstance(status(ends.client(handshake_seconds=0.5), port), Unusable)
        assert not plain.poll(0), "not even a greeting gets through"


def content(tokens: int) -> TurnContent:
    keys = ChunkKeys(256, list(range(tokens)))
    return TurnContent(256, tuple(keys.chunks()), range(tokens))


def answered(client: ControlClient, number: int):
    return wait_for(lambda: None if (found := client.turns(number)) is None else [found])[0]


def test_a_peer_that_keeps_turns_is_known_once_it_has_met_us_and_asked_over_the_channel(ends):
    keeper, asker = ends.server(), ends.server()
    at = (HOST, keeper.port)
    status(ends.client(structs.replace(facts("D", 9), keeps_turns=at)), asker.port)
    status(ends.client(facts("E", 9)), asker.port)
    assert asker.keepers == {at: 9}
    turn = KeptTurn("D", LEASE, KEPT, 1, 0, [])
    keeper.turns.publish(content(600), turn, "turn")
    client = ends.client(clock=Clock())  # no peer is too slow
    for tokens, found in (
        (700, [(at, structs.replace(turn, chunks=2, next_tokens=list(range(512, 600))))]),
        (200, []),
    ):
        number = client.ask_turn(asker.keepers, content(tokens))
        assert answered(client, number) == found
    status(client, keeper.port)  # the same channel goes on to serve


def test_a_peer_that_was_refused_is_not_asked(ends):
    asker = ends.server(facts(weights="ours"))
    others = structs.replace(facts("D", 9, weights="theirs"), keeps_turns=(HOST, 7))
    status(ends.client(others), asker.port)
    assert asker.keepers == {}


def test_a_peer_that_does_not_answer_is_waited_for_a_moment_and_then_left_alone(ends):
    client, nobody = ends.client(), (HOST, ends.fake())
    number = client.ask_turn({nobody: 1}, content(600))
    assert client.turns(number) is None
    assert answered(client, number) == []
    assert client.ask_turn({nobody: 1}, content(600)) is None
    assert client.ask_turn({nobody: 2}, content(600)) is not None, "it has been started anew"


def test_a_peer_that_was_silent_is_asked_once_a_ticket_of_it_has_come(ends):
    client, at = ends.client(), (HOST, ends.fake())
    assert answered(client, client.ask_turn({at: 1}, content(600))) == []
    client.redeem(at, LEASE, 4, CONTENT)
    assert client.ask_turn({at: 1}, content(600)) is not None


def test_only_the_last_peers_that_keep_turns_are_remembered(ends):
    asker = ends.server()
    raw = ends.raw(asker.port)
    for port in (*range(1, 81), 17, 81):
        raw.send(encode(Hello(PROTOCOL, structs.replace(facts("D", port), keeps_turns=(HOST, port)))))
        raw.recv()
    assert asker.keepers == {(HOST, port): port for port in (17, *range(19, 82))}


def test_the_address_at_which_a_peer_keeps_turns_must_be_one(ends):
    asker = ends.server()
    raw = ends.raw(asker.port)
    for at in (("a b", 7), (HOST, 0), ("", 7)):
        raw.send(encode(Hello(PROTOCOL, structs.replace(facts("D", 9), keeps_turns=at))))
    wait_for(lambda: asker.rejected == 3)
    assert asker.keepers == {}


def test_tickets_of_made_up_addresses_that_are_released_leave_no_sockets(ends):
    client, server = ends.client(heartbeat_seconds=600.0), ends.server()
    for number in range(300):
        client.release((f"127.0.{number // 250}.{number % 250 + 1}", 9), LEASE)
    execute(client, server)
    assert client.connections == 1
    assert isinstance(status(client, server.port), PeerInfo)


def test_a_peer_that_takes_no_messages_silences_nobody(ends):
    with socket.create_server((HOST, 0)) as stalled:
        client, server = ends.client(heartbeat_seconds=0.05), ends.server()
        redeem(client, server, LEASE)
        for number in range(3000):
            client.hold((HOST, stalled.getsockname()[1]), number.to_bytes(16, "big"))
        execute(client, server)
        server.events.clear()
        wait_for(lambda: len(server.events) >= 3)
