"""The consumer's end of the control channel: one thread for all peers.

The engine's thread asks `look_up` on every step it wants to know, and gets an answer at once: a handshake
that is under way is an answer too. Many peers shake hands at the same time (`handshake`).

Leases that a request holds are kept alive from here, so they live while the request waits in the engine's
queue.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import zmq

from kvferry.transport import security
from kvferry.transport.endpoint import endpoint
from kvferry.transport.gathering import gathering
from kvferry.transport.handshake import Address, Answer, Handshakes, Looking
from kvferry.transport.messages import (
    MAX_LEASES,
    MAX_REPLY_BYTES,
    AskTurn,
    Facts,
    Heartbeat,
    KeptTurn,
    RankCard,
    Release,
    Request,
    encode,
    turns_of,
)
from kvferry.transport.names import Names, NotAllowed
from kvferry.transport.peers import ANYBODY, Peers
from kvferry.transport.punctual import Punctual
from kvferry.transport.turns import Content, Questions

logger = logging.getLogger(__name__)


MOST_UNRESOLVED = 4096
"""Commands that may wait for names of peers to be resolved."""

_Command: TypeAlias = tuple[str, Address, str | AskTurn]
"""Verb, peer, and lease or question."""


@dataclass(slots=True)
class _Peer:
    """The thread's account of one address."""

    socket: zmq.Socket[Any]
    leases: set[str] = field(default_factory=set)


