"""The consumer's end of the control channel: one thread for all peers.

The engine's thread never waits for it. Handshakes with several peers run concurrently (`handshake`). A ticket
is redeemed as soon as the request arrives, in parallel with the handshake if the producer is new. Heartbeats
keep claimed leases from expiring while the request waits in the engine's queue.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import zmq

from kvferry.common.errors import ProtocolError
from kvferry.common.limited_log import LimitedLog
from kvferry.common.units import counted
from kvferry.transport.addresses import ANY_PEER, AllowedPeers
from kvferry.transport.handshake import (
    GONE,
    GONE_SECONDS,
    MAX_HANDSHAKES,
    MAX_REMEMBERED,
    Address,
    Handshakes,
    PeerStatus,
    Pending,
    Unusable,
)
from kvferry.transport.messages import (
    MAX_TICKETS,
    AskTurn,
    Claim,
    Facts,
    KeptTurn,
    PeerInfo,
    RankCard,
    Request,
    Turns,
    decode_numbered,
)
from kvferry.transport.redeem import Grant, PromptContent, Redeem, Redeemed
from kvferry.transport.redemptions import Redemption, Redemptions
from kvferry.transport.resolver import AddressNotAllowed, ResolveName
from kvferry.transport.seal import SealBinding, open_seal
from kvferry.transport.security import Keys
from kvferry.transport.sockets import SOCKETS, ChannelClient, ControlSocket
from kvferry.transport.turns import TurnContent, TurnQueries

logger = logging.getLogger(__name__)

MAX_UNRESOLVED = 4096  # maximum number of commands that wait for a peer's name to be resolved

# A peer's address and the message to send to it; None instead of a message starts a handshake.
_Command: TypeAlias = tuple[Address, Request | None]


@dataclass(slots=True)
class _Peer:
    """A connection to the control channel of one peer. Only the client's thread uses it."""

    socket: ControlSocket
    held: set[bytes] = field(default_factory=set)  # tickets of leases that heartbeats keep alive
    used: bool = False  # a message was sent since the last heartbeat, so that a reply may still come
    connected: bool = False


