"""An engine without a model: a block pool, requests, a clock that a test sets, and steps.

It calls the connector in the order that `kvferry.connector.engine` documents. The connector is a
`SchedulerHalf`, or a `PartialHalf` with only the parts that a test is about.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.connector.admission import Admission
from kvferry.connector.bids import Bid
from kvferry.connector.blocks import PartBlocks
from kvferry.connector.content import Adapters, Prompts
from kvferry.connector.engine import BlockIds, CacheGroup, PlainStep
from kvferry.connector.events import Event, EventStream
from kvferry.connector.messages import Load, StepOrders, StepReports
from kvferry.connector.peers.producer import Producer
from kvferry.connector.peers.source import PeerSource
from kvferry.connector.source import Feed, Source
from kvferry.connector.tiers.storing import StoreOrders, Storing
from kvferry.geometry import GroupKind
from kvferry.observe.metrics_listener import MetricsListener
from kvferry.planning.select import LoadSpan, first_attended
from kvferry.transport.read_plan import Report
from support.block_pool import Block, BlockPool
from support.clock import Clock
from support.engine_info import FULL_GROUP, made_up
from support.loads import made_up_load


@dataclass
class PartialHalf:
    """A scheduler half that has some of its parts. It calls them as `SchedulerHalf` does.

    Attributes:
        excluded: why sources are excluded for all requests, if there is a source and no admission.
        feeds: feeds of the loads of the source that have not ended, if there is no admission.
        messages: messages of peers, which the next step passes to the producer.
        looks: True to look at every request in every step, as if it were admitted anew.
    """

    admission: Admission | None = None
    producer: Producer | None = None
    source: Source | None = None
    prompts: Prompts | None = None
    storing: Storing | None = None
    stores: StoreOrders | None = None
    parts: PartBlocks | None = None
    excluded: dict[str, str] = field(default_factory=dict)
    feeds: list[Feed] = field(default_factory=list)
    messages: deque[Any] = field(default_factory=deque)
    scheduled: int = 0
    done: int = 0
    looks: bool = False
    # The requests that have not ended. Preemptions of each at its last step.
    requests: dict[str, Any] = field(default_factory=dict)
    preemptions: dict[str, int] = field(default_factory=dict)

    def on_new_request(self, request: Any) -> None:
        self.requests[request.request_id] = request
        if self.producer is not None:
            self.producer.on_new_request(request)
        if self.admission is not None:
            self.admission.on_new_request(request)
        if self.source is not None:
            assert self.source.arrived(request, self.excluded)
        if self.storing is not None and self.prompts.add(request) is not None:
            self.storing.on_new_request(request)

    def orders(self, step: PlainStep) -> StepOrders:
        orders = StepOrders(computes=step.num_tokens > 0)
        self.scheduled += 1
        if self.producer is not None:
            self.producer.take_events(self.messages, orders)
            self.producer.scheduled(self.scheduled, step, step.block_ids)
        if self.storing is not None:
            self.storing.count(step)
            self.storing.schedule(step, self._started(step))
            orders.stores = self.stores.take()
        if self.admission is not None:
            self.admission.schedule(step.tokens.keys(), orders)
        if isinstance(self.source, PeerSource):
            self.source.hand_over(orders)
        for feed in list(self.feeds):
            orders.parts += (parts := feed.next_parts())
            if any(part.ends for part in parts):
                self.feeds.remove(feed)
        return orders

    def _started(self, step: PlainStep) -> list[str]:
        """Return the requests of a step that were admitted since their last step, without an admission."""
        # The requests of a test may watch who reads them.
        raw = {name: getattr(self.requests[name], "raw", self.requests[name]) for name in step.tokens}
        now = {name: one.num_preemptions for name, one in raw.items()}
        started = [name for name, n in now.items() if self.looks or self.preemptions.get(name) != n]
        self.preemptions |= now
        return started

    def take_reports(self, reports: StepReports) -> None:
        if self.stores is not None:
            self.stores.take_reports(reports)
        if self.admission is not None:
            self.admission.take_reports(reports)
        if self.producer is not None:
            self.producer.on_workers_confirmed(reports.raised)

    def sent(self, request_ids: set[str]) -> None:
        self.producer.sent(request_ids)

    def step_done(self) -> None:
        self.done = min(self.done + 1, self.scheduled)
        if self.producer is not None:
            self.producer.step_done(self.done)

    def finished(self, request: Any, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        del self.requests[request.request_id]
        self.preemptions.pop(request.request_id, None)
        if self.admission is not None:
            self.admission.finished(request.request_id)
        if self.source is not None:
            self.source.settled(request.request_id)
            self.source.finished(request.request_id)
        if self.storing is not None:
            self.storing.finished(request, block_ids)
            self.prompts.remove(request.request_id)
        return (False, None) if self.producer is None else self.producer.finished(request, block_ids)


class FakeEngine:
    """An engine that computes nothing. A test says what each step computes, and what the workers report.

    A block remembers the tokens that its KV depends on, so a test can tell whether a store copies the right
    blocks. A test may attach objects that it looks at, such as the client of a source.

    Attributes:
        half: the connector's scheduler half, set by the test.
        tables: blocks of each request by position, per KV cache group.
        told: all events so far.
        fold: metrics of these events.
        feeds: feed of each load of the only source, by key of the load.
        content: for each block id, the tokens up to each position that was computed; the position of a
            snapshot is 0.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup] = (FULL_GROUP,),
        *,
        blocks: int = 1000,
        workers: int = 1,
        **facts: Any,
    ) -> None:
        self.clock, self.workers, self.adapters = Clock(100.0), workers, Adapters()
        self.pool = BlockPool(blocks)
        self.facts = made_up(groups=tuple(groups), num_blocks=blocks, **facts)
        self.told: list[Event] = []
        self.fold = MetricsListener()
        self.events = EventStream(self.fold, self.told.append)
        self.half: Any = PartialHalf()
        self.tables: dict[str, tuple[list[Block], ...]] = {}
        self.content: defaultdict[int, dict[int, tuple[int, ...]]] = defaultdict(dict)
        self._held: dict[str, tuple[list[Block], ...]] = {}
        self._spare: list[Block] = []
        self._loads = 0
        self.feeds: dict[str, Feed] = {}

    @property
    def admission(self) -> Admission:
        return self.half.admission

    # -- requests and their blocks ------------------------------------------------------------------------

    def arrive(self, request: Any) -> Any:
        self.tables[request.request_id] = tuple([] for _ in self.facts.groups)
        self.half.on_new_request(request)
        return request

    def table_ids(self, request: Any) -> BlockIds:
        tables = self.tables[request.request_id]
        return tuple([block.block_id for block in table] for table in tables)

    def cover(self, request: Any, tokens: int) -> bool:
        """Allocate blocks for the first `tokens` tokens. Return False if too few are free.

        Recurrent state has one block, or one for each snapshot that a step takes.
        """
        for group, table in zip(self.facts.groups, self.tables[request.request_id], strict=True):
            wanted = -(-tokens // group.block_tokens)
            if group.kind is GroupKind.STATE:
                wanted = 0 if group.state_block_tokens else 1
            new = self.pool.allocate(max(wanted - len(table), 0))
            if new is None:
                return False
            table.extend(new)
        return True

    def leave_window(self, request: Any, tokens: int) -> None:
        """Free the blocks that the token after `tokens` tokens does not attend to. They become null."""
        for group, table in zip(self.facts.groups, self.tables[request.request_id], strict=True):
            if group.attention_span:
                first = max(first_attended(group, tokens), 0)
                self.drop(table, first // group.block_tokens)

    def drop(self, table: list[Block], blocks: int) -> None:
        """Free the first blocks of a table. They become null."""
        for at in range(min(blocks, len(table))):
            if not table[at].is_null:
                self.pool.free_blocks([table[at]])
                table[at] = self.pool.blocks[0]

    def free(self, request: Any) -> None:
        self._free(self.tables[request.request_id])

    def preempt(self, request: Any) -> None:
        self.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1

    def finish(self, request: Any, *, is_complete: bool = True) -> tuple[bool, Any]:
        """End a request. Its blocks become free at once, or when the workers have sent them."""
        request.is_complete = is_complete
        kept, params = self.half.finished(request, self.table_ids(request))
        tables = self.tables.pop(request.request_id)
        if kept:
            self._held[request.request_id] = tables
        else:
            self._free(tables)
        return kept, params

    def sent(self, *names: str) -> None:
        """All workers have ended the leases of these requests."""
        self.half.sent(set(names))
        for name in names:
            self._free(self._held.pop(name))

    def leave_free(self, blocks: int) -> None:
        """Let other requests take all free blocks but these."""
        self.pool.free_blocks(self._spare)
        taken = self.pool.get_num_free_blocks() - blocks
        assert taken >= 0, "so many blocks cannot be free"
        self._spare = self.pool.allocate(taken)

    @property
    def references(self) -> int:
        """References to blocks, but for those of `leave_free`."""
        return self.pool.references - len(self._spare)

    def _free(self, tables: Iterable[list[Block]]) -> None:
        for table in tables:
            self.pool.free_blocks(block for block in table if not block.is_null)
            table.clear()

    # -- loads --------------------------------------------------------------------------------------------

    def admit(self, request: Any, local_tokens: int = 0) -> int | None:
        """Admit a request that has these tokens; return the number of tokens that a load brings.

        None: a later step must ask again.
        """
        tokens = self.admission.matched(request, local_tokens)
        if tokens is not None:
            self.allocate(request, tokens, local_tokens)
        return tokens

    def allocate(self, request: Any, load_tokens: int, local_tokens: int = 0) -> None:
        """Allocate blocks for all tokens of a request that has none, and begin the load."""
        if not any(self.tables[request.request_id]):
            assert self.cover(request, request.num_tokens), "give the test's pool more blocks"
            self.leave_window(request, local_tokens)
        self.admission.allocated(request, self.tables[request.request_id], load_tokens)

    def report(
        self,
        load: Load,
        *failures: str | None,
        late: bool = False,
        workers: int = 1,
        **more: Any,
    ) -> None:
        """Let workers report the end of a load in turn. Nothing of it is in flight, unless it is late."""
        for failure in failures:
            report = Report(failure, late=late * workers, workers=workers, **more)
            self.half.take_reports(StepReports(reports={load.key: report}))

    def report_at_once(self, reports: dict[str, Report]) -> None:
        """Let one worker report several loads of which nothing is in flight."""
        self.half.take_reports(StepReports(reports=reports))

    def landed(self, load: Load, workers: int = 1) -> None:
        """Report that nothing of a late load is in flight any more on so many workers."""
        self.half.take_reports(StepReports(released={load.key: workers}))

    def bid(self, request: Any, local_tokens: int = 0) -> Bid | None:
        """Return the first offer of the only source; None if there is none."""
        return next(iter(self.half.source.ask(request, local_tokens).bids), None)

    def begin_load(self, request: Any, local_tokens: int = 0) -> Load:
        """Begin a load of what the only source offers, without admission."""
        bid, name = self.bid(request, local_tokens), request.request_id
        self._loads += 1
        span = LoadSpan(local_tokens, local_tokens + bid.tokens, request.num_tokens)
        load = made_up_load(f"{name}#{self._loads}", span, [range(1, 8)], request_id=name, bid=bid)
        self.feeds[load.key] = feed = self.half.source.begin(load, request)
        self.half.feeds.append(feed)
        return load

    def end_load(self, load: Load, report: Report, *, wanted: bool = True) -> None:
        """End a load that `begin_load` began, as all workers have reported it."""
        feed = self.feeds[load.key]
        feed.ended(report, wanted=wanted)
        if feed in self.half.feeds:
            self.half.feeds.remove(feed)

    # -- steps --------------------------------------------------------------------------------------------

    def begin(self, *work: Any, snapshots: Sequence[tuple[Any, int]] = ()) -> StepOrders | None:
        """Schedule a step, and compute it; return its orders. None if too few blocks are free.

        Args:
            work: (request, number of tokens) of each request; a third number counts the last tokens that are
                draft tokens, and are refused.
            snapshots: (request, number of tokens) of each snapshot of recurrent state that the step takes.
        """
        for request, tokens, *_ in work:
            self.leave_window(request, request.num_computed_tokens)
            if not self.cover(request, request.num_computed_tokens + tokens):
                return None
        taken: dict[str, list[tuple[int, int, int]]] = {}
        for request, tokens in snapshots:
            taken.setdefault(request.request_id, []).extend(self._take_snapshots(request, tokens))
        orders = self.half.orders(
            PlainStep(
                tokens={request.request_id: tokens for request, tokens, *_ in work if tokens},
                tables={request.request_id: self.table_ids(request) for request, *_ in work},
                snapshots=taken,
            )
        )
        for request, tokens, *refused in work:
            first = request.num_computed_tokens
            request.num_computed_tokens = first + tokens - sum(refused)
            self.compute(request, first, first + tokens, request.num_computed_tokens)
        return orders

    def step(self, *work: Any, snapshots: Sequence[tuple[Any, int]] = ()) -> StepOrders | None:
        """Run a step, as `begin` describes it."""
        orders = self.begin(*work, snapshots=snapshots)
        if orders is not None:
            self.half.step_done()
        return orders

    def compute(self, request: Any, first: int, last: int, right: int | None = None) -> None:
        """Write tokens [first, last) into blocks. Tokens from `right` on are refused drafts."""
        tokens = tokens_of(request)
        for group, table in zip(self.facts.groups, self.tables[request.request_id], strict=True):
            if group.kind is GroupKind.STATE:
                continue
            for at in range(first, last):
                content = tuple(tokens[: at + 1]) if right is None or at < right else ()
                self.content[table[at // group.block_tokens].block_id][at % group.block_tokens] = content

    def _take_snapshots(self, request: Any, tokens: int) -> Iterable[tuple[int, int, int]]:
        for number, group in enumerate(self.facts.groups):
            if group.kind is GroupKind.STATE:
                (block,) = self.pool.allocate(1)
                self.tables[request.request_id][number].append(block)
                self.content[block.block_id] = {0: tuple(tokens_of(request)[:tokens])}
                yield number, block.block_id, tokens


def tokens_of(request: Any) -> Sequence[int]:
    """Return all tokens that a request will have; `grow` makes some of them known."""
    return getattr(request, "truth", request.all_token_ids)


def counted(engine: FakeEngine) -> dict[str, float]:
    """Return the counters since the last call: name and labels, separated by spaces, and number."""
    return {" ".join([name, *labels]): n for (name, labels), n in engine.fold.take().counters.items()}


def events_of(engine: FakeEngine, *kinds: type[Event]) -> list[Any]:
    """Return the events of these kinds so far."""
    return [event for event in engine.told if isinstance(event, kinds)]