class ControlClient:
    """Asks peers, and keeps leases alive."""

    def __init__(
        self,
        facts: Facts,
        check: Callable[[tuple[RankCard, ...]], None],
        keys: security.Keys,
        peers: Peers = ANYBODY,
        handshake_seconds: float = 5.0,
        heartbeat_seconds: float = 5.0,
    ) -> None:
        """Start the thread.

        Args:
            facts: who we are.
            check: raises Incompatible for ranks from which we cannot read; called in the thread.
            keys: CURVE keys.
            peers: who may be dialled.
            handshake_seconds: when a silent peer is given up.
            heartbeat_seconds: time between heartbeats.
        """
        self._keys, self._heartbeat_seconds = keys, heartbeat_seconds
        self._check_ranks = check
        self._handshakes = Handshakes(facts, self._usable, handshake_seconds)
        self._questions = Questions(time.monotonic)
        self._commands: deque[_Command] = deque()
        self._unresolved: list[_Command] = []
        self._context: zmq.Context[Any] = zmq.Context()
        self._peers: dict[Address, _Peer] = {}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._names = Names(peers, lambda: os.eventfd_write(self._wake, 1))
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="kvferry-control-client", daemon=True)
        self._thread.start()

    # -- the engine's thread ------------------------------------------------------------------------------

    def look_up(self, address: Address, incarnation: int) -> Answer:
        """What is known of the peer at `address`, see `Handshakes.known`; asks it if nothing is."""
        answer = self._handshakes.known(address, incarnation)
        if answer is None:
            if self._handshakes.crowded:
                return Looking()
            answer = self._handshakes.start(address)
            self._command("hello", address, "")
        return answer

    def forget(self, address: Address) -> None:
        """Ask this peer anew next time: it did not deliver."""
        self._handshakes.forget(address)

    def hold(self, address: Address, lease: str) -> None:
        """Claim a lease, and keep it alive until it is released."""
        self._questions.named(address)
        self._command("hold", address, lease)

    def release(self, address: Address, lease: str) -> None:
        """Tell the producer that a lease is no longer needed."""
        self._command("release", address, lease)

    def ask_turn(self, peers: Mapping[Address, int], content: Content) -> int | None:
        """Ask peers for an earlier turn that begins as this; the question's number, None if none is asked."""
        number, asked = self._questions.begin(peers)
        question = AskTurn(number, content.chunk_tokens, list(content.keys))
        for address in asked:
            self._command("ask", address, question)
        if not asked:
            self._questions.drop(number)
        return number if asked else None

    def turns(self, number: int) -> list[tuple[Address, KeptTurn]] | None:
        """What was found, by whom; None while that is not known. Once it is, the question is forgotten."""
        return self._questions.answers(number)

    def drop_question(self, number: int) -> None:
        """Nobody wants to know any more."""
        self._questions.drop(number)

    def close(self) -> None:
        """Send what is queued and end the thread."""
        self._stop = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._names.close()
        os.close(self._wake)

    def _command(self, verb: str, address: Address, what: str | AskTurn) -> None:
        self._commands.append((verb, address, what))
        os.eventfd_write(self._wake, 1)

    # -- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        punctual = Punctual("control channel, asking")
        beat = time.monotonic() + self._heartbeat_seconds
        while True:
            heard = poller.poll(int(punctual.wait(self._wait_seconds(beat)) * 1000))
            punctual.back()
            for source, _ in heard:
                if source == self._wake:
                    os.eventfd_read(self._wake)
                else:
                    self._receive(next(a for a, p in self._peers.items() if p.socket is source))
            unresolved, self._unresolved = self._unresolved, []
            for command in unresolved:
                self._obey(poller, *command)
            while self._commands:
                self._obey(poller, *self._commands.popleft())
            now = time.monotonic()
            if now >= beat:
                beat = now + self._heartbeat_seconds
                self._beat(poller)
            self._handshakes.give_up_on_silent()
            for address in self._handshakes.take_refused():
                self._close_if_idle(poller, address)
            if self._stop:
                break
        for peer in self._peers.values():
            peer.socket.close(linger=500)
        self._context.term()

    def _wait_seconds(self, beat: float) -> float:
        """Until the next deadline; at most a second, so that being kept from running does not hide in it."""
        soonest = min([beat, *self._handshakes.deadlines])
        return min(1.0, max(0.0, soonest - time.monotonic()) + 0.001)

    def _beat(self, poller: zmq.Poller) -> None:
        """Keep leases alive, and let go of peers that are of no use: anyone can make addresses up."""
        self._handshakes.forget_refusals()
        for address, peer in list(self._peers.items()):
            if peer.leases:
                leases = sorted(peer.leases)
                for first in range(0, len(leases), MAX_LEASES):
                    self._send(peer, Heartbeat(leases[first : first + MAX_LEASES]))
            elif self._handshakes.is_unknown(address) or self._handshakes.is_refused(address):
                self._close(poller, address)

    def _obey(self, poller: zmq.Poller, verb: str, address: Address, what: str | AskTurn) -> None:
        try:
            self._carry_out(poller, verb, address, what)
        except (NotAllowed, zmq.ZMQError, ValueError) as error:
            # An address that is none or not allowed, a name that is not Unicode: they came with a request,
            # and cost only it.
            if verb == "hello":
                self._handshakes.refuse(address, f"it cannot be asked: {error}")
            else:
                logger.debug("control channel: %s for %a was dropped: %s", verb, address, error)

    def _carry_out(self, poller: zmq.Poller, verb: str, address: Address, what: str | AskTurn) -> None:
        if isinstance(what, str):
            what.encode()
        peer = self._peers.get(address)
        if peer is None or verb == "hello":
            place = self._names.place(address[0])
            if place is None:
                self._wait_for_name((verb, address, what))
                return
            # A socket that a handshake failed on may never connect again: ZeroMQ gives it up for good when
            # something that is no ZeroMQ has answered.
            held = self._close(poller, address)
            peer = self._peers[address] = _Peer(self._connect(place, address[1]), held)
            poller.register(peer.socket, zmq.POLLIN)
        if isinstance(what, AskTurn):
            self._send(peer, what)
        elif verb == "hello":
            self._send(peer, self._handshakes.open(address))
        elif verb == "hold":
            peer.leases.add(what)
            self._send(peer, Heartbeat([what]))  # the producer knows from now on that it is claimed
        else:
            peer.leases.discard(what)
            self._send(peer, Release([what]))

    def _close(self, poller: zmq.Poller, address: Address) -> set[str]:
        """Close the socket to a peer, if there is one; returns the leases that are held there."""
        peer = self._peers.pop(address, None)
        if peer is None:
            return set()
        poller.unregister(peer.socket)
        peer.socket.close(linger=500)
        return peer.leases

    def _close_if_idle(self, poller: zmq.Poller, address: Address) -> None:
        """Close the socket to a peer that cannot be used, unless leases are held there."""
        peer = self._peers.get(address)
        if peer is not None and not peer.leases:
            self._close(poller, address)

    def _wait_for_name(self, command: _Command) -> None:
        """Keep a command until its peer's name is resolved, in the order in which commands came."""
        if len(self._unresolved) >= MOST_UNRESOLVED:
            raise NotAllowed(f"{MOST_UNRESOLVED} commands wait for names to be resolved already")
        self._unresolved.append(command)

    def _usable(self, address: Address, ranks: tuple[RankCard, ...]) -> tuple[RankCard, ...]:
        """Return a peer's ranks as they are used (`gathering`); raise Incompatible if we cannot read them."""
        self._check_ranks(ranks)
        return tuple(gathering(card, address, self._names) for card in ranks)

    def _connect(self, host: str, port: int) -> zmq.Socket[Any]:
        socket: zmq.Socket[Any] = self._context.socket(zmq.DEALER)
        socket.maxmsgsize = MAX_REPLY_BYTES
        socket.linger = 0
        security.as_client(socket, self._keys)
        try:
            socket.connect(endpoint(socket, host, port))
        except (zmq.ZMQError, ValueError):
            socket.close()
            raise
        return socket

    def _send(self, peer: _Peer, message: Request) -> None:
        try:
            peer.socket.send(encode(message), zmq.DONTWAIT)
        except zmq.Again:
            logger.debug("control channel: a peer takes no more messages, dropped %s", type(message).__name__)

    def _receive(self, address: Address) -> None:
        peer = self._peers[address]
        frames = peer.socket.recv_multipart()
        if (turns := turns_of(frames[-1])) is not None:
            self._questions.hear(address, turns)
        elif message := self._handshakes.hear(address, frames[-1]):
            self._send(peer, message)
