"""The source that loads KV from other engines.

A peer keeps the KV blocks of a prompt that it has computed under a lease. A *ticket* is a random id that
claims the lease. A *turn* is a finished request's KV, which a peer keeps for the next turn of its
conversation. There is one `Pull` for each request that came with a ticket, or for which a peer keeps a turn:

    TICKET ─the prompt has a name─▶ REDEEMING ─▶ GRANTED ─▶ SETTLED
       └──────────┴─peer excluded──────────────────┴───────────▲      a turn that was found begins as GRANTED

The ticket is redeemed as the request arrives. From then on heartbeats keep the lease alive, however long the
request queues. The request's claim on the lease ends once: when the request's loads have succeeded, when the
engine computes the prompt instead, or when this peer is excluded.
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
"""Placeholder for a bid while peers have not answered yet whether they keep a matching turn."""

UNUSED_SECONDS = 600.0
"""Seconds without a read after which workers disconnect a peer, which may be gone. Reconnecting is cheap."""


def _shorter(bid: Bid | None, tokens: int) -> Bid | None:
    """Return the bid shortened to `tokens` tokens; None if there is no bid or no token is left."""
    return Bid(bid.source, (Part(PEER, tokens),), bid.looking) if bid is not None and tokens > 0 else None


class PeerSource:
    """Makes bids for the KV that peers offer, and orders the workers to read it.

    Only the engine's thread calls it.
    """

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
        """Create the source without requests.

        Args:
            client: control channel to the peers that offer KV.
            ranks: geometry of this engine's ranks.
            pins: record of the KV blocks that loads keep allocated.
            refusals: log of the requests that a peer cannot serve.
            timeout_seconds: seconds after which a load has failed; also the time to wait for the digest of
                a LoRA adapter.
            most_held: maximum number of blocks that loads from all peers may hold, in flight and late
                (`pins.may_hold`).
            turns: client that asks peers for the kept KV of earlier turns.
            adapters: the engine's LoRA adapters.
        """
        self._adapters = adapters
        self._groups, self._alignments = blocks_of(ranks), dict[str, tuple[int, ...]]()
        self._labels = ranks[0].labels
        # The engine computes the last token of a prompt even if all of it is loaded. Attention writes the
        # same KV again, but recurrent state would have seen the token twice.
        self._computed_again = any(one.kind is GroupKind.STATE for rank in ranks for one in rank.groups)
        self._client, self._pins, self._refusals = client, pins, refusals
        self._timeout, self._most_held = timeout_seconds, most_held
        self._turns, self._asking = turns, dict[str, Bidding]()
        self._pulls: dict[str, Pull] = {}
        self._claims = Claims(client)
        self._reads: list[ReadOrder] = []
        self._connects: dict[str, PeerInfo] = {}
        self._stopped = ""
        self._connected: dict[str, float] = {}  # peers connected to workers, and the time of their last use

    def __len__(self) -> int:
        """Return the number of unfinished requests that came with a ticket or have a kept turn at a peer."""
        return len(self._pulls)

    def arrived(self, request: Request, bidding: Bidding) -> bool:
        """Send the ticket of a new request to its peer. Without a ticket, ask peers for an earlier turn.

        The peer replies with a lease on the blocks that hold the KV of the prompt.

        Args:
            request: the request.
            bidding: excluded sources and remaining attempts of the request.

        Returns:
            Whether peers may be able to serve the request.
        """
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
            return False  # its prompt is unknown here, so the ticket cannot be redeemed; the lease expires
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
            self._strike(name, self._stopped)  # also releases the lease that was just claimed
        return True

    def declined(self, request: Request) -> SourceMiss | None:
        """Return why peers cannot serve a request: a malformed offer, or this engine has stopped reading.

        Return None if neither is the case.
        """
        try:
            read_offer(request.kv_transfer_params)
        except ProtocolError as error:
            return SourceMiss(PEER, MissReason.REFUSED, detail=str(error))
        return SourceMiss(PEER, MissReason.REFUSED, detail=self._stopped) if self._stopped else None

    def bids(self, request: Request, local_tokens: int) -> Sequence[Bid]:
        """Return a bid for the tokens that a peer offers beyond `local_tokens`; empty if it offers none.

        The bid is marked as looking until the peer has answered.
        """
        if looking := self._ask(request, local_tokens):
            return (looking,)
        pull = self._pulls.get(request.request_id)
        if pull is None:
            return ()
        pull.bid = self._bid(pull, request, local_tokens)
        return (pull.bid,) if pull.bid is not None else ()

    def head(self, request: Request, local_tokens: int, alignment_tokens: int) -> Bid | None:
        """Return the last result of `bids`, shortened to end at a multiple of `alignment_tokens`.

        Return None if no token remains.

        Used when this source loads the start of a prompt and another source the rest.
        """
        bid, tokens = self._last_bid(request)
        return _shorter(bid, tokens // alignment_tokens * alignment_tokens - local_tokens)

    def tail(self, request: Request, local_tokens: int, first: int) -> Bid | None:
        """Return the last result of `bids` without the tokens before `first`; None if no token remains.

        Used when another source loads the start of a prompt and this source the rest.
        """
        bid, tokens = self._last_bid(request)
        return _shorter(bid, tokens - first)

    def why_no_bid(self, request: Request, local_tokens: int) -> SourceMiss:
        """Return why there is no bid: no peer keeps a turn, or the peer is unusable or has no more tokens."""
        pull = self._pulls.get(request.request_id)
        if pull is None:
            return SourceMiss(PEER, MissReason.NOT_STORED, detail="no peer keeps an earlier turn of it")
        if (why := pull.bidding.why(pull.peer)) is not None:
            return SourceMiss(PEER, MissReason.REFUSED, detail=why)
        return SourceMiss(
            PEER, MissReason.LOCAL, detail=f"{pull.tokens} tokens are offered, {local_tokens} are here"
        )

    def room(self, bid: Bid, blocks: int) -> bool:
        """Return whether loads from peers may hold `blocks` more blocks for the load of this bid."""
        return may_hold(bid.source, blocks, self._held(), self._most_held)

    def begin(self, load: Load, request: Request) -> None:
        """Order all workers to read the load's KV, and to connect to the peer first if it is new to them."""
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
        """Return the alignment of loaded content in tokens, for each KV cache group.

        In each group, loaded content begins at a multiple of the greatest common divisor of both engines'
        block sizes. While the peer is unknown, the alignment is 1.
        """
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
        """Return ``peer``, the origin of all loads of this source."""
        return PEER

    def loaded_bytes(self, load: Load, report: Report) -> tuple[GroupBytes, ...]:
        """Return the number of bytes that workers have read, per KV cache group of this engine."""
        figures = report.figures
        each = zip(self._labels, figures.strategy_by_group, figures.bytes_by_group, strict=False)
        return tuple(GroupBytes(label, strategy, size) for label, strategy, size in each if size)

    def failure_reason(self, load: Load, report: Report) -> MissReason:
        """Return DEADLINE if the load has passed its deadline, else FAILED."""
        return MissReason.DEADLINE if report.late else MissReason.FAILED

    def ended(self, load: Load, report: Report) -> None:
        """Exclude the peer of a failed load for this request.

        If the peer may be gone, also forget the handshake with it.
        """
        if report.failure is not None:
            if report.peer_lost or report.late:
                self._client.forget(self._pulls[load.request_id].address)
            self._strike(load.request_id, report.failure)

    def forget(self, load: Load) -> None:
        """Do nothing: this source keeps no state per load."""

    def dropped(self, load: Load) -> None:
        """Do nothing: reads in flight cannot be cancelled, and the workers report their end."""

    def settled(self, request_id: str) -> None:
        """End the request's claim on a peer's lease. After the last claim, tell the peer to end the lease."""
        self._turns.drop(request_id)
        pull = self._pulls.get(request_id)
        if pull is None or pull.settled:
            return
        pull.settled = True
        if pull.claim is not None:
            self._claims.end(pull.claim)
        elif pull.grant is not None:
            self._client.release(pull.address, pull.ticket)  # a kept turn has a grant, but no claim

    def finished(self, request_id: str) -> None:
        """Forget a request that has ended, and drop its unanswered question about turns."""
        self._turns.drop(request_id)
        self._asking.pop(request_id, None)
        self._pulls.pop(request_id, None)

    def start_anew(self) -> None:
        """Reject all KV that peers have offered so far, and end the requests' claims on it.

        This KV was computed before the cache was reset, so it must not be loaded.
        """
        for name in self._asking:
            self._turns.drop(name)
        for name in [name for name, pull in self._pulls.items() if not pull.settled]:
            self._strike(name, "the cache was reset")

    def stop_reading(self, why: str) -> None:
        """Stop reading from peers for good. `why` becomes the reason for refusing requests with a ticket."""
        self.start_anew()
        self._stopped = why

    def hand_over(self, orders: StepOrders) -> None:
        """Order the workers to connect to peers, to read from them, and to disconnect. Mutates `orders`."""
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
        """Begin to redeem the ticket: send it to the peer. Exclude the peer if its offer cannot be used.

        Do nothing yet while the digest of the request's LoRA adapter is being computed.
        """
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
        """Return the peer if it has granted the lease and can be read from.

        Return Pending while it has not answered, and Unusable with the reason if it cannot be read from.
        """
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
        """Look at the peers' answers about kept turns. If a turn was found, prepare to read it.

        Return a bid that is marked as looking while peers have not answered, else None.
        """
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
        """Return the last result of `bids` and the number of prompt tokens up to its end, or (None, 0)."""
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
        """Return the reason why a peer cannot be read from; None if it can."""
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
        """Return the number of blocks that loads hold, by peer."""
        return {source: blocks for source, blocks in self._pins.held.items() if source != TIERS}

    def _strike(self, request_id: str, reason: str) -> None:
        pull = self._pulls[request_id]
        if pull.bidding.strike(pull.peer, reason):
            self._refusals.say(request_id, pull.peer, reason)
        self.settled(request_id)
