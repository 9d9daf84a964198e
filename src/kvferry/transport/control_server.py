"""The producer's end of the control channel: one thread, one ROUTER socket.

The thread answers handshakes from constant data, redemptions from a `TicketBook`, and queries for earlier
turns from a `TurnIndex`. Heartbeats and releases become events for the engine's thread, because leases belong
to that thread. An event names only leases that are held, and that the sender has claimed or that keep an
earlier turn. A message that cannot be decoded is counted and dropped without a reply.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from msgspec import structs

from kvferry.common.limited_log import LimitedLog
from kvferry.common.text import shown
from kvferry.transport import security
from kvferry.transport.addresses import ANY_PEER, AllowedPeers, PortRange
from kvferry.transport.handshake import Address
from kvferry.transport.listener import Listener
from kvferry.transport.messages import (
    MAX_REQUEST_BYTES,
    PROTOCOL,
    SEAL_KEY_BYTES,
    AskTurn,
    Hello,
    PeerInfo,
    RankCard,
    Refused,
    decode_request,
    differences,
    encode,
    make_refusal,
)
from kvferry.transport.redeem import Redeem, Redeemed, TicketBook
from kvferry.transport.resolver import ResolveName
from kvferry.transport.turns import TurnIndex

logger = logging.getLogger(__name__)

MAX_PER_SENDER = 256
MAX_MESSAGES = 8192
_MOST_KEEPERS = 64
_REASON_CHARACTERS = 2000


@dataclass(frozen=True, slots=True)
class LeaseClaims:
    """Event: a consumer has claimed leases or sent a heartbeat, or the last one has released them."""

    leases: list[str]  # named as in `LeaseBook`
    released: bool = False


class FairQueue:
    """A FIFO queue between two threads, limited per sender and in total. `dropped` counts lost events."""

    def __init__(
        self,
        on_event: Callable[[], None] = lambda: None,
        per_sender: int = MAX_PER_SENDER,
        total: int = MAX_MESSAGES,
    ) -> None:
        """Create an empty queue. `on_event` is called after each `put` that has appended an event."""
        self.dropped, self._on_event = 0, on_event
        self._per_sender, self._total = per_sender, total
        self._waiting: deque[tuple[bytes, LeaseClaims]] = deque()
        self._of: Counter[bytes] = Counter()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[LeaseClaims]:
        return iter([event for _, event in list(self._waiting)])

    def put(self, sender: bytes, event: LeaseClaims, *, force: bool = False) -> bool:
        """Append an event, or drop it and return False if a limit is reached. `force` ignores the limits."""
        with self._lock:
            full = self._of[sender] >= self._per_sender or len(self._waiting) >= self._total
            if full and not force:
                self.dropped += 1
                return False
            self._of[sender] += 1
            self._waiting.append((sender, event))
        self._on_event()
        return True

    def popleft(self) -> LeaseClaims:
        with self._lock:
            sender, event = self._waiting.popleft()
            self._of[sender] -= 1
            if not self._of[sender]:
                del self._of[sender]  # anyone with the key can be any number of senders
            return event

    def clear(self) -> None:
        with self._lock:
            self._waiting.clear()
            self._of.clear()


class ControlServer:
    """A thread that answers messages from consumers.

    Attributes:
        events: events about leases, oldest first. The server's thread appends them, and the engine's thread
            removes them. The number of queued events caused by one consumer is limited.
        seal_key: key with which grants are sealed for the consumers of this channel.
    """

    def __init__(
        self,
        host: str,
        port: int | PortRange,
        card: PeerInfo,
        keys: security.Keys,
        peers: AllowedPeers = ANY_PEER,
        resolve: ResolveName | None = None,
        on_event: Callable[[], None] = lambda: None,
    ) -> None:
        """Bind the socket, and start the thread. The other arguments are those of `Listener`.

        Args:
            on_event: called in the server's thread after it has appended to `events`.
        """
        self.events = FairQueue(on_event)
        self.tickets = TicketBook()
        self.turns = TurnIndex()
        self.seal_key = secrets.token_bytes(SEAL_KEY_BYTES)
        self._keepers: dict[Address, int] = {}
        self._log = LimitedLog(logger)
        self._card, self._peers = structs.replace(card, seal_key=self.seal_key), peers
        self._listener = Listener(
            "control channel", host, port, keys, MAX_REQUEST_BYTES, peers=peers, resolve=resolve
        )
        self.port = self._listener.port
        self._listener.serve("kvferry-control-server", self._serve)

    def renew(self, ranks: tuple[RankCard, ...], incarnation: int) -> None:
        """Describe the ranks anew. Peers repeat the handshake before they use a lease granted from now on."""
        facts = structs.replace(self._card.facts, incarnation=incarnation)
        self._card = structs.replace(self._card, facts=facts, ranks=ranks)

    @property
    def ranks(self) -> tuple[RankCard, ...]:
        return self._card.ranks

    @property
    def keepers(self) -> dict[Address, int]:
        """Incarnations of the latest consumers that keep turns, by the address for `AskTurn`."""
        return self._keepers.copy()

    @property
    def connections(self) -> int:
        return self._listener.connections.open

    @property
    def rejected(self) -> int:
        """Number of messages dropped because they could not be decoded."""
        return self._listener.rejected

    def close(self) -> None:
        self._listener.close()

    # -- the thread ---------------------------------------------------------------------------------------

    def _serve(self, sender: bytes, data: bytes) -> bytes | None:
        message = decode_request(data)
        if isinstance(message, Redeem):
            answer = self.tickets.redeem(message)
            if isinstance(answer, Redeemed):
                claimed = LeaseClaims(self.tickets.claimed(message.consumer, [message.ticket]))
                self.events.put(sender, claimed)  # may be dropped, because a heartbeat repeats it
            return encode(answer)
        if isinstance(message, AskTurn):
            return encode(self.turns.find(message))
        if isinstance(message, Hello):
            return encode(self._describe(message))
        if not message.released:
            leases = self.tickets.claimed(message.consumer, message.tickets)
            if leases := leases + self.turns.leases(message.tickets):
                self.events.put(sender, LeaseClaims(leases))
        # Each ticket is released at most once, so the number of leases limits these events.
        elif leases := self.tickets.release(message.consumer, message.tickets):
            self.events.put(sender, LeaseClaims(leases, released=True), force=True)
        return None

    def _describe(self, message: Hello) -> PeerInfo | Refused:
        """Return the reply, Refused if protocol or a setting on which the meaning of KV depends differs."""
        peer, own = message.facts, Hello(PROTOCOL, self._card.facts)
        # The consumer prints these sentences, so "there" is this engine.
        if not (found := differences(own, message)):
            if peer.keeps_turns is not None and self._peers.may_allow(peer.keeps_turns[0]):
                self._keepers.pop(peer.keeps_turns, None)
                self._keepers[peer.keeps_turns] = peer.incarnation
                if len(self._keepers) > _MOST_KEEPERS:  # a peer with the key can name any number of addresses
                    del self._keepers[next(iter(self._keepers))]
            return self._card
        who, said = shown(peer.engine_id), make_refusal(differences(message, own)).differences
        self._log.say(
            who, f"engine {who} cannot read from this one: {shown('; '.join(said), _REASON_CHARACTERS)}"
        )
        return make_refusal(found)
