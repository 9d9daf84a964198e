"""The consumer's end of the control channel: one thread for all peers.

The engine's thread calls `ControlClient.look_up` in every step that needs a peer. The call never blocks. It
returns `Pending` while the handshake with the peer is under way. Handshakes with several peers run
concurrently (`handshake`).

A ticket is a random id that the consumer redeems: it exchanges the ticket for block tables and a lease. The
client redeems a ticket as soon as the request arrives, in parallel with the handshake if the producer is new.
It sends heartbeats for claimed leases, so that they do not expire while the request waits in the engine's
queue.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import zmq

from kvferry.limited_log import LimitedLog
from kvferry.transport import security
from kvferry.transport.allowed_peers import ANY_PEER, AllowedPeers
from kvferry.transport.control_socket import SOCKETS, ControlSocket
from kvferry.transport.delay_monitor import DelayMonitor
from kvferry.transport.gather_address import resolve_gather_address
from kvferry.transport.handshake import (
    MAX_HANDSHAKES,
    MAX_REMEMBERED,
    Address,
    Handshakes,
    PeerInfo,
    PeerStatus,
    Pending,
    Unusable,
)
from kvferry.transport.messages import (
    MAX_TICKETS,
    AskTurn,
    Facts,
    Heartbeat,
    KeptTurn,
    RankCard,
    Release,
    Request,
    Turns,
    decode_numbered,
)
from kvferry.transport.redeem import PromptContent, Redeem, Redeemed
from kvferry.transport.redemptions import Redemptions
from kvferry.transport.resolver import AddressNotAllowed, PeerResolver, ResolveName
from kvferry.transport.socket_poller import SocketPoller
from kvferry.transport.turns import TurnContent, TurnQueries
from kvferry.units import counted

logger = logging.getLogger(__name__)


MAX_UNRESOLVED = 4096
"""Maximum number of commands that wait for a peer's name to be resolved."""

_Command: TypeAlias = tuple[Address, Request | None]
"""A peer's address and the message to send to it; None instead of a message starts a handshake."""


@dataclass(slots=True)
class _Peer:
    """A connection to the control channel of one peer. Only the client's thread uses it.

    Attributes:
        socket: socket that is connected to the control channel.
        held: tickets (random ids) of the peer's leases that this engine keeps alive with heartbeats.
        used: True if a message was sent since the last heartbeat, so that a reply may still come.
        connected: True once the peer has accepted a connection.
    """

    socket: ControlSocket
    held: set[bytes] = field(default_factory=set)
    used: bool = False
    connected: bool = False


@dataclass(frozen=True, slots=True)
class _Events:
    """Name of the socket that has the connection events of a peer.

    Attributes:
        address: (host, port) of the peer's control channel.
    """

    address: Address


