"""The source of KV in other engines, which have computed prompts and keep them under leases.

One `Pull` per request that came with a ticket, or for which a peer keeps an earlier turn:

    TICKET ─the prompt has a name─▶ REDEEMING ─▶ GRANTED ─▶ SETTLED
       └──────────┴─struck out─────────────────────┴───────────▲      a turn that was found begins as GRANTED

The ticket is redeemed as the request arrives. From then on the lease is kept alive, however long the request
queues, and it is released once: when the request has been served, is computed after all, or this peer is
struck out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import gcd

from kvferry.connector.adapters import Adapters
from kvferry.connector.bids import Bid, Bidding, Part
from kvferry.connector.decisions import MissReason, SourceMiss
from kvferry.connector.engine import Block, Request
from kvferry.connector.load import Load
from kvferry.connector.load_results import GroupBytes
from kvferry.connector.messages import Report, StepOrders
from kvferry.connector.peers.claims import Claims
from kvferry.connector.peers.offer import read_offer
from kvferry.connector.peers.pull import Pull, blocks_of
from kvferry.connector.peers.turn_finder import TurnFinder
from kvferry.connector.pins import Pins, may_hold
from kvferry.connector.prompt_content import content_of
from kvferry.connector.refusals import Refusals
from kvferry.errors import NotYetNamed, ProtocolError, Unnameable
from kvferry.geometry import GroupKind, RankGeometry
from kvferry.tiers.names import PEER, TIERS
from kvferry.transport.control_client import ControlClient
from kvferry.transport.handshake import PeerInfo, Pending, Unusable
from kvferry.transport.read_order import ReadOrder
from kvferry.transport.redeem import Redeemed

_LOOKING = Bid("peers that keep earlier turns", (), looking=True)
"""The bid while peers have not answered which turns they keep."""

UNUSED_SECONDS = 600.0
"""Seconds after which workers forget an unused peer, which may be gone. Connecting it again is cheap."""


def _shorter(bid: Bid | None, tokens: int) -> Bid | None:
    """Return the bid cut to so many tokens."""
    return Bid(bid.source, (Part(PEER, tokens),), bid.looking) if bid is not None and tokens > 0 else None


class PeerSource:
    """Bids what peers offer, and orders reads from them. Only the engine's thread calls it."""

    name = PEER

    def __init__(
        self,
        client: ControlClient,
        *,
        ranks: Sequence[RankGeometry],
        pins: Pins[Block],
        refusals: Refusals,
        timeout_seconds: float,
        most_held: int,
        turns: TurnFinder,
        adapters: Adapters,
    ) -> None:
        """Begin.

        Args:
            client: control channel to the producers.
            ranks: this engine's ranks.
            pins: blocks that loads hold.
            refusals: logs requests that are not served.
            timeout_seconds: deadline of a load.
            most_held: blocks that loads from all peers may hold, in flight and late (`cache.pins.may_hold`).
            turns: asks peers for earlier turns.
            adapters: the engine's LoRA adapters.
        """
        self._adapters = adapters
        self._groups, self._alignments = blocks_of(ranks), dict[str, tuple[int, ...]]()
        self._labels = ranks[0].labels
        # The engine computes the last token of a prompt even if all of it is loaded. Attention writes the
        # same once more; recurrent state would have seen the token twice.
        self._computed_again = any(one.kind is GroupKind.STATE for rank in ranks for one in rank.groups)
        self._client, self._pins, self._refusals = client, pins, refusals
        self._timeout, self._most_held = timeout_seconds, most_held
        self._turns, self._asking = turns, dict[str, Bidding]()
        self._pulls: dict[str, Pull] = {}
        self._claims = Claims(client)
        self._reads: list[ReadOrder] = []
        self._connects: dict[str, PeerInfo] = {}
        self._stopped = ""
        self._connected: dict[str, float] = {}  # peers that workers know, and when each was last used

    def __len__(self) -> int:
        """Number of requests with something to pull that have not ended."""
        return len(self._pulls)

    def arrived(self, request: Request, bidding: Bidding) -> bool:
        """Redeem the ticket that a request came with; look for an earlier turn if it came without."""
        name = request.request_id
        try:
            offer = read_offer(request.kv_transfer_params)
        except ProtocolError as error:
            self._refusals.say(name, "its offer", str(error))
            return False
        if offer is None:
            if not self._stopped and self._turns.ask(request):
                self._asking[name] = bidding
            return name in self._asking
        if request.was_rejected:
            return False  # its prompt is not known here, so nobody redeems the ticket, and its lease runs out
        until = time.monotonic() + self._timeout
        pull = self._pulls[name] = Pull(
            address=offer.address,
            engine_id=offer.remote_engine_id,
            ticket=offer.ticket,
            tokens=offer.remote_num_tokens,
            bidding=bidding,
            until=until,
        )
        self._redeem(pull, request)
        if self._stopped:
            self._strike(name, self._stopped)  # which releases the lease that has just been claimed
        return True

    def declined(self, request: Request) -> SourceMiss | None:
        """Return why a request is not served from peers: its offer is malformed, or reading has stopped."""
        try:
            read_offer(request.kv_transfer_params)
        except ProtocolError as error:
            return SourceMiss(PEER, MissReason.REFUSED, detail=str(error))
        return SourceMiss(PEER, MissReason.REFUSED, detail=self._stopped) if self._stopped else None

    def bids(self, request: Request, local_tokens: int) -> Sequence[Bid]:
        """Return a bid of the offered tokens; it is still looking until the peer is known."""
        if looking := self._ask(request, local_tokens):
            return (looking,)
        pull = self._pulls.get(request.request_id)
        if pull is None:
            return ()
        pull.bid = self._bid(pull, request, local_tokens)
        return (pull.bid,) if pull.bid is not None else ()

    def head(self, request: Request, local_tokens: int, alignment_tokens: int) -> Bid | None:
        """See `Source.head`."""
        bid, tokens = self._last_bid(request)
        return _shorter(bid, tokens // alignment_tokens * alignment_tokens - local_tokens)

    def tail(self, request: Request, local_tokens: int, first: int) -> Bid | None:
        """See `Source.tail`."""
        bid, tokens = self._last_bid(request)
        return _shorter(bid, tokens - first)

    def why_no_bid(self, request: Request, local_tokens: int) -> SourceMiss:
        """Return why there is no bid: the peer is unusable, has no more than is here, or keeps no turn."""
        pull = self._pulls.get(request.request_id)
        if pull is None:
            return SourceMiss(PEER, MissReason.NOT_STORED, detail="no peer keeps an earlier turn of it")
        if (why := pull.bidding.why(pull.peer)) is not None:
            return SourceMiss(PEER, MissReason.REFUSED, detail=why)
        return SourceMiss(
            PEER, MissReason.LOCAL, detail=f"{pull.tokens} tokens are offered, {local_tokens} are here"
        )

    def room(self, bid: Bid, blocks: int) -> bool:
        """Return whether loads from peers leave enough blocks for another one."""
        return may_hold(bid.source, blocks, self._held(), self._most_held)

    def begin(self, load: Load, request: Request) -> None:
        """Order the load from all workers, and let them know the peer before."""
        pull = self._pulls[load.request_id]
        assert pull.grant is not None
        assert pull.incarnation is not None
        answer = self._client.look_up(pull.address, pull.incarnation)
        if isinstance(answer, PeerInfo):
            if pull.peer not in self._connected:
                self._connects[pull.peer] = answer
            self._connected[pull.peer] = time.monotonic()
        self._reads.append(
            ReadOrder(
                key=load.key,
                peer=pull.peer,
                span=load.span,
                src_tables=pull.grant.block_ids,
                dst_tables=load.tables,
                lease=pull.grant.word(pull.incarnation),
            )
        )

    def alignments(self, request_id: str) -> tuple[int, ...]:
        """Return tokens per group: the common divisor of both sides' blocks."""
        pull = self._pulls[request_id]
        answer = self._client.look_up(pull.address, pull.incarnation)
        if not isinstance(answer, PeerInfo):
            return (1,) * len(self._groups)
        if pull.peer not in self._alignments:
            theirs = blocks_of(card.geometry for card in answer.ranks)
            self._alignments[pull.peer] = tuple(
                gcd(block, *(tokens for tokens, names in theirs if names & layers))
                for block, layers in self._groups
            )
        return self._alignments[pull.peer]

    def origin(self, load: Load) -> str:
        """Return PEER."""
        return PEER

    def loaded_bytes(self, load: Load, report: Report) -> tuple[GroupBytes, ...]:
        """Return the bytes that were read, per KV cache group of this engine."""
        figures = report.figures
        each = zip(self._labels, figures.strategy_by_group, figures.bytes_by_group, strict=False)
        return tuple(GroupBytes(label, strategy, size) for label, strategy, size in each if size)

    def failure_reason(self, load: Load, report: Report) -> MissReason:
        """Return DEADLINE for a late load, else FAILED."""
        return MissReason.DEADLINE if report.late else MissReason.FAILED

    def ended(self, load: Load, report: Report) -> None:
        """Strike out the peer of a failed load, and forget a peer that may have gone."""
        if report.failure is not None:
            if report.peer_lost or report.late:
                self._client.forget(self._pulls[load.request_id].address)
            self._strike(load.request_id, report.failure)

    def forget(self, load: Load) -> None:
        """Do nothing: reports say what a load has brought."""

    def dropped(self, load: Load) -> None:
        """Do nothing: reads in flight land, and are reported."""

    def settled(self, request_id: str) -> None:
        """End the request's claim; the last request with a ticket releases the lease."""
        self._turns.drop(request_id)
        pull = self._pulls.get(request_id)
        if pull is None or pull.settled:
            return
        pull.settled = True
        if pull.claim is not None:
            self._claims.end(pull.claim)
        elif pull.grant is not None:
            self._client.release(pull.address, pull.ticket)  # a turn

    def finished(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._turns.drop(request_id)
        self._asking.pop(request_id, None)
        self._pulls.pop(request_id, None)

    def start_anew(self) -> None:
        """Strike out everything that peers have offered so far: it was computed before the reset."""
        for name in self._asking:
            self._turns.drop(name)
        for name in [name for name, pull in self._pulls.items() if not pull.settled]:
            self._strike(name, "the cache was reset")

    def stop_reading(self, why: str) -> None:
        """Read from no peer from now on; requests with a ticket are told `why`."""
        self.start_anew()
        self._stopped = why

    def hand_over(self, orders: StepOrders) -> None:
        """Add reads, peers to connect and peers to forget to the orders of a step."""
        self._claims.step()
        orders.connects = {name: known.ranks for name, known in self._connects.items()}
        self._connects.clear()
        now = time.monotonic()
        orders.disconnects = [name for name, used in self._connected.items() if now - used > UNUSED_SECONDS]
        for name in orders.disconnects:
            del self._connected[name]
            self._alignments.pop(name, None)
        orders.reads, self._reads = self._reads, []

    def _redeem(self, pull: Pull, request: Request) -> None:
        """Begin to redeem the ticket; later, if the name of the prompt's LoRA adapter is not known yet."""
        if pull.tokens > request.num_prompt_tokens - self._computed_again:
            last = ", whose last token is computed here: state must not have seen it" * self._computed_again
            self._strike(
                request.request_id,
                f"{pull.tokens} tokens are offered for a prompt of {request.num_prompt_tokens}{last}",
            )
            return
        try:
            content = content_of(request, pull.tokens, self._adapters)
        except NotYetNamed as error:
            if time.monotonic() >= pull.until:
                self._strike(request.request_id, f"{error}, after {self._timeout:g} s")
            return
        except Unnameable as error:
            self._strike(request.request_id, f"the content of this prompt has no certain name: {error}")
            return
        # The first message to a new peer opens the handshake, and the ticket travels right behind it.
        if not isinstance(self._client.look_up(pull.address), Unusable):
            pull.claim = self._claims.begin(pull.address, pull.ticket, pull.tokens, content)

    def _meet(self, pull: Pull) -> PeerInfo | Pending | Unusable:
        """Return the peer once it has granted the lease and can be read from, or why it never will."""
        peer = self._client.look_up(pull.address, pull.incarnation)
        if not isinstance(peer, PeerInfo):
            return peer
        if pull.grant is None:
            if pull.claim is None:
                return Pending()
            answer = self._claims.answer(pull.claim)
            if not isinstance(answer, Redeemed):
                return answer
            pull.grant, pull.incarnation = answer.grant, answer.incarnation
            peer = self._client.look_up(pull.address, pull.incarnation)
        if isinstance(peer, PeerInfo) and (refusal := self._refusal(pull, peer)) is not None:
            return Unusable(refusal)
        return peer

    def _ask(self, request: Request, local_tokens: int) -> Bid | None:
        """Take what peers have found; return a bid as still looking while they have not answered."""
        name, most = request.request_id, request.num_tokens - 1 - local_tokens
        if name not in self._turns or most <= 0:
            return None
        found = self._turns.found(request)
        if isinstance(found, Pending):
            return _shorter(_LOOKING, most)
        if found is not None:
            kept = found.kept
            self._pulls[name] = Pull(
                address=found.address,
                engine_id=kept.engine_id,
                ticket=kept.ticket,
                tokens=found.tokens,
                bidding=self._asking[name],
                until=0.0,
                grant=kept.grant,
                incarnation=kept.incarnation,
            )
            self._client.hold(found.address, kept.ticket)
        return None

    def _last_bid(self, request: Request) -> tuple[Bid | None, int]:
        """Return the last bid, and the token at which it ends."""
        pull = self._pulls.get(request.request_id)
        if pull is not None:
            return pull.bid, pull.tokens
        return (_LOOKING, request.num_tokens - 1) if request.request_id in self._turns else (None, 0)

    def _bid(self, pull: Pull, request: Request, local_tokens: int) -> Bid | None:
        if not pull.settled and pull.claim is None and pull.grant is None:
            self._redeem(pull, request)
        tokens = pull.tokens - local_tokens
        if pull.settled or tokens <= 0:
            return None
        peer = self._meet(pull)
        if isinstance(peer, Unusable):
            self._strike(request.request_id, peer.reason)
            return None
        return Bid(pull.peer, (Part(PEER, tokens),), isinstance(peer, Pending))

    def _refusal(self, pull: Pull, peer: PeerInfo) -> str | None:
        """Return why a peer cannot be read from, None if it can."""
        if (reason := pull.mismatch(peer)) is not None:
            return reason
        late = self._pins.late_blocks(pull.peer)
        if late and not may_hold(pull.peer, 1, {pull.peer: late}, self._most_held):
            return (
                f"reads past their deadline still hold {late} blocks, and those of a peer may hold half of "
                f"{self._most_held} (late_blocks)"
            )
        return None

    def _held(self) -> dict[str, int]:
        """Return the blocks that loads from each peer hold."""
        return {source: blocks for source, blocks in self._pins.held.items() if source != TIERS}

    def _strike(self, request_id: str, reason: str) -> None:
        pull = self._pulls[request_id]
        if pull.bidding.strike(pull.peer, reason):
            self._refusals.say(request_id, pull.peer, reason)
        self.settled(request_id)
