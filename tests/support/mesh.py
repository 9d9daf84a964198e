"""Engines that offer KV to each other: vLLM's schedulers over kvferry's scheduler halves, without models.

The control channel passes messages without a network, and played workers end each load a step after its last
part was ordered. They keep lease words as workers do, so a load whose lease has ended fails.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from vllm import SamplingParams
from vllm.v1.request import Request

from kvferry.connector.config import ConnectorConfig
from kvferry.connector.events import Event, EventStream
from kvferry.connector.messages import Load, StepReports, WorkerInfo
from kvferry.connector.peers import peering
from kvferry.connector.scheduler import SchedulerHalf
from kvferry.engines.vllm.compat.requests import VLLMStep, request_wrapper
from kvferry.engines.vllm.messages import SchedulerMeta
from kvferry.engines.vllm.scheduler import engine_info
from kvferry.tools.models.layout import EngineShape, lay_out
from kvferry.transport.control_server import FairQueue, LeaseClaims
from kvferry.transport.handshake import Address, Unusable
from kvferry.transport.lease import LeaseWord
from kvferry.transport.messages import AskTurn, Facts, PeerInfo, RankCard
from kvferry.transport.offer import Offer, write_offer
from kvferry.transport.read_plan import Report
from kvferry.transport.redeem import TicketBook
from kvferry.transport.redemptions import Redemptions
from kvferry.transport.seal import SealBinding, open_seal
from kvferry.transport.turns import TurnIndex, TurnQueries
from support.clock import Clock
from support.models import attention, model
from support.vllm_cache import BLOCK, STEP
from support.vllm_scheduler import VllmScheduler, WithoutWorkers

HOST = "127.0.0.1"
HANDSHAKE_SECONDS = 5.0
_SEAL_KEY = b"k" * 32


class Network:
    """The control channels of all engines, by port."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.servers: dict[int, NearServer] = {}
        self.clients: list[NearClient] = []
        self.words: dict[int, Counter[int]] = {}
        self.opened = 0  # sealed grants

    def server(self, host: str, port: Any, card: PeerInfo, *_: Any, **__: Any) -> NearServer:
        one = NearServer(len(self.servers) + 1, card)
        self.servers[one.port] = one
        return one

    def refusal(self, lease: LeaseWord) -> str | None:
        """Why what was read under a lease cannot be used; None if the lease's word is still the same."""
        changed = self.words[lease.incarnation][lease.slot] != lease.generation
        return "the lease has ended" if changed else None

    def client(self, facts: Facts, *_: Any, runs: Callable[[], bool], **__: Any) -> NearClient:
        self.clients.append(one := NearClient(self, facts, runs))
        return one


class NearServer:
    """An engine's end of the control channel that answers others."""

    def __init__(self, port: int, card: PeerInfo) -> None:
        self.port, self.card = port, card
        self.events: FairQueue = FairQueue()
        self.tickets, self.turns = TicketBook(), TurnIndex()
        self.seal_key = _SEAL_KEY
        self.keepers: dict[Address, int] = {}

    def close(self) -> None: ...


