"""The scheduler half of an engine that takes prompts others have computed.

One `Pull` per request that came with an offer:

    OFFERED ─admitted with blocks─▶ LOADING ─all workers ready─▶ SETTLED
       │                               └─failed or late─▶ (struck out) OFFERED ─▶ …
       └─nothing to load, refused, struck out, aborted─▶ SETTLED

Settling releases the producer, once. Blocks being written are pinned in the engine's pool until every
worker says that nothing is in flight, whatever became of the request meanwhile.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvferry.cache.bids import Bid, Bidding
from kvferry.cache.pins import Pins
from kvferry.engines.vllm import compat
from kvferry.engines.vllm.config import ConnectorConfig
from kvferry.engines.vllm.meta import BlockIds, LoadOrder, Report, SchedulerMeta, WorkerMeta
from kvferry.engines.vllm.offer import not_of_peer, not_of_prompt, read_offer
from kvferry.engines.vllm.pull import Pull, PullState
from kvferry.engines.vllm.refusals import Refusals
from kvferry.engines.vllm.stats import TransferStats
from kvferry.engines.vllm.transfer_log import TransferLog
from kvferry.errors import ProtocolError
from kvferry.geometry import GroupKind
from kvferry.planning.select import Span
from kvferry.transport.control_client import ControlClient
from kvferry.transport.handshake import Address, Known, Looking, NotUsable

UNUSED_SECONDS = 600.0
"""When workers forget a peer that nothing is read from: it may be gone. Meeting it again is cheap."""


class Consumer:
    """Bids for offered prompts, orders loads, and sees them to their end.

    Attributes:
        stats: of the loads that have ended; whoever takes them puts empty ones in their place.
    """

    def __init__(
        self,
        kv_cache_config: Any,
        config: ConnectorConfig,
        kinds: tuple[GroupKind, ...],
        client: ControlClient,
        workers: int,
        log: TransferLog,
    ) -> None:
        self._groups = kv_cache_config.kv_cache_groups
        self._blocks = kv_cache_config.num_blocks
        self._kinds, self._config, self._client = kinds, config, client
        self._workers, self._log = workers, log
        self.stats = TransferStats()
        self._pulls: dict[str, Pull] = {}
        self._users: Counter[tuple[Address, str]] = Counter()
        self._of_key: dict[str, str] = {}
        self._pins: Pins[Any] = Pins(workers)
        self._pool: Any = None
        self._orders: list[LoadOrder] = []
        self._connects: dict[str, Known] = {}
        self._connected: dict[str, float] = {}  # peers that workers know, and when each was last used
        self._loads = 0
        self._refusals = Refusals()

    def bind_pool(self, pool: Any) -> None:
        """The engine's block pool, in which destinations are pinned."""
        self._pool = pool

    # -- admission ----------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Read the offer a request came with, and keep its lease alive from now on."""
        try:
            offer = read_offer(request.kv_transfer_params)
        except ProtocolError as error:
            self._refusals.say(request.request_id, "its offer", str(error))
            return
        if offer is None:
            return
        pull = Pull(offer, Bidding(self._config.attempts))
        self._pulls[request.request_id] = pull
        self._users[pull.lease] += 1
        self._client.hold(*pull.lease)
        if mismatch := not_of_prompt(offer, request):
            self._strike(request.request_id, pull, mismatch)

    def matched(self, request: Any, have: int) -> int | None:
        """Tokens that can be loaded beyond `have`; None while that is not known yet."""
        pull = self._pulls.get(request.request_id)
        if pull is None or pull.state is not PullState.OFFERED:
            return 0
        best = pull.bidding.best([Bid(pull.peer, pull.offer.remote_num_tokens - have)])
        if best is None:
            return 0
        answer = self._client.look_up(pull.address, pull.incarnation)
        if isinstance(answer, Looking):
            return None
        if refusal := self._refusal(pull, answer):
            self._strike(request.request_id, pull, refusal)
            return 0
        return best.tokens

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """The request has blocks; `external` tokens are to be loaded into them, or none."""
        pull = self._pulls.get(request.request_id)
        if pull is None or pull.state is not PullState.OFFERED:
            return
        if external == 0:
            self._settle(request.request_id)
            return
        total = pull.offer.remote_num_tokens
        span = Span(total - external, total, request.num_prompt_tokens)
        self._loads += 1
        pull.begin(f"{request.request_id}#{self._loads}", span, time.monotonic())
        self._of_key[pull.key] = request.request_id
        self._pin(pull, blocks.blocks, span)
        answer = self._client.look_up(pull.address, pull.incarnation)
        if isinstance(answer, Known):
            if pull.peer not in self._connected:
                self._connects[pull.peer] = answer
            self._connected[pull.peer] = time.monotonic()
        self._orders.append(
            LoadOrder(
                pull.key,
                request.request_id,
                pull.peer,
                span,
                tuple(pull.offer.remote_block_ids),
                self._tables(blocks.get_block_ids(), span),
                pull.offer.remote_lease.ticket(),
                self._config.load_timeout_seconds,
            )
        )

    def finished(self, request_id: str) -> None:
        """The request has ended, whichever way: nothing more is wanted for it."""
        pull = self._pulls.get(request_id)
        if pull is None:
            return
        if pull.state is PullState.LOADING:
            self._pins.late(pull.key)
        self._settle(request_id)
        del self._pulls[request_id]

    # -- once per step ------------------------------------------------------------------------------------

    def hand_over(self, meta: SchedulerMeta) -> None:
        """Give the workers what has been decided since the last step."""
        meta.connects = {name: known.ranks for name, known in self._connects.items()}
        self._connects.clear()
        now = time.monotonic()
        meta.disconnects = [name for name, used in self._connected.items() if now - used > UNUSED_SECONDS]
        for name in meta.disconnects:
            del self._connected[name]
        meta.orders, self._orders = self._orders, []

    def take_reports(self, meta: WorkerMeta) -> None:
        """Hear how loads ended, and give back the blocks of which nothing is in flight."""
        for key, report in meta.reports.items():
            self._report(key, report, meta.reported.get(key, 1))
        for key, workers in meta.released.items():
            if blocks := self._pins.landed(key, workers):
                self._pool.free_blocks(reversed(blocks))

    def _report(self, key: str, report: Report, workers: int) -> None:
        if report.late:
            self._pins.late(key)
        request_id = self._of_key.get(key)
        pull = self._pulls.get(request_id) if request_id else None
        if request_id is None or pull is None or pull.key != key:
            self._of_key.pop(key, None)
            return
        if pull.hear(report, workers) < self._workers:
            return
        del self._of_key[key]
        whole = pull.whole()
        assert pull.span is not None
        self.stats.note(whole, self._log.labels)
        self._log.write(request_id, pull.peer, pull.span, whole, time.monotonic() - pull.began)
        if pull.state is not PullState.LOADING:
            return
        if whole.failure is None:
            self._settle(request_id)
        else:
            pull.state = PullState.OFFERED
            self._client.forget(pull.address)
            self._strike(request_id, pull, whole.failure)

    # -- pieces -------------------------------------------------------------------------------------------

    def _refusal(self, pull: Pull, answer: Known | NotUsable) -> str | None:
        """Why a peer cannot be used."""
        if isinstance(answer, NotUsable):
            return answer.reason
        if reason := not_of_peer(pull.offer, answer):
            return reason
        held, most = self._pins.late_blocks(pull.peer), int(self._config.late_blocks * self._blocks)
        if held > most:
            return f"reads past their deadline still hold {held} blocks, at most {most} may be (late_blocks)"
        return None

    def _pin(self, pull: Pull, blocks: Sequence[Sequence[Any]], span: Span) -> None:
        """Take a reference to every block that the load may write."""
        held = [
            block
            for kind, group, of_group in zip(self._kinds, self._groups, blocks, strict=True)
            for block in of_group[
                0 if kind is GroupKind.STATE else span.have // group.kv_cache_spec.block_size :
            ]
            if not block.is_null
        ]
        self._pool.touch(held)
        self._pins.hold(pull.key, pull.peer, held)

    def _tables(self, block_ids: BlockIds, span: Span) -> BlockIds:
        """Our block tables; a state group's only the block that will hold the snapshot."""
        return tuple(
            [ids[compat.state_position(group.kv_cache_spec, span.total)]]
            if kind is GroupKind.STATE
            else list(ids)
            for kind, group, ids in zip(self._kinds, self._groups, block_ids, strict=True)
        )

    def _strike(self, request_id: str, pull: Pull, reason: str) -> None:
        if pull.bidding.strike(pull.peer, reason):
            self._refusals.say(request_id, pull.peer, reason)
        self._settle(request_id)

    def _settle(self, request_id: str) -> None:
        """Release the producer, once nobody here needs the offer: parallel samples of a prompt share one."""
        pull = self._pulls[request_id]
        if pull.state is PullState.SETTLED:
            return
        pull.state = PullState.SETTLED
        self._users[pull.lease] -= 1
        if not self._users[pull.lease]:
            del self._users[pull.lease]
            self._client.release(*pull.lease)