class ControlClient:
    """A thread that talks to the control channels of all peers that an engine reads KV from.

    The thread does handshakes, redeems tickets, sends heartbeats for leases, and asks peers for earlier turns
    of conversations. To redeem a ticket (a random id that names a lease on the KV of a request) means to
    exchange it for the lease and the block tables. An earlier turn is a finished request whose KV a peer
    keeps, because the next prompt of the conversation will start with the same tokens.
    """

    def __init__(
        self,
        facts: Facts,
        check: Callable[[tuple[RankCard, ...]], None],
        keys: security.Keys,
        peers: AllowedPeers = ANY_PEER,
        handshake_seconds: float = 5.0,
        heartbeat_seconds: float = 5.0,
        *,
        meets: Sequence[Address] = (),
        on_met: Callable[[], None] = lambda: None,
        linger_seconds: float = 0.5,
        max_unresolved: int = MAX_UNRESOLVED,
        resolve: ResolveName | None = None,
        runs: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the client's thread.

        Args:
            facts: description of this engine (ids, versions, KV settings), which the thread sends to peers in
                handshakes.
            check: function that takes the descriptions of a peer's ranks, and raises Incompatible if this
                engine cannot read from them. The client's thread calls this function.
            keys: CURVE keys, with which peers authenticate each other.
            peers: machines that the engine may connect to.
            handshake_seconds: timeout in seconds of a handshake, and of the exchange of a ticket (random id)
                for a lease.
            heartbeat_seconds: seconds between two heartbeats to the same peer.
            max_unresolved: maximum number of commands that wait for a peer's name to be resolved.
            meets: (host, port) of the control channels of peers with which the thread does handshakes before
                anything is asked of them.
            on_met: function that the thread calls when such a handshake has ended.
            linger_seconds: time to send the queued messages of a socket after it is closed.
            resolve: function that resolves the names in `peers`; None for the system's resolver.
            runs: function that returns whether the engine still runs steps. If it does not, no heartbeats are
                sent, so that the engine does not keep blocks of others without using them.
            clock: function that returns the current time in seconds.
        """
        self._runs, self._meets, self._on_met = runs, frozenset(meets), on_met
        self._max_unresolved = max_unresolved
        self._clock, self._linger_milliseconds = clock, int(linger_seconds * 1000)
        self._keys, self._heartbeat_seconds = keys, heartbeat_seconds
        self._check_ranks = check
        self._handshakes = Handshakes(facts, self._check_and_resolve, handshake_seconds, clock)
        self._questions = TurnQueries(clock)
        self._consumer = facts.incarnation
        self._redemptions = Redemptions(self._consumer, handshake_seconds, clock)
        self._commands: deque[_Command] = deque()
        self._unresolved: list[_Command] = []
        self._unnamed: set[Address] = set()
        self._context: zmq.Context[Any] = zmq.Context()
        self._context.max_sockets = SOCKETS * (MAX_REMEMBERED + MAX_HANDSHAKES)
        self._peers: dict[Address, _Peer] = {}
        self._poller = SocketPoller[Address | _Events]()
        self._names = PeerResolver(peers, self._poller.wake, resolve, clock)
        self._log = LimitedLog(logger)
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="kvferry-control-client", daemon=True)
        self._thread.start()

    # -- the engine's thread ------------------------------------------------------------------------------

    @property
    def connections(self) -> int:
        """Number of sockets to peers."""
        return len(self._peers)

    def look_up(self, address: Address, incarnation: int | None = None) -> PeerStatus:
        """Return the status of a peer, and start a handshake with the peer if a new one is needed.

        A new handshake is needed if the peer is unknown, became Unusable some time ago, or may have restarted
        (see `Handshakes.status`). If the maximum number of handshakes is under way, none is started.

        Args:
            address: (host, port) of the peer's control channel.
            incarnation: expected incarnation of the peer (random number that identifies its run); None for
                any. If the peer reported a different number in its last handshake, it may have restarted.

        Returns:
            PeerInfo if this engine can read from the peer; it may be about another run than `incarnation`.
            Unusable, with the reason, if this engine cannot. Pending while a handshake is under way, or while
            none can be started.
        """
        answer = self._handshakes.status(address, incarnation)
        if answer is None:
            if self._handshakes.is_full:
                return Pending()
            answer = self._handshakes.start(address)
            self._queue_command(address, None)
        return answer

    def known(self, address: Address) -> PeerInfo | None:
        """Return the description of a peer whose handshake has ended well; None for any other."""
        answer = self._handshakes.status(address)
        return answer if isinstance(answer, PeerInfo) else None

    def forget(self, address: Address) -> None:
        """Forget the status of a peer that failed, so that the next `look_up` starts a new handshake."""
        self._handshakes.forget(address)

    def redeem(
        self, address: Address, ticket: bytes, tokens: int, content: PromptContent, *, foreseen: bool = False
    ) -> int:
        """Ask a producer to exchange a ticket (random id) for block tables and a lease.

        If the producer is still computing the prompt, the client's thread asks again until the reply covers
        all tokens.

        Args:
            address: (host, port) of the producer's control channel.
            ticket: random id that names the lease.
            tokens: number of tokens whose KV the producer has offered.
            content: digests of the first `tokens` tokens of this engine's prompt. The producer compares them
                with the digests of its own prompt.
            foreseen: True if the producer may learn of the ticket later than this engine.

        Returns:
            Id of the exchange. Pass it to `redemption` to get the reply, and then to `end_redemption`.
        """
        self._questions.note_ticket(address)
        message = self._redemptions.begin(address, ticket, tokens, content, foreseen=foreseen)
        self._queue_command(address, message)
        return message.number

    def redemption(self, number: int, wait_seconds: float = 0.0) -> Redeemed | Unusable | Pending:
        """Return the producer's reply to a `redeem` request (ticket in exchange for block tables and lease).

        If the producer has not replied within `handshake_seconds`, forget its status, so that the next
        `look_up` of the producer starts a new handshake. A producer that cannot be reached any more is not
        waited for.

        Args:
            number: id of the exchange, from `redeem`.
            wait_seconds: maximum time in seconds to wait for the reply.

        Returns:
            The last Redeemed reply, with block tables and lease, if the producer accepted the ticket.
            Unusable, with the reason, if the producer refused or has not replied in time. Otherwise Pending.
        """
        answer = self._redemptions.answer(number, wait_seconds)
        if (silent := self._redemptions.silent_producer(number)) is not None:
            if isinstance(answer, Unusable):
                self.forget(silent)
            elif isinstance(status := self._handshakes.status(silent), Unusable) and status.gone:
                return status
        return answer

    def end_redemption(self, number: int) -> bool:
        """Forget a `redeem` request (ticket in exchange for block tables and lease). Ignore later replies.

        Args:
            number: id of the exchange, from `redeem`.

        Returns:
            False if the producer refused the ticket. True if it accepted the ticket or has not replied: then
            it may be keeping the KV for this engine, so the caller must `release` the lease.
        """
        return self._redemptions.end(number)

    def hold(self, address: Address, ticket: bytes) -> None:
        """Send heartbeats for the lease on an earlier turn of a conversation from now on, until `release`.

        An earlier turn is a finished request whose KV a peer keeps for the next prompt of the conversation.
        The heartbeats keep the lease from expiring while this engine reads the KV.

        Args:
            address: (host, port) of the control channel of the engine that keeps the KV.
            ticket: random id that names the lease.
        """
        self._queue_command(address, Heartbeat(self._consumer, [ticket]))

    def release(self, address: Address, ticket: bytes) -> None:
        """Tell the producer that this engine no longer needs a lease, and stop sending heartbeats for it.

        Args:
            address: (host, port) of the producer's control channel.
            ticket: random id that names the lease.
        """
        self._queue_command(address, Release(self._consumer, [ticket]))

    def ask_turn(self, peers: Mapping[Address, int], content: TurnContent) -> int | None:
        """Ask peers whether they keep KV of an earlier turn of the conversation that a prompt continues.

        Args:
            peers: maps the (host, port) of each peer's control channel to the peer's incarnation (random
                number that identifies its run). Peers that recently failed to reply are not asked.
            content: content of the prompt. The query contains only its chunk size and chunk keys (digests).

        Returns:
            Id of the query, for `turns` and `drop_question`; None if no peer is asked.
        """
        number, asked = self._questions.begin(peers)
        question = AskTurn(number, content.chunk_tokens, list(content.keys))
        for address in asked:
            self._queue_command(address, question)
        if not asked:
            self._questions.drop(number)
        return number if asked else None

    def turns(self, number: int) -> list[tuple[Address, KeptTurn]] | None:
        """Return the earlier turns of the conversation that an `ask_turn` query found, and end the query.

        Args:
            number: id of the query, from `ask_turn`.

        Returns:
            ((host, port) of the peer that keeps the turn, description of the turn) for each turn found. Empty
            if none was found. None while peers may still reply; the query then goes on.
        """
        return self._questions.answers(number)

    def drop_question(self, number: int) -> None:
        """Drop a query for earlier turns of a conversation. Later replies to the query are ignored.

        Args:
            number: id of the query, from `ask_turn`.
        """
        self._questions.drop(number)

    def close(self) -> None:
        """Send the queued messages, and wait until the client's thread has ended."""
        self._stop = True
        self._poller.wake()
        self._thread.join()
        self._names.close()
        self._poller.close()

    def _queue_command(self, address: Address, message: Request | None) -> None:
        """Queue a message to a peer, which the client's thread sends.

        Args:
            address: (host, port) of the peer's control channel.
            message: message to send; None to start a handshake with the peer.
        """
        self._commands.append((address, message))
        self._poller.wake()

    # -- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        delay = DelayMonitor("control channel, asking")
        self._next_beat = self._clock() + self._heartbeat_seconds
        self._meet()
        stop = False
        while not stop:
            heard = self._poller.wait(delay.before_wait(self._wait_seconds(self._next_beat)))
            delay.after_wait()
            stop = self._stop  # messages queued before `close` are still sent
            try:
                self._run_once(heard)
            except Exception as error:  # noqa: BLE001 - one peer's message must not silence all others
                self._log.say(type(error).__name__, "control channel: an unexpected error", error)
        for peer in self._peers.values():
            peer.socket.close(self._linger_milliseconds)
        self._context.term()

    def _run_once(self, heard: list[Address | _Events]) -> None:
        """Run one iteration of the thread: receive replies, execute queued commands, handle deadlines.

        Args:
            heard: addresses of the peers whose replies or connection events have arrived.
        """
        for name in heard:
            if isinstance(name, _Events):
                self._take_event(name.address)
            else:
                self._receive(name)
        unresolved, self._unresolved = self._unresolved, []
        self._unnamed.clear()
        for command in unresolved:
            self._try_execute(*command)
        while self._commands:
            self._try_execute(*self._commands.popleft())
        for question in self._redemptions.due():
            self._try_execute(*question)
        now = self._clock()
        if now >= self._next_beat:
            self._next_beat = now + self._heartbeat_seconds
            self._send_heartbeats()
        self._handshakes.refuse_silent()
        for address in self._handshakes.pop_refused():
            self._close_if_idle(address)

    def _wait_seconds(self, beat: float) -> float:
        """Return the seconds for which the thread may wait for messages: until the next deadline, at most 1.

        The thread wakes up at least once a second so that `DelayMonitor` notices if the thread is delayed.

        Args:
            beat: time of the next heartbeat, in seconds of the client's clock.
        """
        soonest = min([beat, *self._handshakes.deadlines, *self._redemptions.deadlines])
        return min(1.0, max(0.0, soonest - self._clock()) + 0.001)

    def _meet(self) -> None:
        """Begin a handshake with each configured peer that is not known, or no longer refused."""
        for address in self._meets:
            self.look_up(address)

    def _send_heartbeats(self) -> None:
        """Send a heartbeat for every lease that this engine holds, and close the sockets to unused peers.

        A peer is unused if it has no status (`look_up`), this engine holds none of its leases, and nothing
        was sent to it since the last heartbeat. If sockets to unused peers stayed open, their number would
        grow without bound, because clients' requests can name any peer address.
        """
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
                self._send(address, Heartbeat(self._consumer, held[first : first + MAX_TICKETS]))
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
                self._wait_for_name((address, message))
                return
            # A socket whose handshake failed may never connect again: ZeroMQ gives up for good if the other
            # side does not speak its protocol.
            held = self._close(address)
            socket = self._connect(place, address[1])
            peer = self._peers[address] = _Peer(socket, held)
            self._poller.add(address, socket.raw)
            self._poller.add(_Events(address), socket.events)
        if message is None:
            self._greet(address)
            return
        self._send(address, message)
        peer.used = True
        if isinstance(message, Heartbeat):
            peer.held.update(message.tickets)
        elif isinstance(message, Release):
            peer.held.difference_update(message.tickets)
        if opened and isinstance(message, Release):
            self._close(address)  # opened for this message only, which is still sent

    def _greet(self, address: Address, *, again: bool = False) -> None:
        """Begin a connection with a handshake and the questions that the peer has not answered.

        Replies to them over an earlier connection are lost.

        Args:
            address: (host, port) of the peer's control channel.
            again: True if ZeroMQ has opened the connection again.
        """
        self._send(address, self._handshakes.open(address, again=again))
        for question in self._redemptions.unanswered(address):
            self._send(address, question)

    def _take_event(self, address: Address) -> None:
        """Take a connection event of a peer. A peer to which no connection can be opened is Unusable.

        Args:
            address: (host, port) of the peer's control channel.
        """
        peer = self._peers[address]
        if not peer.socket.is_up():
            self._handshakes.refuse_unreachable(address)
        elif peer.connected:
            self._greet(address, again=True)  # another run of the engine may have the port now
        else:
            peer.connected = True

    def _close(self, address: Address) -> set[bytes]:
        """Close the socket to a peer, if there is one.

        Args:
            address: (host, port) of the peer's control channel.

        Returns:
            Tickets (random ids) of the leases that this engine kept alive over the socket; empty without a
            socket.
        """
        peer = self._peers.pop(address, None)
        if peer is None:
            return set()
        self._poller.remove(address)
        self._poller.remove(_Events(address))
        peer.socket.close(self._linger_milliseconds)
        return peer.held

    def _close_if_idle(self, address: Address) -> None:
        """Close the socket to a peer that became Unusable, unless this engine holds leases of the peer.

        The heartbeats for these leases need the socket.

        Args:
            address: (host, port) of the peer's control channel.
        """
        peer = self._peers.get(address)
        if peer is not None and not peer.held:
            self._close(address)

    def _wait_for_name(self, command: _Command) -> None:
        """Defer a command until the host name of its peer is resolved.

        Commands for the same peer stay in order.

        Args:
            command: (address of the peer, message to send), as passed to `_queue_command`.

        Raises:
            AddressNotAllowed: too many commands are waiting already.
        """
        if len(self._unresolved) >= self._max_unresolved:
            raise AddressNotAllowed(
                f"{self._max_unresolved} messages already wait for names of peers; see whether the name "
                "server answers"
            )
        self._unresolved.append(command)
        self._unnamed.add(command[0])

    def _check_and_resolve(self, address: Address, ranks: tuple[RankCard, ...]) -> tuple[RankCard, ...]:
        """Check that this engine can read from a peer's ranks. Resolve the hosts of their gather channels.

        Over a rank's gather channel, readers ask the rank to pack cells (parts of blocks) before they read
        the cells. The descriptions may contain the channel's host as a name.

        Args:
            address: (host, port) of the peer's control channel.
            ranks: descriptions of the peer's ranks.

        Returns:
            The descriptions, with IP addresses in place of host names. If the host of a gather channel is not
            allowed or not resolved yet, the channel is removed from the description, and this engine reads
            from the rank without asking it to pack cells.

        Raises:
            Incompatible: this engine cannot read from the ranks.
        """
        self._check_ranks(ranks)
        return tuple(resolve_gather_address(card, address, self._names, self._log) for card in ranks)

    def _connect(self, host: str, port: int) -> ControlSocket:
        return ControlSocket(self._context, host, port, self._keys)

    def _send(self, address: Address, message: Request) -> None:
        sent = self._peers[address].socket.send(message)
        self._poller.note_sent(address)
        if not sent:
            logger.debug("control channel: a peer takes no more messages; dropped %s", type(message).__name__)

    def _receive(self, address: Address) -> None:
        peer = self._peers[address]
        data = peer.socket.receive()
        answer = decode_numbered(data)
        if isinstance(answer, Turns):
            self._questions.handle_reply(address, answer)
        elif answer is not None:
            if (ticket := self._redemptions.handle_reply(address, answer)) is not None:
                peer.held.add(ticket)  # before this thread can execute its release
        elif message := self._handshakes.handle_reply(address, data):
            self._send(address, message)
        elif address in self._meets:
            self._on_met()
