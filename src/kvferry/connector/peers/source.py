"""The source that loads KV from other engines, and the peers that the workers are connected to for it.

The source has a `Pull` (`connector.peers.claims`) for each request that a peer may serve. A peer is excluded
if it refuses the ticket, cannot be reached (`gone`) or has not answered in time. Until then its bid is
*promised*, and the request waits for it (`choosing`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from kvferry.common.errors import Incompatible, NotYetNamed, ProtocolError, Unnameable
from kvferry.common.units import counted
from kvferry.connector.blocks import TransferBook, may_hold
from kvferry.connector.content import Adapters, content_of
from kvferry.connector.engine import Request
from kvferry.connector.events import MissReason, Refusals, SourceMiss
from kvferry.connector.load import Bid, Load, PlaceTokens
from kvferry.connector.messages import Report, StepOrders
from kvferry.connector.peers.claims import Claims, PeerFeed, Pull, peer_name
from kvferry.connector.peers.offer import read_offer
from kvferry.connector.peers.turns import TurnFinder
from kvferry.connector.source import Answer, RunningLoad, common_alignment
from kvferry.geometry import GroupKind, RankGeometry
from kvferry.planning.select import block_alignments
from kvferry.planning.template import absent_layer_names, window_mismatches
from kvferry.tiers.names import PEER, TIERS
from kvferry.transport.control_client import ControlClient
from kvferry.transport.handshake import Address, PeerInfo, Pending, Unusable
from kvferry.transport.messages import RankCard
from kvferry.transport.redeem import Redeemed

logger = logging.getLogger(__name__)

UNUSED_SECONDS = 600.0
"""Seconds without a read after which workers disconnect a peer, which may be gone. Reconnecting is cheap."""

_LOOKING = Bid("peers that keep earlier turns", (), looking=True)
"""Placeholder for a bid while peers have not answered yet whether they keep a matching turn."""


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
            timeout_seconds: maximum wait for the digest of a request's LoRA adapter, which is sent with the
                ticket. Then the peer is excluded.
            most_held: maximum number of blocks that loads from all peers together may pin, including loads
                past their deadline.
            clock: returns monotonic seconds.
        """
        self._client, self._loads, self._refusals = client, loads, refusals
        self._timeout, self._most_held = timeout_seconds, most_held
        self._adapters, self._clock = adapters, clock
        self._ranks, self._labels = ranks, ranks[0].labels
        # The engine computes the last token of a prompt even if all of it is loaded. Attention writes the
        # same KV again, but recurrent state would have seen the token twice.
        self._computed_again = any(one.kind is GroupKind.STATE for rank in ranks for one in rank.groups)
        self._turns, self._asking = turns, dict[str, dict[str, str]]()
        self._pulls: dict[str, Pull] = {}
        self._claims = Claims(client, idle, clock)
        self._meets, self._met = tuple(meets), dict[Address, int]()
        self._stopped = ""
        self._new: dict[str, tuple[RankCard, ...]] = {}  # peers to connect to, by name
        self._used: dict[str, float] = {}  # time of each peer's last use, the one unused for longest first
        self._alignment_tokens = common_alignment((one.kind, one.block_tokens) for one in ranks[0].groups)
        self._alignments: dict[str, tuple[tuple[int, ...], int]] = {}

    def __len__(self) -> int:
        """Return the number of unfinished requests for which a peer may hold KV."""
        return len(self._pulls)

    def arrived(self, request: Request, excluded: dict[str, str]) -> bool:
        """Redeem the request's ticket; without one, ask all peers that keep turns of conversations."""
        name = request.request_id
        try:
            offer = read_offer(request.kv_transfer_params)
        except ProtocolError as error:
            self._refusals.say(name, "its offer", str(error))
            return False
        if offer is None:
            if self._stopped or not self._turns.ask(request):
                return False
            self._asking[name] = excluded
            return True
        if request.was_rejected:
            return False  # its prompt is unknown here, so the ticket cannot be redeemed; the lease expires
        tokens = offer.remote_num_tokens or request.num_prompt_tokens - 1
        if tokens < 1:
            return False
        address = offer.remote_host, offer.remote_port
        pull = self._pulls[name] = Pull(
            request=request,
            peer=peer_name(offer.remote_engine_id, address, None),
            address=address,
            engine_id=offer.remote_engine_id,
            ticket=bytes.fromhex(offer.remote_request_id),
            tokens=tokens,
            excluded=excluded,
            began=self._clock(),
            cached_tokens=offer.remote_prefill_cached_tokens,
            foreseen=offer.remote_num_tokens is None,
        )
        self._redeem(pull)
        if self._stopped:
            self._exclude(pull, self._stopped)  # also releases the lease that was just claimed
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
        name = request.request_id
        bid = self._hear_of_turns(request, local_tokens) if name in self._asking else None
        if bid is None and (pull := self._pulls.get(name)) is not None:
            bid = pull.bid = self._bid(pull, local_tokens)
        end = local_tokens if bid is None else local_tokens + bid.tokens
        return Answer(
            bids=() if bid is None else (bid,),
            why_none=partial(self._why_none, name, local_tokens),
            head=lambda alignment: _shorter(bid, end // alignment * alignment - local_tokens),
            tail=lambda first: _shorter(bid, end - first),
        )

    def _why_none(self, request_id: str, local_tokens: int) -> SourceMiss:
        pull = self._pulls.get(request_id)
        if pull is None:
            return SourceMiss(PEER, MissReason.NOT_STORED, detail="no peer keeps an earlier turn of it")
        if (why := pull.excluded.get(pull.peer)) is not None:
            return SourceMiss(PEER, MissReason.GONE if pull.gone else MissReason.REFUSED, detail=why)
        return SourceMiss(
            PEER, MissReason.LOCAL, detail=f"{counted(pull.tokens, 'token')} offered, {local_tokens} here"
        )

    def has_room(self, bid: Bid, blocks: int) -> bool:
        held = dict(self._loads.held)
        held.pop(TIERS, None)
        return may_hold(bid.source, blocks, held, self._most_held)

    def begin(self, load: Load, request: Request) -> PeerFeed:
        """Have the workers connect to the peer if they are not connected, and read from it part by part."""
        pull = self._pulls[load.request_id]
        if pull.info is not None:
            self._use(pull.peer, pull.info)
        _, alignment_tokens = self._alignments_with(pull)
        return PeerFeed(
            load,
            pull,
            self._claims,
            alignment_tokens=alignment_tokens,
            labels=self._labels,
            on_failed=self._on_failed,
        )

    def alignments(self, request_id: str) -> tuple[int, ...]:
        return self._alignments_with(self._pulls[request_id])[0]

    def settled(self, request_id: str) -> None:
        """End a request's claim on a peer's lease.

        The request's answer then reports as cached what the caches of the peer had, if that is known.
        """
        if self._asking.pop(request_id, None) is not None:
            self._turns.drop(request_id)
        if (pull := self._pulls.get(request_id)) is None:
            return
        if not pull.settled:
            if pull.bid is not None and pull.bid.looking:
                self._refusals.say(
                    request_id, pull.peer, "it had not answered when the request went on without it"
                )
            self._claims.end(pull)
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
        self._asking.clear()
        for pull in self._pulls.values():
            if not pull.settled:
                self._exclude(pull, "the cache was reset")

    def reconnect(self) -> None:
        """Have the workers connect to each peer again at its next load, because the workers are new."""
        self._new.clear()
        self._used.clear()

    def give_up_oldest_claim(self, why: str) -> None:
        """Exclude the peer of the request that has waited longest, if any request waits."""
        # The claim of a load under way ends by itself.
        waiting = (pull for pull in self._pulls.values() if not (pull.settled or pull.loading))
        if (oldest := next(waiting, None)) is not None:
            self._exclude(oldest, why)

    def drain(self, why: str) -> None:
        """Accept no offers of peers from now on, for the reason `why`. Loads under way go on."""
        self._stopped = why

    def stop_reading(self, why: str) -> None:
        """Stop reading from peers for good, for the reason `why`, and end all claims on leases."""
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
        return bool(self._new) or len(self._claims) > 0

    def hand_over(self, orders: StepOrders) -> None:
        """Tell the workers which peers to connect to and which to disconnect. Mutates `orders`.

        From now on this step's questions to peers may wait again.
        """
        self._claims.waited_seconds = 0.0
        for address, peer in self._new_peers():
            facts = peer.facts
            self._use(peer_name(facts.engine_id, address, facts.incarnation), peer)
            self._met[address] = facts.incarnation
        orders.connects, self._new = self._new, {}
        oldest = self._clock() - UNUSED_SECONDS
        if self._used and next(iter(self._used.values())) < oldest:
            reading = {pull.peer for pull in self._pulls.values() if pull.loading}
            unused = [name for name, at in self._used.items() if at < oldest and name not in reading]
            for name in unused:
                del self._used[name]
                self._alignments.pop(name, None)
            orders.disconnects = unused

    def _redeem(self, pull: Pull) -> None:
        """Send a request's ticket to its peer, or exclude the peer if the offer does not fit the prompt.

        Do nothing while the digest of the request's LoRA adapter is computed.
        """
        prompt = pull.request.num_prompt_tokens
        # The offer comes from a client, who may have sent it with another prompt.
        if pull.tokens > prompt - self._computed_again:
            last = ", whose last token is computed here: state must not have seen it" * self._computed_again
            self._exclude(pull, f"{counted(pull.tokens, 'token')} offered for a prompt of {prompt}{last}")
            return
        try:
            content = content_of(pull.request, pull.tokens, self._adapters)
        except NotYetNamed as error:
            if self._clock() >= pull.began + self._timeout:
                self._exclude(pull, f"{error}, after {self._timeout:g} s")
            return
        except Unnameable as error:
            self._exclude(pull, f"the content of this prompt has no certain name: {error}")
            return
        # The first message to a new peer opens the handshake, and the ticket travels right behind it.
        if not isinstance(self._client.look_up(pull.address), Unusable):
            self._claims.begin(pull, content)

    def _hear_of_turns(self, request: Request, local_tokens: int) -> Bid | None:
        """Create a `Pull` if a peer keeps an earlier turn of the conversation.

        Return a placeholder bid for all tokens while answers are missing, else None.
        """
        # The engine computes the last token itself, to sample from it.
        name, most = request.request_id, request.num_tokens - 1 - local_tokens
        if most <= 0:
            return None
        found = self._turns.found(request)
        if isinstance(found, Pending):
            return _shorter(_LOOKING, most)
        excluded = self._asking.pop(name)
        if found is not None:
            tokens, address, kept = found
            self._pulls[name] = Pull(
                request=request,
                peer=peer_name(kept.engine_id, address, kept.incarnation),
                address=address,
                engine_id=kept.engine_id,
                ticket=kept.ticket,
                tokens=tokens,
                excluded=excluded,
                began=self._clock(),
                granted=Redeemed(0, kept.incarnation, kept.grant, tokens),
            )
            self._client.hold(address, kept.ticket)
        return None

    def _bid(self, pull: Pull, local_tokens: int) -> Bid | None:
        if not pull.settled and pull.granted is None and pull.content is None:
            self._redeem(pull)
        tokens = pull.tokens - local_tokens
        if pull.settled or tokens <= 0:
            return None
        looking = self._ask_peer(pull)
        if isinstance(looking, Unusable):
            pull.gone = looking.gone
            self._exclude(pull, looking.reason)
            return None
        growing = pull.foreseen if looking or pull.granted is None else pull.granted.tokens < pull.tokens
        return Bid(pull.peer, (PlaceTokens(PEER, tokens),), looking, promised=looking, growing=growing)

    def _ask_peer(self, pull: Pull) -> Unusable | bool:
        """Take in the peer's answers to the handshake and to the ticket. Mutates `pull`.

        Return True if an answer is missing, False if the peer has granted a lease that can be read now, and
        Unusable with the reason if it never will.
        """
        granted = pull.granted
        peer = self._client.look_up(pull.address, None if granted is None else granted.incarnation)
        if isinstance(peer, PeerInfo):
            if (unusable := self._claims.update(pull)) is not None:
                return unusable
            # The answer may name another run of the peer than the handshake that was looked up before.
            if granted is None and pull.granted is not None:
                peer = self._client.look_up(pull.address, pull.granted.incarnation)
        pull.info = peer if isinstance(peer, PeerInfo) else None
        if isinstance(peer, Unusable):
            return peer
        if pull.info is None or pull.granted is None:
            return True
        why = self._refusal(pull, pull.info, pull.granted)
        return False if why is None else Unusable(why)

    def _refusal(self, pull: Pull, peer: PeerInfo, granted: Redeemed) -> str | None:
        """Return why the KV that a peer has granted cannot be read; None if it can."""
        if peer.facts.engine_id != pull.engine_id:
            return f"engine {peer.facts.engine_id} answers at the address of {pull.engine_id}"
        if peer.facts.incarnation != granted.incarnation:
            return "the engine has been restarted since it granted the lease"
        tables, groups = len(granted.grant.tables), len(peer.ranks[0].geometry.groups)
        if tables != groups:
            return f"block tables for {tables} groups, the peer has {groups}"
        # Nobody can cancel a read in flight. A peer that is often late must not pin ever more of the pool.
        late = self._loads.late_blocks(pull.peer)
        if late and not may_hold(pull.peer, 1, {pull.peer: late}, self._most_held):
            return (
                f"reads past their deadline still hold {late} blocks, and those of a peer may hold half of "
                f"{self._most_held} (late_blocks)"
            )
        return None

    def _on_failed(self, pull: Pull, report: Report) -> None:
        """Exclude the peer of a load that has failed."""
        if report.peer_lost or report.late:
            # The peer may be gone or restarted: its next request begins with a new handshake.
            self._client.forget(pull.address)
        self._exclude(pull, report.failure or "")

    def _exclude(self, pull: Pull, reason: str) -> None:
        if pull.peer not in pull.excluded:
            pull.excluded[pull.peer] = reason
            self._refusals.say(pull.request.request_id, pull.peer, reason)
        pull.bid = None
        self.settled(pull.request.request_id)

    def _new_peers(self) -> Iterator[tuple[Address, PeerInfo]]:
        """Yield the configured peers whose present run the workers have not met, each with its address."""
        for address in self._meets:
            peer = self._client.known(address)
            if peer is not None and peer.facts.incarnation != self._met.get(address):
                yield address, peer

    def _use(self, name: str, peer: PeerInfo) -> None:
        """Record that a peer is used, and have the workers connect to it if they are not connected."""
        if name not in self._used:
            self._new[name] = peer.ranks
        # The peer moves to the end of the dictionary, which is in the order of last use.
        self._used.pop(name, None)
        self._used[name] = self._clock()

    def _alignments_with(self, pull: Pull) -> tuple[tuple[int, ...], int]:
        """Return how the blocks of a peer meet those of this engine, as far as the handshake tells.

        Returns:
            (alignment in tokens of loaded content for each KV cache group; alignment in tokens of the
            positions at which two parts of a load may meet, 0 if the load has only one part).
        """
        if pull.info is None:
            return (1,) * len(self._labels), self._alignment_tokens
        if pull.peer not in self._alignments:
            theirs = [card.geometry for card in pull.info.ranks]
            alignments, in_parts = block_alignments(theirs, self._ranks)
            self._alignments[pull.peer] = alignments, self._alignment_tokens if in_parts else 0
        return self._alignments[pull.peer]


def _shorter(bid: Bid | None, tokens: int) -> Bid | None:
    return replace(bid, parts=(PlaceTokens(PEER, tokens),)) if bid is not None and tokens > 0 else None


def check_readable(theirs: Sequence[RankCard], ours: Sequence[RankCard]) -> None:
    """Check that each rank of this engine can read all layers of its KV cache from the peer's ranks.

    Raises:
        Incompatible: a rank cannot read a layer, or the peer keeps fewer tokens of a layer than a rank needs
            (a shorter attention window). The message names every difference.
    """
    peer, here = ([card.geometry for card in cards] for cards in (theirs, ours))
    absent = absent_layer_names(peer, here)
    if found := [text for rank in here for text in window_mismatches(peer, rank)]:
        raise Incompatible(list(dict.fromkeys(found)))
    # Without the KV of draft layers answers stay right: only fewer drafts are accepted.
    if absent:
        logger.warning(
            "the peer does not keep %s of our draft model, %s for one: prompts from there are "
            "loaded without them, and fewer drafts are accepted; run both with the same draft model if that "
            "matters", counted(len(absent), "layer"), absent[0],
        )  # fmt: skip