# Each peer has two sockets: for messages (False), and for events of its connection (True).
class ControlClient(ChannelClient[tuple[Address, bool]]):
    """A thread that talks to the control channels of all peers that an engine reads KV from.

    Attributes:
        unsent: commands that the thread has not taken yet. Some of them wait for `flush`.
    """

    def __init__(
        self,
        facts: Facts,
        check: Callable[[tuple[RankCard, ...]], None],
        keys: Keys,
        peers: AllowedPeers = ANY_PEER,
        handshake_seconds: float = 5.0,
        heartbeat_seconds: float = 5.0,
        *,
        meets: Sequence[Address] = (),
        on_news: Callable[[], None] = lambda: None,
        linger_seconds: float = 0.5,
        max_unresolved: int = MAX_UNRESOLVED,
        resolve: ResolveName | None = None,
        runs: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the client's thread.

        Args:
            check: raises Incompatible if this engine cannot read from a peer's ranks. The thread calls it.
            handshake_seconds: timeout of a handshake, and of redeeming a ticket.
            meets: peers with which the thread does handshakes before anything is asked of them.
            on_news: called by the thread when such a handshake has ended, or a producer has answered for a
                ticket whose grant was not known.
            runs: returns whether the engine still runs steps. If not, no heartbeats are sent, so that the
                engine does not keep blocks of others without using them.
        """
        super().__init__(
            "control channel",
            "kvferry-control-client",
            keys,
            peers,
            SOCKETS * (MAX_REMEMBERED + MAX_HANDSHAKES),
            resolve,
            clock,
        )
        self._runs, self._meets, self._on_news = runs, frozenset(meets), on_news
        self._max_unresolved = max_unresolved
        self._linger_milliseconds = int(linger_seconds * 1000)
        self._heartbeat_seconds, self._next_beat = heartbeat_seconds, clock() + heartbeat_seconds
        self._check_ranks = check
        self._handshakes = Handshakes(facts, self._check_and_resolve, handshake_seconds, clock)
        self._questions = TurnQueries(clock)
        self._consumer = facts.incarnation
        self._redemptions = Redemptions(self._consumer, handshake_seconds, clock)
        self.unsent: deque[_Command] = deque()
        self._woken = False  # True from a wake-up of the thread until it takes the commands
        self._unresolved: list[_Command] = []
        self._unnamed: set[Address] = set()
        self._peers: dict[Address, _Peer] = {}
        self._seal_log = LimitedLog(logger)  # for the engine's thread
        self._meet()
        self._thread.start()

    # -- the engine's thread ------------------------------------------------------------------------------

    @property
    def connections(self) -> int:
        return len(self._peers)

    def look_up(self, address: Address, incarnation: int | None = None) -> PeerStatus:
        """Return the status of a peer, maybe of another incarnation. Start a handshake if one is needed."""
        answer = self._handshakes.status(address, incarnation)
        if answer is None:
            if self._handshakes.is_full:
                return Pending()
            answer = self._handshakes.start(address)
            self._queue_command(address, None)
        return answer

    def known(self, address: Address) -> PeerInfo | None:
        answer = self._handshakes.status(address)
        return answer if isinstance(answer, PeerInfo) else None

    def forget(self, address: Address) -> None:
        """Forget the status of a peer that failed, so that the next `look_up` starts a new handshake."""
        self._handshakes.forget(address)

    def redeem(
        self,
        address: Address,
        ticket: bytes,
        tokens: int,
        content: PromptContent,
        *,
        foreseen: bool = False,
        sealed: str = "",
    ) -> Redemption:
        """Claim a lease for a request, which must `end` the redemption (`Redemptions.begin`).

        `sealed` is the sealed grant that came with the ticket, from a client; empty without one.
        """
        self._questions.note_ticket(address)
        grant = self._opened(sealed, SealBinding(address, ticket, tokens, content)) if sealed else None
        one = self._redemptions.begin(address, ticket, tokens, content, foreseen=foreseen, grant=grant)
        if one.users == 1:
            # With the grant there is no hurry: the claim only keeps the lease from expiring.
            self._queue_command(address, one.message, soon=grant is None)
        return one

    def _opened(self, sealed: str, binding: SealBinding) -> Grant | None:
        """Return the grant in a seal; None if the producer must be asked."""
        # The handshake with a new peer takes longer than redeeming the ticket. And a client may keep a seal
        # of an earlier run, which must not cause a handshake.
        peer = self.known(binding.address)
        if peer is None or not peer.seal_key:
            return None
        try:
            found = open_seal(peer.seal_key, sealed, binding)
        except ProtocolError as error:
            self._seal_log.say("seal", f"{error}; the ticket is redeemed")
            return None
        return found if found.incarnation == peer.facts.incarnation else None

    def answer(self, one: Redemption, wait_seconds: float = 0.0) -> Redeemed | Unusable | Pending:
        """Return the producer's last grant; Unusable if it refused or is silent; otherwise Pending."""
        answer = self._redemptions.answer(one, wait_seconds)
        if one.asked:
            if isinstance(answer, Unusable):
                self.forget(one.address)  # so that the next `look_up` finds out whether it has restarted
            elif isinstance(status := self._handshakes.status(one.address), Unusable) and status.gone:
                return status  # who cannot be reached need not be waited for
        return answer

    def end(self, one: Redemption) -> None:
        """End a request's claim, and release the lease if it was the ticket's last claim."""
        if self._redemptions.end(one):
            message = Claim(self._consumer, [one.message.ticket], released=True)
            self._queue_command(one.address, message, soon=False)

    def hold(self, address: Address, ticket: bytes) -> None:
        """Send heartbeats for the lease on an earlier turn until `release`."""
        self._queue_command(address, Claim(self._consumer, [ticket]))

    def release(self, address: Address, ticket: bytes) -> None:
        """Tell the producer that this engine no longer needs a lease, and end its heartbeats."""
        self._queue_command(address, Claim(self._consumer, [ticket], released=True))

    def ask_turn(self, peers: Mapping[Address, int], content: TurnContent) -> int | None:
        """Ask peers (address to incarnation) for earlier turns. Return the query's number, or None."""
        number, asked = self._questions.begin(peers)
        question = AskTurn(number, content.chunk_tokens, list(content.keys))
        for address in asked:
            self._queue_command(address, question)
        if not asked:
            self._questions.drop(number)
        return number if asked else None

    def turns(self, number: int) -> list[tuple[Address, KeptTurn]] | None:
        """Return the turns that a query found, and end the query; None while peers may still reply."""
        return self._questions.answers(number)

    def drop_question(self, number: int) -> None:
        self._questions.drop(number)

    def flush(self) -> None:
        """Send the messages that wait for it. Call this in each step that begins no load."""
        if self.unsent and not self._woken:
            self._woken = True
            self._poller.wake()

    def _queue_command(self, address: Address, message: Request | None, *, soon: bool = True) -> None:
        """Queue a message to a peer, or a handshake. If not `soon`, `flush` sends it, or else a later one."""
        self.unsent.append((address, message))
        # The thread takes all commands at once. Each call of `wake` may hand the interpreter to it, and then
        # the engine's thread waits until it has sent them.
        if soon:
            self.flush()

    # -- the thread ---------------------------------------------------------------------------------------

    def _seconds(self) -> float:
        if self._woken:
            return 0.0
        soonest = min(self._next_beat, self._handshakes.soonest, self._redemptions.soonest)
        return max(0.0, soonest - self._clock()) + 0.001

    def _close_all(self) -> None:
        for peer in self._peers.values():
            peer.socket.close(self._linger_milliseconds)

    def _run_once(self, heard: list[tuple[Address, bool]]) -> None:
        for address, is_event in heard:
            (self._take_event if is_event else self._receive)(address)
        unresolved, self._unresolved = self._unresolved, []
        self._unnamed.clear()
        for command in unresolved:
            self._try_execute(*command)
        self._woken = False
        while self.unsent:
            self._try_execute(*self.unsent.popleft())
        for question in self._redemptions.due():
            self._try_execute(*question)
        now = self._clock()
        if now >= self._next_beat:
            self._next_beat = now + self._heartbeat_seconds
            self._send_heartbeats()
        for address in self._handshakes.refuse_silent():
            # The heartbeats for leases that are held still need the socket.
            if (peer := self._peers.get(address)) is not None and not peer.held:
                self._close(address)

    def _meet(self) -> None:
        for address in self._meets:
            self.look_up(address)

    def _send_heartbeats(self) -> None:
        """Send a heartbeat for every lease that this engine holds, and close the sockets to unused peers."""
        self._handshakes.forget_refusals()
        self._meet()
        runs = self._runs()
        if not runs and (leases := sum(len(peer.held) for peer in self._peers.values())):
            self._log.say(
                "stuck",
                f"this engine runs no steps: it stops sending heartbeats for {counted(leases, 'lease')}",
            )
        for address, peer in list(self._peers.items()):
            held = sorted(peer.held)
            for first in range(0, len(held) if runs else 0, MAX_TICKETS):
                self._send(address, Claim(self._consumer, held[first : first + MAX_TICKETS]))
            # Clients' requests can name any address, so the number of sockets would grow without bound.
            if not (held or peer.used) and self._handshakes.is_unknown(address):
                self._close(address)
            peer.used = False

    def _try_execute(self, address: Address, message: Request | None) -> None:
        try:
            self._execute(address, message)
        except Exception as error:  # noqa: BLE001 - only the request of this command fails
            # These two are expected: the address is malformed or not allowed.
            if not isinstance(error, AddressNotAllowed | zmq.ZMQError):
                self._log.say(type(error).__name__, "control channel: an unexpected error", error)
            if message is None:
                self._handshakes.refuse(address, f"it cannot be asked: {error}")
            else:
                logger.debug(
                    "control channel: %s for %a was dropped: %s", type(message).__name__, address, error
                )

    def _execute(self, address: Address, message: Request | None) -> None:
        peer = self._peers.get(address)
        if isinstance(message, Redeem) and (peer is None or not self._redemptions.is_unsent(message.number)):
            return  # the handshake sends it; a ticket alone must not open a connection
        opened = peer is None
        if peer is None or message is None:
            # A name may be resolved at any moment. So commands that follow a waiting command wait too.
            place = None if address in self._unnamed else self._names.resolve(address[0])
            if place is None:
                if len(self._unresolved) >= self._max_unresolved:
                    raise AddressNotAllowed(
                        f"{self._max_unresolved} messages already wait for names of peers; see whether the "
                        "name server answers"
                    )
                self._unresolved.append((address, message))
                self._unnamed.add(address)
                return
            # A socket whose handshake failed may never connect again: ZeroMQ gives up for good if the other
            # side does not speak its protocol.
            held = self._close(address)
            socket = ControlSocket(self._context, place, address[1], self._keys)
            peer = self._peers[address] = _Peer(socket, held)
            self._poller.add((address, False), socket.raw)
            self._poller.add((address, True), socket.events)
        if message is None:
            self._greet(address)
            return
        self._send(address, message)
        peer.used = True
        if not isinstance(message, Claim):
            return
        if not message.released:
            peer.held.update(message.tickets)
            return
        peer.held.difference_update(message.tickets)
        if opened:
            self._close(address)  # opened for this message only, which is still sent

    def _greet(self, address: Address, *, again: bool = False) -> None:
        """Begin a connection, `again` if ZeroMQ has reopened it, with a handshake and open redemptions."""
        self._send(address, self._handshakes.open(address, again=again))
        # Replies to these over an earlier connection are lost.
        for question in self._redemptions.unanswered(address):
            self._send(address, question)

    def _take_event(self, address: Address) -> None:
        peer = self._peers[address]
        if not peer.socket.is_up():
            self._handshakes.refuse(address, GONE, gone=True, seconds=GONE_SECONDS)
        elif peer.connected:
            self._greet(address, again=True)  # another run of the engine may have the port now
        else:
            peer.connected = True
            self._handshakes.note_connected(address)

    def _close(self, address: Address) -> set[bytes]:
        """Close the socket to a peer, if there is one, and return the tickets that it kept alive."""
        peer = self._peers.pop(address, None)
        if peer is None:
            return set()
        self._poller.remove((address, False))
        self._poller.remove((address, True))
        peer.socket.close(self._linger_milliseconds)
        return peer.held

    def _check_and_resolve(self, address: Address, ranks: tuple[RankCard, ...]) -> tuple[RankCard, ...]:
        self._check_ranks(ranks)
        # The workers that connect to gather channels never resolve names.
        return tuple(self._names.resolve_gathering(card, address, self._log) for card in ranks)

    def _send(self, address: Address, message: Request) -> None:
        sent = self._peers[address].socket.send(message)
        self._poller.note_sent((address, False))
        if not sent:
            logger.debug("control channel: a peer takes no more messages; dropped %s", type(message).__name__)

    def _receive(self, address: Address) -> None:
        peer = self._peers[address]
        data = peer.socket.raw.recv_multipart()[-1]
        answer = decode_numbered(data)
        if isinstance(answer, Turns):
            self._questions.handle_reply(address, answer)
        elif answer is not None:
            awaited = self._redemptions.is_awaited(answer.number)
            if (ticket := self._redemptions.handle_reply(address, answer)) is not None:
                peer.held.add(ticket)  # before this thread can execute its release
            if awaited:
                self._on_news()
        else:
            self._handshakes.handle_reply(address, data)
            if address in self._meets:
                self._on_news()
