"""The source that loads KV from other engines, and the peers that the workers are connected to for it.

There is one `_Pull` for each request that came with a ticket, or for which a peer keeps an earlier turn of
its conversation (a *turn* is the KV of a finished request):

    TICKET ─the prompt has a name─▶ REDEEMING ─▶ GRANTED ─▶ SETTLED
       └──────────┴─peer excluded──────────────────┴───────────▲      a turn that was found begins as GRANTED

The ticket is redeemed as the request arrives. If its grant came with it (`transport.seal`), it is granted at
once. From then on heartbeats keep the lease alive, however long the request queues. The claim ends once: when
the request's loads have succeeded, when the engine computes the prompt instead, or when this peer is
excluded: because it refuses the ticket, cannot be reached (`gone`) or has not answered in time. Until then
its bid is *promised*, and the request waits for it (`choosing`).

A peer may grant blocks before it has computed the whole prompt. Then a load reads what is computed, and goes
on with each further grant (`_PeerFeed`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from functools import partial

from msgspec import structs

from kvferry.common.errors import NotYetNamed, ProtocolError, Unnameable
from kvferry.common.units import counted
from kvferry.connector.bids import Bid, PlaceTokens
from kvferry.connector.blocks import TransferBook, may_hold
from kvferry.connector.content import Adapters, content_of
from kvferry.connector.engine import Request
from kvferry.connector.events import EventStream, GroupBytes, MissReason, SourceMiss
from kvferry.connector.messages import Load, LoadPart, StepOrders
from kvferry.connector.peers.turns import TurnFinder, TurnSearch
from kvferry.connector.source import Answer, RunningLoad, common_alignment
from kvferry.geometry import GroupKind, RankGeometry
from kvferry.planning.select import block_alignments, next_part
from kvferry.tiers.names import PEER, TIERS
from kvferry.transport.control_client import ControlClient
from kvferry.transport.handshake import Address, Pending, Unusable
from kvferry.transport.messages import PeerInfo, RankCard
from kvferry.transport.offer import read_offer
from kvferry.transport.read_plan import ReadOrder, Report
from kvferry.transport.redeem import Grant, Redeemed
from kvferry.transport.redemptions import Redemption

STEP_WAIT_SECONDS = 0.0005
"""Maximum seconds after its question that a step waits for a producer's answer, and that a step waits in all.
A nearby peer answers within this time. No later step waits, so a slow producer delays no running request."""

IDLE_STEP_WAIT_SECONDS = 0.002
"""Maximum seconds that a step waits if the engine computes nothing. This delays no running request."""

UNUSED_SECONDS = 600.0
"""Seconds without a read after which workers disconnect a peer, which may be gone. Reconnecting is cheap."""


def peer_name(engine_id: str, address: Address, incarnation: int | None) -> str:
    """Return the name of a peer: engine id and address, with the run of the engine if known."""
    host, port = address
    run = "" if incarnation is None else f"#{incarnation:x}"
    return f"{engine_id}@{host}:{port}{run}"


@dataclass(slots=True, kw_only=True)
class _Pull:
    """The KV at one peer that one request may read, and the state of the exchange with this peer."""

    request: Request
    peer: str  # name of the peer (`peer_name`), with the run of its engine once that is known
    address: Address
    engine_id: str
    ticket: bytes
    tokens: int  # number of offered tokens, from the start of the prompt
    excluded: dict[str, str]  # `RequestState.excluded` of the request
    began: float  # monotonic seconds at which the request arrived, or at which its ticket was sent
    # Number of prompt tokens that the peer's caches had when it computed the prompt; None until that is
    # known, and for a turn.
    cached_tokens: int | None = None
    # True if the peer may still be computing the prompt, or may not know the ticket yet.
    foreseen: bool = False
    sealed: str = ""  # the sealed grant of the ticket, from a client; empty without one
    redemption: Redemption | None = None  # the claim on the ticket's lease; None before, and for a turn
    granted: Grant | None = None  # the last one; None until there is one; for a turn, from the start
    # Description of the peer when it was last asked; None if the handshake was not complete.
    info: PeerInfo | None = None
    settled: bool = False  # True when the request will read no more from this peer
    # True if the peer is excluded because it cannot be reached or has not answered in time.
    gone: bool = False
    # The load under way from this peer, the newest if an earlier one is still awaited; else None.
    loading: _PeerFeed | None = None
    bid: Bid | None = None  # last bid for the request; None if there was none


@dataclass(slots=True)
class _Run:
    """A run of a peer's engine from which requests of this engine may read."""

    alignments: tuple[int, ...]  # alignment in tokens of loaded content, for each KV cache group
    # Alignment in tokens of the positions at which two parts of a load may meet; 0 if a load has only one
    # part.
    part_tokens: int
    used: float = 0.0  # monotonic seconds of the last request that asked for its KV
    connected: bool = False  # True if the workers are connected to it, or will be with the next step


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
        events: EventStream,
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
            timeout_seconds: maximum wait for the digest of a LoRA adapter. Then the peer is excluded.
            most_held: maximum number of blocks that loads from all peers may pin, also past their deadline.
        """
        self._client, self._loads, self._events = client, loads, events
        self._timeout, self._most_held = timeout_seconds, most_held
        self._adapters, self._clock = adapters, clock
        self._ranks, self.labels = ranks, ranks[0].labels
        # The engine computes the last token of a prompt even if all of it is loaded. Attention writes the
        # same KV again, but recurrent state would have seen the token twice.
        self._computed_again = any(one.kind is GroupKind.STATE for rank in ranks for one in rank.groups)
        self._turns, self._asking = turns, dict[str, tuple[dict[str, str], TurnSearch]]()
        self._pulls: dict[str, _Pull] = {}
        # Seconds that this step has waited for answers in all; empty before the first.
        self._idle, self._waits = idle, list[float]()
        self._meets, self._met = tuple(meets), dict[Address, int]()
        self._stopped = ""
        self._new: dict[str, tuple[RankCard, ...]] = {}  # peers to connect to, by name
        self._runs: dict[str, _Run] = {}  # by name of the peer, the one unused for longest first
        self._alignment_tokens = common_alignment((one.kind, one.block_tokens) for one in ranks[0].groups)

    def __len__(self) -> int:
        """Return the number of unfinished requests for which a peer may hold KV."""
        return len(self._pulls)

    def arrived(self, request: Request, excluded: dict[str, str]) -> bool:
        """Redeem the request's ticket; without one, ask the peers that keep turns of conversations."""
        name = request.request_id
        try:
            offer = read_offer(request.kv_transfer_params)
        except ProtocolError as error:
            self._events.refuse(name, "its offer", str(error))
            return False
        if offer is None:
            if self._stopped or (search := self._turns.ask(request)) is None:
                return False
            self._asking[name] = excluded, search
            return True
        if request.was_rejected:
            return False  # its prompt is unknown here, so the ticket cannot be redeemed; the lease expires
        tokens = offer.remote_num_tokens or request.num_prompt_tokens - 1
        if tokens < 1:
            return False
        address, foreseen = (offer.remote_host, offer.remote_port), offer.remote_num_tokens is None
        pull = self._pulls[name] = _Pull(
            request=request,
            peer=peer_name(offer.remote_engine_id, address, None),
            address=address,
            engine_id=offer.remote_engine_id,
            ticket=bytes.fromhex(offer.remote_request_id),
            tokens=tokens,
            excluded=excluded,
            began=self._clock(),
            cached_tokens=offer.remote_prefill_cached_tokens,
            foreseen=foreseen,
            # A router may make this offer from an earlier one, whose grant is that of another ticket.
            sealed="" if foreseen else offer.remote_sealed_grant,
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

        Until the peer has answered, the bid is `looking`, and with a ticket also `promised`.
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

    def begin(self, load: Load, request: Request) -> _PeerFeed:
        """Have the workers connect to the peer if they are not connected, and read from it part by part."""
        pull = self._pulls[load.request_id]
        known = None if pull.info is None else self._connect(pull.peer, pull.info)
        alignment_tokens = self._alignment_tokens if known is None else known.part_tokens
        pull.loading = feed = _PeerFeed(self, load, pull, alignment_tokens)
        return feed

    def alignments(self, request_id: str) -> tuple[int, ...]:
        pull = self._pulls[request_id]
        # Until the handshake has ended, nothing is known of the peer's blocks.
        return (1,) * len(self.labels) if pull.info is None else self._run(pull.peer, pull.info).alignments

    def settled(self, request_id: str) -> None:
        """End a request's claim on a peer's lease. It then reports what the peer's caches had, if known."""
        self._drop_search(request_id)
        if (pull := self._pulls.get(request_id)) is None:
            return
        if not pull.settled:
            if pull.bid is not None and pull.bid.looking:
                self._events.refuse(
                    request_id, pull.peer, "it had not answered when the request went on without it"
                )
            pull.settled = True
            if pull.redemption is not None:
                if pull.foreseen:  # the answer may have come while another source loaded the KV
                    self._answer(pull, pull.redemption)
                self._client.end(pull.redemption)
            elif pull.granted is not None:  # a kept turn
                self._client.release(pull.address, pull.ticket)
        # The engine sets its own number at each admission, so this is repeated after each of them.
        if pull.cached_tokens is not None:
            pull.request.report_cached_tokens(pull.cached_tokens)

    def finished(self, request_id: str) -> None:
        self._drop_search(request_id)
        self._pulls.pop(request_id, None)

    def _drop_search(self, request_id: str) -> None:
        if (asking := self._asking.pop(request_id, None)) is not None:
            self._turns.drop(asking[1])

    def start_anew(self) -> None:
        """Exclude all peers that have offered KV, because it was computed before the cache was reset."""
        for name in list(self._asking):
            self._drop_search(name)
        for pull in self._pulls.values():
            if not pull.settled:
                self._exclude(pull, "the cache was reset")

    def reconnect(self) -> None:
        """Have the workers connect to each peer again at its next load, because the workers are new."""
        self._new.clear()
        for run in self._runs.values():
            run.connected = False

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
    def agenda(self) -> tuple[Sized, ...]:
        """Containers that are all empty if `hand_over` has no more to do than to disconnect unused peers."""
        return self._new, self._waits

    def hand_over(self, orders: StepOrders) -> None:
        """Tell the workers which peers to connect to and which to disconnect. Mutates `orders`.

        From now on this step's questions to peers may wait again.
        """
        self._waits.clear()
        for address, peer in self._new_peers():
            facts = peer.facts
            self._connect(peer_name(facts.engine_id, address, facts.incarnation), peer)
            self._met[address] = facts.incarnation
        orders.connects = dict(self._new)
        self._new.clear()
        oldest = self._clock() - UNUSED_SECONDS
        if self._runs and next(iter(self._runs.values())).used < oldest:
            reading = {pull.peer for pull in self._pulls.values() if pull.loading}
            unused = [name for name, run in self._runs.items() if run.used < oldest and name not in reading]
            orders.disconnects = [name for name in unused if self._runs.pop(name).connected]

    def _redeem(self, pull: _Pull) -> None:
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
            pull.redemption = self._client.redeem(
                pull.address, pull.ticket, pull.tokens, content, foreseen=pull.foreseen, sealed=pull.sealed
            )
            pull.began = self._clock()

    def _hear_of_turns(self, request: Request, local_tokens: int) -> Bid | None:
        """Create a `_Pull` if a peer keeps an earlier turn of the conversation.

        Return a placeholder bid for all tokens while answers are missing, else None.
        """
        # The engine computes the last token itself, to sample from it.
        name, most = request.request_id, request.num_tokens - 1 - local_tokens
        if most <= 0:
            return None
        excluded, search = self._asking[name]
        found = self._turns.found(request, search)
        if isinstance(found, Pending):
            return _shorter(_LOOKING, most)
        del self._asking[name]
        if found is not None:
            tokens, address, kept = found
            self._pulls[name] = _Pull(
                request=request,
                peer=peer_name(kept.engine_id, address, kept.grant.incarnation),
                address=address,
                engine_id=kept.engine_id,
                ticket=kept.ticket,
                tokens=tokens,
                excluded=excluded,
                began=self._clock(),
                granted=structs.replace(kept.grant, tokens=tokens),
            )
            self._client.hold(address, kept.ticket)
        return None

    def _bid(self, pull: _Pull, local_tokens: int) -> Bid | None:
        if not pull.settled and pull.granted is None and pull.redemption is None:
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

    def _ask_peer(self, pull: _Pull) -> Unusable | bool:
        """Take in the peer's answers to the handshake and to the ticket. Mutates `pull`.

        Return True if an answer is missing, False if the peer has granted a lease that can be read now, and
        Unusable with the reason if it never will.
        """
        granted = pull.granted
        peer = self._client.look_up(pull.address, None if granted is None else granted.incarnation)
        if isinstance(peer, PeerInfo):
            if (unusable := self.update(pull)) is not None:
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

    def _refusal(self, pull: _Pull, peer: PeerInfo, granted: Grant) -> str | None:
        """Return why the KV that a peer has granted cannot be read; None if it can."""
        if peer.facts.engine_id != pull.engine_id:
            return f"engine {peer.facts.engine_id} answers at the address of {pull.engine_id}"
        if peer.facts.incarnation != granted.incarnation:
            return "the engine has been restarted since it granted the lease"
        tables, groups = len(granted.tables), len(peer.ranks[0].geometry.groups)
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

    def update(self, pull: _Pull) -> Unusable | None:
        """Store the peer's last answer to a ticket. Return why its KV cannot be read; None if it can.

        Wait a moment if there is no answer yet (`STEP_WAIT_SECONDS`). Answers cover more and more tokens
        while the producer computes the prompt. Mutates `pull`.
        """
        if pull.settled:
            why = pull.excluded.get(pull.peer) or "the claim on its lease has ended"
            return Unusable(why, pull.gone)
        before = pull.granted
        if pull.redemption is None:
            return None
        if before is not None and (last := pull.redemption.complete) is not None and before is last.grant:
            return None
        answer = self._answer(pull, pull.redemption)
        if isinstance(answer, Redeemed):
            grant = answer.grant
            if before is None:
                pull.peer = peer_name(pull.engine_id, pull.address, grant.incarnation)
            # Further answers extend one lease. Blocks of another may hold other KV than parts already read.
            elif grant.word != before.word:
                return Unusable("the peer has replaced the lease while its blocks were read")
            if before is None or grant.tokens >= before.tokens:
                pull.granted = grant
        return answer if isinstance(answer, Unusable) else None

    def _answer(self, pull: _Pull, redemption: Redemption) -> Redeemed | Unusable | Pending:
        """Return the producer's last answer. Wait a moment if it has not arrived, but no step waits twice."""
        now, waited = self._clock(), sum(self._waits)
        most = IDLE_STEP_WAIT_SECONDS - waited
        if not self._idle():
            most = STEP_WAIT_SECONDS - max(waited, now - pull.began)
        answer = self._client.answer(redemption, max(0.0, most))
        self._waits[:] = [waited + self._clock() - now]
        if isinstance(answer, Redeemed) and answer.cached_tokens is not None:
            pull.cached_tokens = answer.cached_tokens
        return answer

    def on_failed(self, pull: _Pull, report: Report) -> None:
        """Exclude the peer of a load that has failed."""
        if report.peer_lost or report.late:
            # The peer may be gone or restarted: its next request begins with a new handshake.
            self._client.forget(pull.address)
        self._exclude(pull, report.failure or "")

    def _exclude(self, pull: _Pull, reason: str) -> None:
        if pull.peer not in pull.excluded:
            pull.excluded[pull.peer] = reason
            self._events.refuse(pull.request.request_id, pull.peer, reason)
        pull.bid = None
        self.settled(pull.request.request_id)

    def _new_peers(self) -> Iterator[tuple[Address, PeerInfo]]:
        """Yield the configured peers whose present run the workers have not met, each with its address."""
        for address in self._meets:
            peer = self._client.known(address)
            if peer is not None and peer.facts.incarnation != self._met.get(address):
                yield address, peer

    def _connect(self, name: str, peer: PeerInfo) -> _Run:
        """Return the record of a peer, to which the workers connect if they are not connected."""
        run = self._run(name, peer)
        if not run.connected:
            run.connected, self._new[name] = True, peer.ranks
        return run

    def _run(self, name: str, peer: PeerInfo) -> _Run:
        """Return the record of a peer, which is used now."""
        run = self._runs.pop(name, None)
        if run is None:
            alignments, in_parts = block_alignments([card.geometry for card in peer.ranks], self._ranks)
            run = _Run(alignments, self._alignment_tokens if in_parts else 0)
        # The dictionary is in the order of last use.
        self._runs[name], run.used = run, self._clock()
        return run


class _PeerFeed:
    """Orders the parts of one load from a peer, one for each stretch of KV that the peer has computed."""

    origin = PEER

    def __init__(self, source: PeerSource, load: Load, pull: _Pull, alignment_tokens: int) -> None:
        """Create the feed of a load that begins now. The peer has granted a lease."""
        self._source, self._load, self._pull = source, load, pull
        self._alignment_tokens = alignment_tokens
        self._done, self._parts, self._ready = load.span.begins, 0, 0
        self._dropped = False

    def next_parts(self) -> Sequence[LoadPart]:
        load, pull = self._load, self._pull
        unusable = (
            Unusable("no request waits for it any more") if self._dropped else self._source.update(pull)
        )
        if unusable is not None:
            return [LoadPart(load.key, None, failure=unusable.reason)]
        assert pull.granted is not None
        news, self._ready = pull.granted.tokens > self._ready, pull.granted.tokens
        span = next_part(
            load.span,
            self._done,
            self._ready,
            alignment_tokens=self._alignment_tokens,
            whole=self._ready >= pull.tokens,
        )
        if span is None:
            # The load's deadline begins anew with each part, so the workers are told of progress that cannot
            # be read yet.
            return [LoadPart(load.key, None)] if news else []
        self._done, self._parts = span.ends, self._parts + 1
        order = ReadOrder(
            key=f"{load.key}.{self._parts}",
            peer=pull.peer,
            span=span,
            src_tables=pull.granted.block_ids,
            dst_tables=load.tables,
            lease=pull.granted.word,
        )
        return [LoadPart(load.key, order, last=span.ends == load.span.ends)]

    def drop(self) -> None:
        # The workers cannot cancel reads in flight.
        self._dropped = True
        self._leave()

    def moved(self, report: Report) -> tuple[GroupBytes, ...]:
        figures, found = report.figures, []
        each = zip(self._source.labels, figures.strategies_by_group, figures.bytes_by_group, strict=False)
        for label, names, size in each:
            if size:
                found.append(GroupBytes(label, "+".join(names), size))
        return tuple(found)

    def miss(self, report: Report) -> MissReason:
        if report.corrupt:
            return MissReason.CHECKSUM
        return MissReason.DEADLINE if report.late else MissReason.FAILED

    def ended(self, report: Report, *, wanted: bool) -> None:
        self._leave()
        if wanted and report.failure is not None:
            self._source.on_failed(self._pull, report)

    def _leave(self) -> None:
        # After a failure the request may have begun another load, which goes on.
        if self._pull.loading is self:
            self._pull.loading = None


def _shorter(bid: Bid | None, tokens: int) -> Bid | None:
    return replace(bid, parts=(PlaceTokens(PEER, tokens),)) if bid is not None and tokens > 0 else None
