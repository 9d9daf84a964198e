"""The scheduler's part of a decode engine with many peers, without the engine.

The peers are one control channel, which listens on all addresses of this machine. Linux answers at every
address of 127.0.0.0/8, so each peer has its own.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from itertools import count

import numpy as np

from benchmarks.no_blocks import NoBlocks
from benchmarks.offload.sources import model
from benchmarks.scale.producer import BLOCK_TOKENS
from kvferry.common.errors import TransferError
from kvferry.connector.bids import Bid
from kvferry.connector.blocks import TransferBook
from kvferry.connector.config import ConnectorConfig
from kvferry.connector.content import Adapters, TurnNames, content_of
from kvferry.connector.engine import PlainRequest
from kvferry.connector.events import EventStream
from kvferry.connector.messages import Load, StepOrders
from kvferry.connector.peers.source import PeerSource
from kvferry.connector.peers.turns import TurnFinder
from kvferry.connector.source import RunningLoad
from kvferry.geometry import GroupKind
from kvferry.tools.measuring.simulated import span_of
from kvferry.tools.models.layout import EngineShape, lay_out
from kvferry.transport.control_client import ControlClient
from kvferry.transport.control_server import ControlServer
from kvferry.transport.handshake import Address, Unusable
from kvferry.transport.lease import LeaseWord
from kvferry.transport.messages import Facts, PeerInfo, RankCard
from kvferry.transport.offer import Offer, write_offer
from kvferry.transport.read_plan import Report
from kvferry.transport.redeem import Grant, new_ticket
from kvferry.transport.security import random_keys

_TOKENS, _CLAIMS, _STEPS = 1024, 20, 200
_INCARNATION = 1
_PATIENCE_SECONDS = 60.0
_POLL_SECONDS = 0.001
_HOSTS_PER_NET = 250
_BLOCKS = 1 << 20


class SchedulerPeers:
    """The control client and the source of one decode engine, and the control channel of all its peers."""

    def __init__(self) -> None:
        """Start both ends of the control channel."""
        of = model("peers", (GroupKind.FULL,))
        ranks = lay_out(of, EngineShape(1, (1,), BLOCK_TOKENS, "LBNHC", 2))
        card = RankCard(ranks[0], b"", 4096, 64, _INCARNATION)
        theirs, ours = (Facts(name, _INCARNATION, "kvferry bench", {}) for name in ("peer", "engine"))
        keys, adapters = random_keys(), Adapters()
        with ExitStack() as stack:
            self._server = stack.enter_context(
                closing(ControlServer("0.0.0.0", 0, PeerInfo(theirs, (card,)), keys))  # noqa: S104 - see above
            )
            self._client = stack.enter_context(closing(ControlClient(ours, lambda _: None, keys)))
            self._stack = stack.pop_all()
        config = ConnectorConfig()
        self._source = PeerSource(
            self._client,
            ranks=ranks,
            loads=TransferBook[RunningLoad](1, NoBlocks()),
            events=EventStream(),
            timeout_seconds=config.load_timeout_seconds,
            most_held=int(config.late_blocks * _BLOCKS),
            turns=TurnFinder(self._client, dict, TurnNames(adapters)),
            adapters=adapters,
            idle=lambda: False,
        )
        self._prompt, self._numbers = list(range(_TOKENS + 1)), count()
        self._content = content_of(self._request("", None), _TOKENS, adapters)
        self._table = list(range(1, 1 + _TOKENS // BLOCK_TOKENS))
        self._known = 0

    def meet(self, peers: int) -> float:
        """Shake hands with further peers, many at a time. Return the seconds.

        Raises:
            TransferError: a peer does not answer.
        """
        began = time.perf_counter()
        missing = [self._address(number) for number in range(self._known, self._known + peers)]
        while missing := [one for one in missing if not self._is_known(one)]:
            self._check(began)
            time.sleep(_POLL_SECONDS)
        self._known += peers
        return time.perf_counter() - began

    def connect_workers(self) -> None:
        """Claim a request's KV at every peer, so that the scheduler has its workers connect to the peer."""
        for number in range(self._known):
            self._claim(number)

    def time_claim(self) -> float:
        """Return the median seconds from a request's arrival to the order that reads its KV."""
        return float(np.median([self._claim(number * 37 % self._known) for number in range(_CLAIMS)]))

    def time_step(self) -> float:
        """Return the seconds of a step's part in which no request needs a peer."""
        began = time.perf_counter()
        for _ in range(_STEPS):
            self._source.hand_over(StepOrders())
        return (time.perf_counter() - began) / _STEPS

    def close(self) -> None:
        """Close both ends of the control channel."""
        self._stack.close()

    def _claim(self, peer: int) -> float:
        """Have a peer grant a request's blocks, and order to read them. Return the seconds.

        Raises:
            TransferError: the peer does not answer, or nothing is ordered.
        """
        name, ticket = f"request-{next(self._numbers)}", new_ticket()
        host, port = self._address(peer)
        grant = Grant.of(LeaseWord(0, 0, 1), _TOKENS, [self._table])
        self._server.tickets.publish(ticket, name, _TOKENS, self._content, grant)
        request = self._request(name, write_offer(Offer("peer", host, port, ticket.hex(), _TOKENS, 0)))
        began = time.perf_counter()
        self._source.arrived(request, {})
        while (bid := self._granted(request)) is None:
            self._check(began)
            time.sleep(0)
        load = self._load(name, bid)
        feed = self._source.begin(load, request)
        self._source.hand_over(StepOrders())
        parts = feed.next_parts()
        seconds = time.perf_counter() - began
        feed.ended(Report(None), wanted=True)
        self._source.settled(name)
        self._source.finished(name)
        self._server.events.clear()
        if not parts:
            raise TransferError("a peer in this process has granted blocks, but no read was ordered")
        return seconds

    def _granted(self, request: PlainRequest) -> Bid | None:
        """Return the peer's bid; None while the peer has not answered.

        Raises:
            TransferError: the peer refuses.
        """
        answer = self._source.ask(request, 0)
        if not answer.bids:
            raise TransferError(f"no bid: {answer.why_none().detail}")
        return None if answer.bids[0].looking else answer.bids[0]

    def _load(self, name: str, bid: Bid) -> Load:
        return Load(
            key=name,
            request_id=name,
            attempt=name,
            loads=1,
            bid=bid,
            span=span_of(_TOKENS),
            tables=(np.array(self._table, np.int64),),
            timeout_seconds=_PATIENCE_SECONDS,
            began=0.0,
        )

    def _request(self, name: str, params: object) -> PlainRequest:
        return PlainRequest(request_id=name, prompt_token_ids=self._prompt, kv_transfer_params=params)

    def _address(self, number: int) -> Address:
        net, host = divmod(number, _HOSTS_PER_NET)
        return f"127.0.{net}.{host + 1}", self._server.port

    def _is_known(self, address: Address) -> bool:
        status = self._client.look_up(address)
        if isinstance(status, Unusable):
            raise TransferError(f"a peer in this process cannot be used: {status.reason}")
        return isinstance(status, PeerInfo)

    def _check(self, began: float) -> None:
        if time.perf_counter() - began > _PATIENCE_SECONDS:
            raise TransferError(f"a peer in this process does not answer within {_PATIENCE_SECONDS:g} s")
