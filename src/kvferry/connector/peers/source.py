"""The source that loads KV from other engines.

There is one `Pull` for each request that came with a ticket, or for which a peer keeps an earlier turn of its
conversation (a *turn* is the KV of a finished request):

    TICKET ─the prompt has a name─▶ REDEEMING ─▶ GRANTED ─▶ SETTLED
       └──────────┴─peer excluded──────────────────┴───────────▲      a turn that was found begins as GRANTED

A peer may grant blocks before it has computed the whole prompt. Then a load reads what is computed, and goes
on with each further grant (`feed`).

A peer is excluded if it refuses the ticket, cannot be reached (`gone`) or has not answered in time. Until
then its bid is *promised*, and the request waits for it (`choosing`).

The ticket is redeemed as the request arrives. From then on heartbeats keep the lease alive, however long the
request queues. The request's claim on the lease ends once: when its loads have succeeded, when the engine
computes the prompt instead, or when this peer is excluded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from kvferry.common.errors import NotYetNamed, ProtocolError, Unnameable
from kvferry.common.units import counted
from kvferry.connector.content import Adapters, content_of
from kvferry.connector.engine import Request
from kvferry.connector.events import MissReason, Refusals, SourceMiss
from kvferry.connector.load import Bid, Bidding, Load, PlaceTokens
from kvferry.connector.messages import Report, StepOrders
from kvferry.connector.peers.claims import Claims, PeerFeed, Pull, peer_name
from kvferry.connector.peers.connections import PeerConnections, TurnFinder
from kvferry.connector.peers.offer import read_offer
from kvferry.connector.source import Answer
from kvferry.connector.transfer import RunningLoad, TransferBook, may_hold
from kvferry.geometry import GroupKind, RankGeometry
from kvferry.tiers.names import PEER, TIERS
from kvferry.transport.control_client import ControlClient
from kvferry.transport.handshake import Address, PeerInfo, Pending, Unusable
from kvferry.transport.redeem import Redeemed

_LOOKING = Bid("peers that keep earlier turns", (), looking=True)
"""Placeholder for a bid while peers have not answered yet whether they keep a matching turn."""


def _shorter(bid: Bid | None, tokens: int) -> Bid | None:
    return replace(bid, parts=(PlaceTokens(PEER, tokens),)) if bid is not None and tokens > 0 else None


class PeerSource:
    """The source of KV that loads from other engines. Only the engine's thread calls it."""

    name = PEER

    def __init__(
        self,
        client: ControlClient,
        *,
        ranks: Sequence[RankGeometry],
        loads: TransferBook[RunningLoad],
        refusals: Refusals,
        timeout_seconds: float,
        most_held: int,
        turns: TurnFinder,
        adapters: Adapters,
        idle: Callable[[], bool],
        meets: Sequence[Address] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the source. It has no requests yet.

        Args:
            client: control channel to the peers that offer KV.
            ranks: geometry of this engine's ranks.
            loads: loads from all sources that may still write to their blocks.
            refusals: log of the requests that a source does not serve.
            timeout_seconds: maximum wait for the digest of a request's LoRA adapter, which is sent with the
                ticket. Then the peer is excluded.
            most_held: maximum number of blocks that loads from all peers together may pin, including loads
                past their deadline.
            turns: asks peers for earlier turns of a conversation.
            adapters: the engine's LoRA adapters.
            idle: returns whether the engine computes no request at present.
            meets: control channels of the peers that the workers connect to before the first load.
            clock: returns monotonic seconds.
        """
        self._adapters, self._clock = adapters, clock
        self._labels = ranks[0].labels
        # The engine computes the last token of a prompt even if all of it is loaded. Attention writes the
        # same KV again, but recurrent state would have seen the token twice.
        self._computed_again = any(one.kind is GroupKind.STATE for rank in ranks for one in rank.groups)
        self._client, self._loads, self._refusals = client, loads, refusals
        self._timeout, self._most_held = timeout_seconds, most_held
        self._turns, self._asking = turns, dict[str, Bidding]()
        self._pulls: dict[str, Pull] = {}
        self._claims = Claims(client, idle, clock)
        self._connections = PeerConnections(ranks, clock)
        self._meets, self._met = tuple(meets), dict[Address, int]()
        self._stopped = ""

    def __len__(self) -> int:
        """Return the number of unfinished requests for which a peer may hold KV."""
        return len(self._pulls)

    def arrived(self, request: Request, bidding: Bidding) -> bool:
        """Redeem the request's ticket; without one, ask all peers that keep turns of conversations."""
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
        tokens = offer.remote_num_tokens or request.num_prompt_tokens - 1
        if tokens < 1:
            return False
        until = self._clock() + self._timeout
        pull = self._pulls[name] = Pull(
            request=request,
            address=offer.address,
            engine_id=offer.remote_engine_id,
            ticket=offer.ticket,
            tokens=tokens,
            bidding=bidding,
            until=until,
            cached_tokens=offer.remote_prefill_cached_tokens,
            foreseen=offer.remote_num_tokens is None,
        )
        self._redeem(pull, request)
        if self._stopped:
            self._exclude_peer(name, self._stopped)  # also releases the lease that was just claimed
        return True

    def declined(self, request: Request) -> SourceMiss | None:
        try:
            read_offer(request.kv_transfer_params)
        except ProtocolError as error:
            return SourceMiss(PEER, MissReason.REFUSED, detail=str(error))
        return SourceMiss(PEER, MissReason.REFUSED, detail=self._stopped) if self._stopped else None

    def ask(self, request: Request, local_tokens: int) -> Answer:
        """Return what a peer offers after the first `local_tokens` tokens.

        Until the peer has answered, the bid is an upper bound, marked as `looking`. With a ticket, which says
        the number of tokens, it is marked as `promised` as well.
        """
        bid = self._process_turn_answers(request, local_tokens)
        if bid is None and (pull := self._pulls.get(request.request_id)) is not None:
            bid = pull.bid = self._bid(pull, request, local_tokens)
        end = local_tokens if bid is None else local_tokens + bid.tokens
        return Answer(
            bids=() if bid is None else (bid,),
            why_none=partial(self._why_none, request.request_id, local_tokens),
            head=lambda alignment: _shorter(bid, end // alignment * alignment - local_tokens),
            tail=lambda first: _shorter(bid, end - first),
        )

    def _why_none(self, request_id: str, local_tokens: int) -> SourceMiss:
        pull = self._pulls.get(request_id)
        if pull is None:
            return SourceMiss(PEER, MissReason.NOT_STORED, detail="no peer keeps an earlier turn of it")
        if (why := pull.bidding.exclusion_reason(pull.peer)) is not None:
            return SourceMiss(PEER, MissReason.GONE if pull.gone else MissReason.REFUSED, detail=why)
        return SourceMiss(
            PEER, MissReason.LOCAL, detail=f"{counted(pull.tokens, 'token')} offered, {local_tokens} here"
        )

    def has_room(self, bid: Bid, blocks: int) -> bool:
        return may_hold(bid.source, blocks, self._held(), self._most_held)

    def begin(self, load: Load, request: Request) -> PeerFeed:
        """Have the workers connect to the peer if they are not connected, and read from it part by part."""
        pull = self._pulls[load.request_id]
        answer = self._client.look_up(pull.address, pull.incarnation)
        if isinstance(answer, PeerInfo):
            self._connections.use(pull.peer, answer)
        return PeerFeed(
            load,
            pull,
            alignment_tokens=self._connections.part_alignment(answer),
            labels=self._labels,
            update=self._update,
            on_failed=self._on_failed,
        )

    def alignments(self, request_id: str) -> tuple[int, ...]:
        """Return the greatest common divisor of both engines' block sizes for each KV cache group, in tokens.

        It is 1 until the handshake with the peer is complete.
        """
        pull = self._pulls[request_id]
        answer = self._client.look_up(pull.address, pull.incarnation)
        return self._connections.alignments(pull.peer, answer)

    def settled(self, request_id: str) -> None:
        """End a request's claim on a peer's lease, because the request will not read from the peer again.

        The request's answer then reports as cached what the caches of the peer had, if that is known.
        """
        self._turns.drop(request_id)
        pull = self._pulls.get(request_id)
        if pull is None:
            return
        if not pull.settled:
            self._end_claim(pull)
        # The engine sets its own number at each admission, so this is repeated after each of them.
        if pull.cached_tokens is not None:
            pull.request.report_cached_tokens(pull.cached_tokens)

    def finished(self, request_id: str) -> None:
        self._turns.drop(request_id)
        self._asking.pop(request_id, None)
        self._pulls.pop(request_id, None)

    def start_anew(self) -> None:
        """Exclude all peers that have offered KV, because it was computed before the cache was reset."""
        for name in self._asking:
            self._turns.drop(name)
        for name in [name for name, pull in self._pulls.items() if not pull.settled]:
            self._exclude_peer(name, "the cache was reset")

    def reconnect(self) -> None:
        """Have the workers connect to each peer again at its next load, because the workers are new."""
        self._connections.start_anew()

    def give_up_oldest_claim(self, why: str) -> None:
        """Exclude the peer of the request that has waited longest, if any request waits.

        Args:
            why: reason to report for the request.
        """
        for name, pull in self._pulls.items():
            # The claim of a load under way ends by itself.
            if not (pull.settled or pull.loading):
                self._exclude_peer(name, why)
                return

    def drain(self, why: str) -> None:
        """Accept no offers of peers from now on. Loads under way go on.

        Args:
            why: reason to report for every request that peers could have served.
        """
        self._stopped = why

    def stop_reading(self, why: str) -> None:
        """Stop reading from peers for good, and end all claims on leases.

        Args:
            why: reason to report for every request that peers could have served.
        """
        self.start_anew()
        self._stopped = why

    @property
    def busy(self) -> bool:
        """True if the workers shall connect to a configured peer, even if the engine has no requests."""
        return any(True for _ in self._new_peers())

    @property
    def has_work(self) -> bool:
        """Whether `hand_over` has more to do than to disconnect unused peers."""
        # A claim may have used up this step's time to wait for answers.
        return self._connections.has_new or len(self._claims) > 0

    def hand_over(self, orders: StepOrders) -> None:
        """Tell the workers which peers to connect to and which to disconnect. Mutates `orders`.

        From now on this step's questions to peers may wait again.
        """
        self._claims.step()
        for address, peer in self._new_peers():
            facts = peer.facts
            self._connections.use(peer_name(facts.engine_id, address, facts.incarnation), peer)
            self._met[address] = facts.incarnation
        orders.connects = self._connections.take_new()
        orders.disconnects = self._connections.take_unused(
            lambda: {pull.peer for pull in self._pulls.values() if pull.loading}
        )

    def _new_peers(self) -> Iterator[tuple[Address, PeerInfo]]:
        """Yield the configured peers whose present run the workers have not met, each with its address."""
        for address in self._meets:
            peer = self._client.known(address)
            if peer is not None and peer.facts.incarnation != self._met.get(address):
                yield address, peer

    def _redeem(self, pull: Pull, request: Request) -> None:
        """Send a request's ticket to its peer, or exclude the peer if the offer does not fit the prompt.

        Do nothing while the digest of the request's LoRA adapter is computed. Sets `pull.claim`.
        """
        # The offer comes from a client, who may have sent it with another prompt.
        if pull.tokens > request.num_prompt_tokens - self._computed_again:
            last = ", whose last token is computed here: state must not have seen it" * self._computed_again
            self._exclude_peer(
                request.request_id,
                f"{counted(pull.tokens, 'token')} offered for a prompt of {request.num_prompt_tokens}{last}",
            )
            return
        try:
            content = content_of(request, pull.tokens, self._adapters)
        except NotYetNamed as error:
            if self._clock() >= pull.until:
                self._exclude_peer(request.request_id, f"{error}, after {self._timeout:g} s")
            return
        except Unnameable as error:
            self._exclude_peer(request.request_id, f"the content of this prompt has no certain name: {error}")
            return
        # The first message to a new peer opens the handshake, and the ticket travels right behind it.
        if not isinstance(self._client.look_up(pull.address), Unusable):
            pull.claim = self._claims.begin(
                pull.address, pull.ticket, pull.tokens, content, foreseen=pull.foreseen
            )

    def _ready_peer(self, pull: Pull) -> PeerInfo | Pending | Unusable:
        """Return the peer of a pull if it has granted a lease that can be read now.

        Return Pending while the peer has not answered, and Unusable with the reason if it never will. Sets
        `grant`, `ready` and `incarnation` of the pull.
        """
        peer = self._client.look_up(pull.address, pull.incarnation)
        if not isinstance(peer, PeerInfo):
            return peer
        known = pull.grant is not None
        if (unusable := self._update(pull)) is not None:
            return unusable
        if pull.grant is None:
            return Pending()
        # The answer may name another run of the peer than the handshake that was looked up before.
        if not known:
            peer = self._client.look_up(pull.address, pull.incarnation)
        if isinstance(peer, PeerInfo) and (refusal := self._refusal(pull, peer)) is not None:
            return Unusable(refusal)
        return peer

    def _update(self, pull: Pull) -> Unusable | None:
        """Store the peer's last answer to a ticket. Return why its KV cannot be read; None if it can."""
        if pull.settled:
            return Unusable(
                pull.bidding.exclusion_reason(pull.peer) or "the claim on its lease has ended", pull.gone
            )
        if pull.is_whole or pull.claim is None:
            return None
        answer = self._claims.answer(pull.claim)
        if isinstance(answer, Unusable):
            return answer
        reason = pull.take(answer) if isinstance(answer, Redeemed) else None
        return None if reason is None else Unusable(reason)

    def _process_turn_answers(self, request: Request, local_tokens: int) -> Bid | None:
        """Create a `Pull` if a peer keeps an earlier turn of the conversation.

        Return a placeholder bid for all tokens while answers are missing; else None: the caller makes the
        bid.
        """
        # The engine computes the last token itself, to sample from it.
        name, most = request.request_id, request.num_tokens - 1 - local_tokens
        if name not in self._turns or most <= 0:
            return None
        found = self._turns.found(request)
        if isinstance(found, Pending):
            return _shorter(_LOOKING, most)
        if found is not None:
            kept = found.kept
            self._pulls[name] = Pull(
                request=request,
                address=found.address,
                engine_id=kept.engine_id,
                ticket=kept.ticket,
                tokens=found.tokens,
                bidding=self._asking[name],
                until=0.0,
                grant=kept.grant,
                ready=found.tokens,
                incarnation=kept.incarnation,
            )
            self._client.hold(found.address, kept.ticket)
        return None

    def _bid(self, pull: Pull, request: Request, local_tokens: int) -> Bid | None:
        if not pull.settled and pull.claim is None and pull.grant is None:
            self._redeem(pull, request)
        tokens = pull.tokens - local_tokens
        if pull.settled or tokens <= 0:
            return None
        peer = self._ready_peer(pull)
        if isinstance(peer, Unusable):
            pull.gone = peer.gone
            self._exclude_peer(request.request_id, peer.reason)
            return None
        looking = isinstance(peer, Pending)
        growing = pull.foreseen if looking else not pull.is_whole
        return Bid(pull.peer, (PlaceTokens(PEER, tokens),), looking, promised=looking, growing=growing)

    def _refusal(self, pull: Pull, peer: PeerInfo) -> str | None:
        """Return why KV cannot be read from a peer; None if it can."""
        if (reason := pull.mismatch(peer)) is not None:
            return reason
        # Nobody can cancel a read in flight. A peer that is often late must not pin ever more of the pool.
        late = self._loads.late_blocks(pull.peer)
        if late and not may_hold(pull.peer, 1, {pull.peer: late}, self._most_held):
            return (
                f"reads past their deadline still hold {late} blocks, and those of a peer may hold half of "
                f"{self._most_held} (late_blocks)"
            )
        return None

    def _end_claim(self, pull: Pull) -> None:
        pull.settled = True
        if pull.bid is not None and pull.bid.looking:
            self._refusals.say(
                pull.request.request_id, pull.peer, "it had not answered when the request went on without it"
            )
        if pull.claim is not None:
            if pull.foreseen:  # the answer may have come while another source loaded the KV
                pull.note_cached_tokens(self._claims.answer(pull.claim))
            self._claims.end(pull.claim)
        elif pull.grant is not None:
            self._client.release(pull.address, pull.ticket)  # a kept turn has a grant, but no claim

    def _on_failed(self, pull: Pull, report: Report) -> None:
        """Exclude the peer of a load that has failed."""
        if report.peer_lost or report.late:
            # The peer may be gone or restarted: its next request begins with a new handshake.
            self._client.forget(pull.address)
        self._exclude_peer(pull.request.request_id, report.failure or "")

    def _held(self) -> dict[str, int]:
        return {source: blocks for source, blocks in self._loads.held.items() if source != TIERS}

    def _exclude_peer(self, request_id: str, reason: str) -> None:
        pull = self._pulls[request_id]
        if pull.bidding.exclude(pull.peer, reason):
            self._refusals.say(request_id, pull.peer, reason)
        pull.bid = None
        self.settled(request_id)