class NearClient:
    """An engine's end of the control channel that asks others. Answers come at once.

    The claim that follows a sealed grant arrives late: with the next heartbeats, or before its release.
    """

    def __init__(self, network: Network, facts: Facts, runs: Callable[[], bool]) -> None:
        self._runs = runs
        self._network, self._facts, self._me = network, facts, facts.incarnation
        self._redemptions = Redemptions(self._me, HANDSHAKE_SECONDS, network.clock)
        self._queries = TurnQueries(network.clock)
        self._held: dict[Address, set[bytes]] = defaultdict(set)
        self._late: list[tuple[Address, Any]] = []
        self.unsent: tuple[()] = ()

    def flush(self) -> None: ...

    def look_up(self, address: Address, incarnation: int | None = None) -> PeerInfo | Unusable:
        server = self._network.servers.get(address[1])
        if server is None:
            return Unusable("no engine is there")
        if self._facts.keeps_turns is not None:
            server.keepers[self._facts.keeps_turns] = self._me
        return PeerInfo(server.card.facts, server.card.ranks)

    def forget(self, address: Address) -> None: ...

    def redeem(
        self,
        address: Address,
        ticket: bytes,
        tokens: int,
        content: Any,
        *,
        foreseen: bool,
        sealed: str,
    ) -> Any:
        binding, grant = SealBinding(address, ticket, tokens, content), None
        if sealed and address[1] in self._network.servers:
            grant = open_seal(_SEAL_KEY, sealed, binding)
            self._network.opened += 1
        one = self._redemptions.begin(address, ticket, tokens, content, foreseen=foreseen, grant=grant)
        if one.users == 1:
            self._late.append((address, one.message))
        if one.answer is None:
            self._send_late()
        return one

    def _send_late(self) -> None:
        late, self._late = self._late, []
        for address, message in late:
            self._ask(address, message)

    def answer(self, one: Any, wait_seconds: float = 0.0) -> Any:
        for address, message in self._redemptions.due():
            self._ask(address, message)
        return self._redemptions.answer(one)

    def end(self, one: Any) -> None:
        if self._redemptions.end(one):
            self.release(one.address, one.message.ticket)

    def _ask(self, address: Address, message: Any) -> None:
        server = self._network.servers[address[1]]
        ticket = self._redemptions.handle_reply(address, server.tickets.redeem(message))
        if ticket is not None:
            self.hold(address, ticket)

    def hold(self, address: Address, ticket: bytes) -> None:
        self._held[address].add(ticket)
        self._beat(address, [ticket])

    def release(self, address: Address, ticket: bytes) -> None:
        self._send_late()
        self._held[address].discard(ticket)
        server = self._network.servers[address[1]]
        if leases := server.tickets.release(self._me, [ticket]):
            server.events.put(b"", LeaseClaims(leases, released=True), force=True)

    def beat(self) -> None:
        """Send the heartbeats of all leases."""
        self._send_late()
        for address, tickets in self._held.items() if self._runs() else ():
            self._beat(address, sorted(tickets))

    def _beat(self, address: Address, tickets: Sequence[bytes]) -> None:
        server = self._network.servers[address[1]]
        if leases := server.tickets.claimed(self._me, tickets) + server.turns.leases(tickets):
            server.events.put(b"", LeaseClaims(leases))

    def ask_turn(self, peers: dict[Address, int], content: Any) -> int | None:
        number, asked = self._queries.begin(peers)
        question = AskTurn(number, content.chunk_tokens, list(content.keys))
        for address in asked:
            self._queries.handle_reply(address, self._network.servers[address[1]].turns.find(question))
        return number if asked else None

    def turns(self, number: int) -> Any:
        return self._queries.answers(number)

    def drop_question(self, number: int) -> None:
        self._queries.drop(number)

    def close(self) -> None: ...


@contextmanager
def network(clock: Clock) -> Iterator[Network]:
    """Connect the engines that are started meanwhile."""
    found = Network(clock)
    with (
        mock.patch.object(peering, "ControlServer", found.server),
        mock.patch.object(peering, "ControlClient", found.client),
    ):
        yield found


class MeshConnector(WithoutWorkers):
    """A scheduler half, called as `KVFerryConnector` calls its own.

    Settings (``kv_connector_extra_config``): `clock`, `config`, and `listen`, which gets all events.
    """

    sources: tuple[()] = ()

    def bind_gpu_block_pool(self, pool: Any) -> None:
        settings = self._vllm_config.kv_transfer_config.kv_connector_extra_config
        config: ConnectorConfig = settings["config"]
        engine = engine_info(self._vllm_config, self._kv_cache_config)
        self.wrap = request_wrapper(self._vllm_config, self._kv_cache_config)
        self.offers: dict[str, dict[str, Any] | None] = {}
        (rank,) = lay_out(model(attention()), EngineShape(1, (1,), BLOCK, "LBHNC", len(pool.blocks)))
        self.half = SchedulerHalf(
            engine,
            config,
            [WorkerInfo(geometry=rank, card=self.card(rank))],
            pool,
            events=EventStream(settings["listen"]),
            facts=lambda incarnation: Facts(engine.engine_id, incarnation, "mesh", {}),
            namespace=lambda _: None,
            clock=settings["clock"],
        )

    def card(self, rank: Any) -> RankCard:
        return RankCard(rank, b"", 4096, 64, 1)

    def on_new_request(self, request: Any) -> None:
        self.half.on_new_request(self.wrap(request))

    def get_num_new_matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        tokens = self.half.admission.matched(self.wrap(request), local_tokens)
        return tokens, bool(tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return tuple(self._kv_cache_config.transfer_group_ids)

    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        self.half.admission.allocated(self.wrap(request), blocks.blocks, external)

    def build_connector_meta(self, output: Any) -> SchedulerMeta:
        return SchedulerMeta("e", self.half.orders(VLLMStep(output)))

    def update_connector_output(self, output: Any) -> None:
        if output.kv_connector_worker_meta is not None:
            self.half.take_reports(output.kv_connector_worker_meta.reports)
        if output.finished_sending:
            self.half.sent(output.finished_sending)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        held, params = self.half.finished(self.wrap(request), block_ids)
        self.offers[request.request_id] = params
        return held, params


class MeshEngine(VllmScheduler):
    """An engine of a mesh, with a played worker.

    Attributes:
        name, port: of the engine, in offers.
        told: events of the connector.
    """

    def __init__(
        self, net: Network, name: str, blocks: int, *, prefix_caching: bool = True, **settings: Any
    ) -> None:
        self.told: list[Event] = []
        self._net, self._words = net, Counter[int]()
        self._loads: dict[str, Load] = {}
        self._leases: dict[str, LeaseWord] = {}
        self._whole: list[str] = []
        config = ConnectorConfig(host=HOST, **settings)
        super().__init__(
            blocks=blocks,
            prefix_caching=prefix_caching,
            connector=MeshConnector,
            settings={"clock": net.clock, "config": config, "listen": self.told.append},
            engine_id=name,
        )
        self.name, self.port = name, len(net.servers)
        net.words[self.connector.half._peering.producer._book._incarnation] = self._words

    def add(self, name: str, tokens: Sequence[int], answer: int, params: dict[str, Any] | None) -> None:
        """Add a request."""
        sampling = SamplingParams(
            max_tokens=answer, ignore_eos=True, extra_args={"kv_transfer_params": params} if params else None
        )
        self.scheduler.add_request(
            Request(name, list(tokens), sampling, None, block_hasher=self.block_hasher)
        )

    def offer_of(self, name: str) -> dict[str, Any] | None:
        """The ``kv_transfer_params`` that a request has ended with; None before."""
        return self.connector.offers.get(name)

    def offer_at_once(self, ticket: str) -> dict[str, Any]:
        """The offer of a prompt that this engine has yet to compute, as a router makes it."""
        return write_offer(Offer(self.name, HOST, self.port, ticket, None, STEP))

    def step(self) -> None:
        """Schedule a step, and let the worker do what it orders."""
        output = self.scheduler.schedule()
        orders = output.kv_connector_metadata.orders
        self._take_output(output, {name for name in output.num_scheduled_tokens if not self._prefills(name)})
        for slot in (*orders.ended.values(), *orders.raised.values()):
            self._words[slot] += 1
        ends: dict[str, str | None] = {}
        for key in self._whole:
            ends[key] = self._net.refusal(self._leases[key])
        self._loads |= {load.key: load for load in orders.loads}
        self._whole = []
        for part in orders.parts:
            if part.work is not None:
                self._leases[part.load] = part.work.lease
            if part.last:
                self._whole.append(part.load)
            if part.failure is not None:
                ends[part.load] = part.failure
        ends |= orders.given_up
        ended = {key: self._loads.pop(key) for key in ends if key in self._loads}
        reports = StepReports(
            reports={key: Report(ends[key]) for key in ended},
            raised=dict.fromkeys(orders.raised, 1),
        )
        done = {load.request_id for load in ended.values()}
        failed = {load.request_id for key, load in ended.items() if ends[key] is not None}
        self._report(reports, done, failed, set(orders.ended))
        self.connector.half.step_done()
