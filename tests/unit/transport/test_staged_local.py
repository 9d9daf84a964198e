"""Whole transfers in one process, through a transport that copies: every byte of the reader's memory."""

import itertools
import threading
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zmq

from kvferry.common.errors import ConfigError, TransferError
from kvferry.geometry import GroupKind, Region
from kvferry.planning.digest_image import digest_image
from kvferry.planning.select import LoadSpan
from kvferry.planning.strategy import Costs, Strategy
from kvferry.planning.template import build_templates
from kvferry.transport import prepared_routes
from kvferry.transport.addresses import ANY_PEER, parse_allowed_peers
from kvferry.transport.agent import ReadState
from kvferry.transport.costs import TransferSettings
from kvferry.transport.gather_client import Gather
from kvferry.transport.lane_connections import ConnectedPeer
from kvferry.transport.lease import LeaseWord, LeaseWords
from kvferry.transport.messages import Outgoing, RankCard, encode
from kvferry.transport.prepared_routes import _RoutePreparation
from kvferry.transport.read_plan import ReadOrder, Report
from kvferry.transport.read_speed import PATIENCE_SECONDS, ROUNDS
from kvferry.transport.security import secure_client
from kvferry.transport.segmented_read import ROOM_SECONDS
from kvferry.transport.staging import UNIT_BYTES, StagingArea
from kvferry.transport.transfers import Transfers
from support.clock import Clock
from support.engines import EngineSpec, Family, GroupSpec, Interior, Stored, ranks
from support.keys import KEYS
from support.local_agent import LocalAgent, Trusting
from support.oracle import expect, fill
from support.waiting import wait_for
from transport.memory import place, scattered_tables

pytestmark = pytest.mark.slow

FULL = GroupKind.FULL
KV = (Stored("k", 2, 4, (("content", 8),)), Stored("v", 2, 4, (("content", 8),)))
DENSE = (Family(FULL, fields=KV),) * 3
WIDE = (Family(FULL, fields=tuple(Stored(n, 2, 4, (("content", 512),)) for n in "kv")),)
LEASES = 4
_names = itertools.count()


def dense(tp=1, block=16, layout="LBHNC", interior=None, blocks=40) -> EngineSpec:
    groups = (GroupSpec(FULL, 0, (0, 1, 2), block),)
    return EngineSpec(tp, (3,), groups, layout, interior or Interior(), blocks)


def wide(tp=1, block=16, layout="LBHNC", blocks=180) -> EngineSpec:
    return EngineSpec(tp, (1,), (GroupSpec(FULL, 0, (0,), block),), layout, Interior(), blocks)


HYBRID = (
    Family(FULL, fields=KV),
    Family(GroupKind.SLIDING, 24, KV),
    Family(GroupKind.STATE, fields=(Stored("ssm", 4, 4, (("row", 3),)), Stored("x", 2, 4, (("width", 3),)))),
)


def hybrid(tp=1, block=16, layout="LBHNC") -> EngineSpec:
    kinds = ((FULL, 0), (GroupKind.SLIDING, 24), (GroupKind.STATE, 0))
    groups = tuple(
        GroupSpec(kind, attention_span, (i,), block) for i, (kind, attention_span) in enumerate(kinds)
    )
    return EngineSpec(tp, (3,), groups, layout, Interior(), 60)


class Workers:
    """All workers of an engine in this process.

    Attributes:
        agents: NIXL's stand-ins that read, one per lane.
        ended: keys of the orders that have ended, oldest first.
    """

    def __init__(self, made_up, seed: int, settings: TransferSettings, **options) -> None:
        self.made_up = made_up
        self.ranks, self.memories = zip(
            *(place(rank, seed + i) for i, rank in enumerate(made_up)), strict=True
        )
        self.agents: list[LocalAgent] = []
        self.ended: dict[str, Report] = {}
        self.threads = [
            Transfers(
                f"{next(_names)}",
                rank,
                LeaseWords(100 + i, LEASES),
                settings,
                self._agent,
                **{"in_flight": 8, "validator": Trusting(), **options},
            )
            for i, rank in enumerate(self.ranks)
        ]

    def _agent(self, name: str, *, progress: bool) -> LocalAgent:
        made = LocalAgent(name)
        if not progress:
            self.agents.append(made)
        return made

    @property
    def cards(self):
        return [thread.card for thread in self.threads]

    def poll(self, key: str, rank: int = 0) -> Report | None:
        """Return how an order ended; None if it has not."""
        for ended, report in self.threads[rank].results():
            assert ended not in self.ended, "two reports"
            self.ended[ended] = report
        return self.ended.get(key)

    def result(self, key: str, rank: int = 0) -> Report:
        return wait_for(lambda: self.poll(key, rank))


class World:
    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def workers(self, made_up, seed=0, options=None, **settings) -> Workers:
        chosen = TransferSettings(**{"lanes": 1, "keys": KEYS, "timed_read_bytes": 0, **settings})
        made = Workers(made_up, seed, chosen, **(options or {}))
        for thread in made.threads:
            self._stack.callback(thread.close, 10.0)
        return made


@pytest.fixture
def world():
    with ExitStack() as stack:
        yield World(stack)


def origins(producer: Workers, reader: Workers) -> set[str]:
    """Return what the reader has read KV from: blocks, or cells that the producer packed."""
    found = set()
    for card in producer.cards:
        for name, places in (
            ("blocks", [(one.address, one.length) for one in card.geometry.regions]),
            ("packed", [(card.outgoing.address, card.outgoing.bytes)] if card.outgoing else []),
        ):
            for agent, (first, length) in itertools.product(reader.agents, places):
                found |= {name for address, _ in agent.reads if first <= address < first + length}
    return found


def descriptors() -> int:
    """Return the number of open file descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def moved(world, src, dst, families, total, local_tokens=0, **settings):
    """Read a prompt and check every byte; returns the reader and what it did."""
    span = LoadSpan(local_tokens, total, total)
    src_tables, dst_tables = scattered_tables(src, total, 1), scattered_tables(dst, total, 2)
    producer = world.workers(ranks(src, families), staging_bytes=settings.pop("theirs", 4 << 20))
    for rank, memory in zip(producer.ranks, producer.memories, strict=True):
        fill(rank, src_tables, memory)
    reader = world.workers(ranks(dst, families), 1000, **settings)
    results = []
    for number, thread in enumerate(reader.threads):
        before = reader.memories[number].bytes.copy()
        thread.connect("P", producer.cards)
        thread.submit(ReadOrder(f"{number}", "P", span, src_tables, dst_tables, LeaseWord(0, 0, 1)))
        result = reader.result(f"{number}", number)
        assert result.failure is None, result.failure
        expected = expect(
            reader.ranks[number],
            ranks(src, families),
            [span] * len(dst.groups),
            dst_tables,
            before,
            cleared=True,
        )
        expected.check(reader.memories[number].bytes)
        assert not any(agent.held["reads"] for agent in reader.agents)
        results.append(result)
    for engine in (reader, producer):
        for thread in engine.threads:
            assert thread.landing.used_units == 0
    return producer, reader, results


PLANES = Interior(planes=True, transposed=frozenset({"k"}))
CASES = {
    "one chunk": (dense(), dense(layout="LBNHC"), DENSE, 200, 0),
    "TP 2 to 1": (dense(2), dense(), DENSE, 200, 0),
    "TP 1 to 2": (dense(), dense(2), DENSE, 200, 48),
    "block 24 to 16": (dense(block=24), dense(block=16), DENSE, 200, 0),
    "block 16 to 24 from the middle of a block": (dense(block=16), dense(block=24), DENSE, 200, 72),
    "K transposed there": (dense(), dense(interior=PLANES), DENSE, 60, 0),
    "groups of several kinds": (hybrid(2, 32), hybrid(1, 16, "LBNHC"), HYBRID, 150, 0),
}
LARGE = {
    "many chunks of blocks three times as large": (wide(block=48, blocks=20), wide(block=16), WIDE, 360, 48),
    "many chunks, heads apart": (wide(tp=2), wide(tp=1, layout="LBNHC"), WIDE, 360, 0),
}
LONG = pytest.mark.long


@pytest.mark.parametrize("lanes", [pytest.param(2, marks=LONG), 3])
@pytest.mark.parametrize("strategy", list(Strategy))
@pytest.mark.parametrize(
    "case",
    [*CASES.values(), *(pytest.param(one, marks=LONG) for one in LARGE.values())],
    ids=[*CASES, *LARGE],
)
def test_lanes_read_every_part_once(world, case, strategy, lanes):
    src, dst, families, total, local_tokens = case
    settings = {"strategy": strategy, "lanes": lanes, "lane_bytes": 1, "staging_bytes": 4 << 20}
    _, reader, results = moved(world, src, dst, families, total, local_tokens, **settings)
    # A shared image is not read by the transport, but its word is.
    least = 8 if strategy is Strategy.SHARED else 9
    moved_bytes = {sum(length for _, length in agent.reads if length >= least) for agent in reader.agents}
    assert lanes == 1 or 0 not in moved_bytes, "a lane had nothing to do"
    alone = moved(world, src, dst, families, total, local_tokens, strategy=strategy, staging_bytes=4 << 20)[2]
    for shared, whole in zip(results, alone, strict=True):
        assert shared.figures.bytes_by_group == whole.figures.bytes_by_group
        assert shared.figures.pages == whole.figures.pages
        assert shared.figures.strategies_by_group == whole.figures.strategies_by_group


@pytest.mark.parametrize("units", [1, pytest.param(3, marks=LONG)])
@pytest.mark.parametrize("strategy", [Strategy.STAGED, Strategy.OVER_READ, Strategy.SHARED])
@pytest.mark.parametrize("case", [*CASES.values(), *LARGE.values()], ids=[*CASES, *LARGE])
def test_bytes_come_through_areas_of_any_size(world, case, strategy, units):
    src, dst, families, total, local_tokens = case
    settings = {"strategy": strategy, "staging_bytes": units * UNIT_BYTES, "theirs": units * UNIT_BYTES}
    producer, reader, results = moved(world, src, dst, families, total, local_tokens, **settings)
    assert all(set(result.figures.strategies_by_group) == {(strategy,)} for result in results)
    read = {Strategy.STAGED: {"packed"}, Strategy.OVER_READ: {"blocks"}, Strategy.SHARED: set()}
    assert origins(producer, reader) == read[strategy]
    counts = [result.figures for result in results]
    assert all(one.pages and bool(one.descriptors) is bool(read[strategy]) for one in counts)


@pytest.mark.parametrize("file", ["none", "another size", "not here"])
def test_memory_that_cannot_be_mapped_leaves_reads_and_the_plan_says_why(world, file):
    producer = world.workers(ranks(dense(), DENSE))
    reader = world.workers(ranks(dense(), DENSE), 1000, strategy=Strategy.SHARED)
    (card,), tables = producer.cards, scattered_tables(dense(), 16, 1)
    there = card.outgoing.file
    found = {"none": None, "another size": replace(there, size=1), "not here": replace(there, pid=1 << 22)}
    outgoing = msgspec.structs.replace(card.outgoing, file=found[file])
    reader.threads[0].connect("P", [msgspec.structs.replace(card, outgoing=outgoing)])
    order = ReadOrder("a", "P", LoadSpan(0, 16, 16), tables, tables, LeaseWord(0, 0, 1))
    reader.threads[0].submit(order)
    result = reader.result("a")
    assert result.failure is None, result.failure
    assert result.figures.strategies_by_group == (("direct",),)
    why = "no shared memory at /proc/" if file == "not here" else "the peer offers no memory that engines"
    assert result.figures.not_shared.startswith(why)


def test_a_lease_that_ended_is_noticed_with_memory_that_both_map(world):
    producer = world.workers(ranks(dense(), DENSE))
    reader = world.workers(ranks(dense(), DENSE), 1000, strategy=Strategy.SHARED)
    reader.threads[0].connect("P", producer.cards)
    producer.threads[0].words.end([0])
    tables = scattered_tables(dense(), 16, 1)
    reader.threads[0].submit(ReadOrder("a", "P", LoadSpan(0, 16, 16), tables, tables, LeaseWord(0, 0, 1)))
    assert "lease" in reader.result("a").failure


@pytest.mark.parametrize("free", ["scatter", "place"])
def test_staged_images_are_read_into_place_or_scattered(world, free):
    """Both ways of staging, each where it costs nothing."""
    cheap = {"copy_run_seconds": 0, "copy_byte_seconds": 0, "copy_call_seconds": 0}
    costs = {
        "scatter": Costs(**cheap, read_descriptor_seconds=0.5),
        "place": Costs(copy_run_seconds=0.5, read_descriptor_seconds=0),
    }[free]
    settings = {"strategy": Strategy.STAGED, "staging_bytes": 4 << 20, "costs": costs}
    producer, reader, _ = moved(world, dense(block=24), dense(2, 16, "LBNHC"), DENSE, 200, 48, **settings)
    assert origins(producer, reader) == {"packed"}
    words = reader.threads[0].words
    assert all(word == words.incarnation << 32 for word in words.array.tolist()), "nobody read from it"


@pytest.mark.parametrize("strategy", [Strategy.STAGED, Strategy.OVER_READ, None])
@pytest.mark.parametrize(("theirs", "ours"), [(0, 4 << 20), (4 << 20, 0), (0, 0)])
def test_without_staging_memory_on_either_side_bytes_go_without(world, strategy, theirs, ours):
    producer, reader, _ = moved(
        world,
        dense(),
        dense(layout="LBNHC"),
        DENSE,
        100,
        strategy=strategy,
        staging_bytes=ours,
        theirs=theirs,
    )
    assert origins(producer, reader) == {"blocks"}


def test_layers_in_descending_order_of_addresses_are_gathered_and_cut_out(world):
    src, dst = dense(layout="BLHNC"), dense(layout="LBHNC")
    (made_up,) = ranks(dst, DENSE)
    layers = made_up.groups[0].layers
    turned = [
        replace(layer, address=other.address) for layer, other in zip(layers, layers[::-1], strict=True)
    ]
    backwards = replace(made_up, groups=(replace(made_up.groups[0], layers=tuple(turned)),))
    tables = scattered_tables(src, 200, 1)
    for strategy, origin in ((Strategy.STAGED, "packed"), (Strategy.OVER_READ, "blocks")):
        producer = world.workers(ranks(src, DENSE), staging_bytes=4 << 20)
        fill(producer.ranks[0], tables, producer.memories[0])
        reader = world.workers([backwards], 1000, strategy=strategy, staging_bytes=4 << 20)
        before = reader.memories[0].bytes.copy()
        reader.threads[0].connect("P", producer.cards)
        reader.threads[0].submit(
            ReadOrder("a", "P", LoadSpan(0, 200, 200), tables, tables, LeaseWord(0, 0, 1))
        )
        assert reader.result("a").failure is None
        expect(
            reader.ranks[0], ranks(src, DENSE), [LoadSpan(0, 200, 200)], tables, before, cleared=True
        ).check(reader.memories[0].bytes)
        assert origins(producer, reader) == {origin}


@pytest.mark.parametrize("strategy", [Strategy.STAGED, Strategy.OVER_READ])
def test_many_reads_share_a_small_area(world, strategy):
    src, dst = wide(layout="LBNHC"), wide()
    tables = scattered_tables(src, 16 * 10, 1)
    producer = world.workers(ranks(src, WIDE), staging_bytes=1 << 20)
    fill(producer.ranks[0], tables, producer.memories[0])
    reader = world.workers(ranks(dst, WIDE), 1000, strategy=strategy, staging_bytes=1 << 20)
    reader.threads[0].connect("P", producer.cards)
    (ids,) = scattered_tables(dst, 16 * 40, 2)
    parts = [(ids[first : first + 10],) for first in range(0, 40, 10)]
    span = LoadSpan(0, 160, 160)
    for number, part in enumerate(parts):
        reader.threads[0].submit(ReadOrder(f"{number}", "P", span, tables, part, LeaseWord(0, 0, 1)))
    before = reader.memories[0].bytes.copy()
    for number in range(4):
        assert reader.result(f"{number}").failure is None
    for part in parts:
        expected = expect(reader.ranks[0], ranks(src, WIDE), [span], part, before)
        assert (reader.memories[0].bytes == expected.value)[expected.must].all()
    assert sum(reader.agents[0].held.values()) == 1 + 4


def test_a_lot_that_was_given_to_another_while_it_was_read_is_a_failure(world):
    src, dst = dense(), dense(layout="LBNHC")
    tables = scattered_tables(src, 100, 1)
    producer = world.workers(ranks(src, DENSE), staging_bytes=1 << 20)
    reader = world.workers(ranks(dst, DENSE), 1000, strategy=Strategy.STAGED, staging_bytes=1 << 20)
    area = producer.cards[0].outgoing

    def reclaimed(sources):
        if ((sources >= area.address) & (sources < area.address + area.bytes)).any():
            producer.threads[0].words.end([LEASES])

    reader.agents[0].before_post = reclaimed
    reader.threads[0].connect("P", producer.cards)
    reader.threads[0].submit(ReadOrder("a", "P", LoadSpan(0, 100, 100), tables, tables, LeaseWord(0, 0, 1)))
    assert "used its staging area for others" in reader.result("a").failure


def test_a_lease_that_ends_between_chunks_is_a_failure(world):
    src, dst = wide(layout="LBNHC"), wide()
    tables = scattered_tables(src, 16 * 100, 1)
    producer = world.workers(ranks(src, WIDE), staging_bytes=2 << 20)
    reader = world.workers(ranks(dst, WIDE), 1000, strategy=Strategy.STAGED, staging_bytes=2 << 20)
    posted = []

    def ended(sources):
        posted.append(len(sources))
        if len(posted) == 3:
            producer.threads[0].words.end([0])

    reader.agents[0].before_post = ended
    reader.threads[0].connect("P", producer.cards)
    reader.threads[0].submit(ReadOrder("a", "P", LoadSpan(0, 1600, 1600), tables, tables, LeaseWord(0, 0, 1)))
    result = reader.result("a")
    assert "gave the blocks back before they were read" in result.failure
    assert not result.peer_lost


def ordered(world):
    """An order of one block, its reader and its producer; they are connected."""
    producer = world.workers(ranks(dense(), DENSE))
    reader = world.workers(ranks(dense(), DENSE), 1000, strategy=Strategy.DIRECT)
    reader.threads[0].connect("P", producer.cards)
    tables = scattered_tables(dense(), 16, 1)
    return producer, reader, ReadOrder("a", "P", LoadSpan(0, 16, 16), tables, tables, LeaseWord(0, 0, 1))


def test_what_lies_in_gpu_memory_is_not_verified_and_the_engine_or_the_read_says_so(world):
    producer, reader, order = ordered(world)
    (card,), (rank,) = producer.cards, producer.ranks
    on_gpu = replace(rank, regions=tuple(replace(one, memory="VRAM") for one in rank.regions))
    reader = world.workers(ranks(dense(), DENSE), 1000, verify=True)
    reader.threads[0].connect("P", [msgspec.structs.replace(card, geometry=on_gpu)])
    reader.threads[0].submit(order)
    assert "cannot be verified, because its KV cache is in GPU memory" in reader.result("a").failure
    with pytest.raises(
        ConfigError, match="verify_transfers is set, and this engine's KV cache is in GPU memory"
    ):
        Transfers("D", on_gpu, LeaseWords(1, 1), TransferSettings(verify=True), LocalAgent)


def test_words_of_another_run_of_the_producer_lose_the_peer(world):
    producer, reader, order = ordered(world)
    words = producer.threads[0].words.array
    reader.agents[0].before_post = lambda _: words.fill(7 << 32)
    reader.threads[0].submit(order)
    result = reader.result("a")
    assert result.failure == "another run of the producer has the memory that was read"
    assert result.peer_lost


def test_a_word_that_did_not_arrive_is_not_the_one_of_the_read_before(world):
    producer, reader, order = ordered(world)
    (agent,), words = reader.agents, producer.threads[0].words
    reader.threads[0].submit(order)
    assert reader.result("a").failure is None
    inner = agent.post
    agent.post = lambda read: ReadState.DONE if read[1][0] == words.address else inner(read)
    reader.threads[0].submit(replace(order, key="b"))
    assert reader.result("b").failure is not None


def test_a_read_that_the_transport_refuses_loses_the_peer(world):
    _, reader, order = ordered(world)

    def refusing(read):
        raise TransferError("no such peer")

    reader.agents[0].post = refusing
    reader.threads[0].submit(order)
    result = reader.result("a")
    assert (result.failure, result.peer_lost) == ("the transport refused the read: no such peer", True)
    assert reader.agents[0].held["reads"] == 0


def test_an_order_that_cannot_be_planned_fails_alone(world, caplog):
    _, reader, order = ordered(world)
    reader.threads[0].submit(replace(order, src_tables=("no table",)))
    assert reader.result("a").failure
    assert "please report it" in caplog.text
    reader.threads[0].submit(replace(order, key="b"))
    assert reader.result("b").failure is None


class Undecided(Trusting):
    """Lets a peer pass once the test sets the verdict; `asked` has that of each peer."""

    def __init__(self) -> None:
        self.asked = []

    def validate(self, cards):
        self.asked.append(Future())
        return self.asked[-1]


def test_orders_that_wait_for_their_peer_are_carried_out_in_the_order_in_which_they_came(world):
    validator = Undecided()
    producer = world.workers(ranks(dense(), DENSE))
    reader = world.workers(ranks(dense(), DENSE), 1000, {"in_flight": 1, "validator": validator})
    (thread,) = reader.threads
    thread.connect("P", producer.cards)
    tables = scattered_tables(dense(), 16, 1)
    for key in "abc":
        thread.submit(ReadOrder(key, "P", LoadSpan(0, 16, 16), tables, tables, LeaseWord(0, 0, 1)))
    thread.connect("Q", producer.cards)
    wait_for(lambda: len(validator.asked) == 2)  # the lane has come past the orders
    validator.asked[0].set_result("")
    reader.result("c")
    assert list(reader.ended) == ["a", "b", "c"]


def test_ranks_and_peers_are_measured_one_after_the_other_but_none_holds_up_the_rest_for_ever(world):
    clock = Clock()
    producers = [world.workers(ranks(wide(tp=2), WIDE)) for _ in range(2)]
    options = {"staging_bytes": 16 << 20, "timed_read_bytes": 1 << 20}
    reader = world.workers(ranks(wide(), WIDE), 1000, {"clock": clock}, **options)
    (thread,), (agent,) = reader.threads, reader.agents
    agent.gate.clear()
    for name, producer in zip("PQ", producers, strict=True):
        thread.connect(name, producer.cards)
    starts = [rank.regions[0].address for producer in producers for rank in producer.ranks]
    wait_for(lambda: agent.reads)
    clock.now += PATIENCE_SECONDS / 2
    assert agent.reads == [(starts[0], 1 << 20)]
    clock.now += PATIENCE_SECONDS / 2
    wait_for(lambda: len(agent.reads) == len(starts))
    agent.gate.set()
    wait_for(lambda: len(agent.reads) == ROUNDS * len(starts))
    assert {address for address, _ in agent.reads} == set(starts)


@pytest.mark.parametrize("answers", [True, False])
def test_an_order_waits_for_the_speed_of_its_peers_reads_but_not_for_ever(world, answers):
    clock, tables = Clock(), scattered_tables(wide(), 16, 1)
    producer = world.workers(ranks(wide(), WIDE))
    options = {"staging_bytes": 16 << 20, "timed_read_bytes": 2 << 20}
    reader = world.workers(ranks(wide(), WIDE), 1000, {"clock": clock}, **options)
    (thread,), (agent,) = reader.threads, reader.agents
    agent.gate.clear()
    thread.connect("P", producer.cards)
    for key, peer in (("a", "P"), ("b", "nobody")):
        thread.submit(ReadOrder(key, peer, LoadSpan(0, 16, 16), tables, tables, LeaseWord(0, 0, 1)))
    assert reader.result("b").failure == "peer nobody is not connected"  # the lane has come past both
    wait_for(lambda: agent.reads)
    assert agent.reads == [(producer.ranks[0].regions[0].address, 2 << 20)]
    if not answers:
        clock.now += PATIENCE_SECONDS
        wait_for(lambda: len(agent.reads) > 1)
    agent.gate.set()
    assert reader.result("a").failure is None
    sizes = [length for _, length in agent.reads]
    assert sizes.count(2 << 20) == ROUNDS or not answers
    assert (sizes[:ROUNDS] == [2 << 20] * ROUNDS) is answers
    wait_for(lambda: agent.held["reads"] == 0 and thread.landing.used_units == 0)


def test_a_lane_that_is_stopped_keeps_its_memory_until_nothing_is_in_flight(world, caplog):
    _, reader, order = ordered(world)
    (agent,) = reader.agents
    agent.gate.clear()
    reader.threads[0].submit(order)
    wait_for(lambda: agent.reads)
    reader.threads[0].close(patience_seconds=0.2)
    assert "reads have not ended" in caplog.text
    assert agent.regions, "still registered"
    agent.gate.set()
    wait_for(lambda: not agent.regions)
    assert reader.result("a").failure is None


def test_a_read_that_hangs_and_holds_all_room_does_not_hold_up_others_for_long(world):
    src, dst, clock = wide(layout="LBNHC"), wide(), Clock()
    tables = scattered_tables(src, 16 * 100, 1)
    stuck, well = (world.workers(ranks(src, WIDE), staging_bytes=1 << 20) for _ in range(2))
    reader = world.workers(
        ranks(dst, WIDE), 1000, {"clock": clock}, strategy=Strategy.OVER_READ, staging_bytes=1 << 20
    )
    agent, hangs = reader.agents[0], threading.Event()
    low, length = stuck.ranks[0].regions[0].address, len(stuck.memories[0].bytes)
    hangs.set()

    def state(handle):
        from_stuck = ((handle[1] >= low) & (handle[1] < low + length)).any()
        return ReadState.IN_FLIGHT if from_stuck and hangs.is_set() else ReadState.DONE

    agent.state = state
    for name, producer in (("stuck", stuck), ("well", well)):
        reader.threads[0].connect(name, producer.cards)
        reader.threads[0].submit(
            ReadOrder(name, name, LoadSpan(0, 1600, 1600), tables, tables, LeaseWord(0, 0, 1))
        )

    def well_ended() -> Report | None:
        clock.now += ROOM_SECONDS / 4
        return reader.poll("well")

    assert wait_for(well_ended).failure is None
    assert reader.poll("stuck") is None
    hangs.clear()
    assert reader.result("stuck").failure is None


def test_a_peer_that_cannot_be_prepared_to_the_end_leaves_nothing_behind(world):
    producer = world.workers(ranks(dense(2), DENSE), staging_bytes=1 << 20)
    reader = world.workers(ranks(dense(), DENSE), 1000, strategy=Strategy.STAGED, staging_bytes=1 << 20)
    first, second = producer.cards
    thread, agent = reader.threads[0], reader.agents[0]
    tables = scattered_tables(dense(), 16, 1)
    order = ReadOrder("a", "P", LoadSpan(0, 16, 16), tables, tables, LeaseWord(0, 0, 1))
    opened = []
    for number, spoiled in enumerate(
        [
            msgspec.structs.replace(second, agent=b"nobody"),
            msgspec.structs.replace(second, words_address=8),
            msgspec.structs.replace(second, words=10**6),
        ]
    ):
        thread.connect("P", [first, spoiled])
        thread.submit(replace(order, key=f"{number}"))
        assert "cannot be read from" in reader.result(f"{number}").failure
        assert agent.held == {"peers": 0, "lists": 0, "reads": 0}
        opened.append(descriptors())
    wait_for(lambda: descriptors() <= opened[0])
    thread.connect("P", [first, second])
    thread.submit(order)
    assert reader.result("a").failure is None


def test_a_peer_that_is_disconnected_is_let_go_of_when_nothing_is_in_flight(world):
    producer = world.workers(ranks(dense(), DENSE))
    reader = world.workers(ranks(dense(), DENSE), 1000)
    (thread,), (agent,) = reader.threads, reader.agents
    tables = scattered_tables(dense(), 16, 1)
    order = ReadOrder("a", "P", LoadSpan(0, 16, 16), tables, tables, LeaseWord(0, 0, 1))
    thread.connect("P", producer.cards)
    agent.gate.clear()
    thread.submit(order)
    wait_for(lambda: agent.held["reads"])
    thread.disconnect("P")
    thread.submit(replace(order, key="b"))
    assert reader.result("b").failure == "peer P is not connected"
    assert agent.held["peers"] == 1
    agent.gate.set()
    assert reader.result("a").failure is None
    wait_for(lambda: agent.held == {"peers": 0, "lists": 0, "reads": 0})
    thread.connect("P", producer.cards)
    thread.submit(replace(order, key="c"))
    assert reader.result("c").failure is None


def test_closing_frees_everything(world):
    opened = descriptors()
    producer, reader, _ = moved(
        world, dense(), dense(layout="LBNHC"), DENSE, 100, strategy=Strategy.STAGED, staging_bytes=1 << 20
    )
    (agent,) = reader.agents
    for thread in (*reader.threads, *producer.threads):
        thread.close(10.0)
    assert (agent.held, agent.regions) == ({"peers": 0, "lists": 0, "reads": 0}, [])
    wait_for(lambda: descriptors() <= opened)


def test_one_thing_that_cannot_be_freed_does_not_keep_the_rest(world, caplog):
    producer = world.workers(ranks(dense(), DENSE), staging_bytes=1 << 20)
    reader = world.workers(
        ranks(dense(layout="LBNHC"), DENSE), strategy=Strategy.STAGED, staging_bytes=1 << 20
    )
    (thread,), (agent,) = reader.threads, reader.agents
    release = agent.release_list

    def failing(handle):
        release(handle)
        raise RuntimeError("of the transport's own making")

    agent.release_list = failing
    thread.connect("P", producer.cards)
    tables = scattered_tables(dense(), 16, 1)
    thread.submit(ReadOrder("a", "P", LoadSpan(0, 16, 16), tables, tables, LeaseWord(0, 0, 1)))
    assert reader.result("a").failure is None
    thread.close(10.0)
    assert (agent.held, agent.regions) == ({"peers": 0, "lists": 0, "reads": 0}, [])
    assert "while closing" in caplog.text


def test_blocks_that_cannot_be_cleared_fail_that_read_only(world, monkeypatch):
    producer = world.workers(ranks(dense(), DENSE))
    reader = world.workers(ranks(dense(block=32), DENSE), 1000)
    reader.threads[0].connect("P", producer.cards)
    tables = scattered_tables(dense(), 16, 1)
    order = ReadOrder("a", "P", LoadSpan(0, 16, 16), tables, tables, LeaseWord(0, 0, 1))

    def failing(self, blocks, cells):
        raise RuntimeError("no such device")

    monkeypatch.setattr("kvferry.memory.copies.StagingCopies.clear", failing)
    reader.threads[0].submit(order)
    assert reader.result("a").failure == "blocks cannot be cleared: no such device"
    monkeypatch.undo()
    reader.threads[0].submit(replace(order, key="b"))
    assert reader.result("b").failure is None


@pytest.mark.parametrize("calls", [1, 2], ids=["data", "words"])
def test_a_read_at_which_a_lane_raises_fails_alone_and_the_lane_goes_on(world, caplog, calls):
    producer = world.workers(ranks(dense(), DENSE))
    reader = world.workers(ranks(dense(), DENSE), 1000, {"in_flight": 1}, strategy=Strategy.DIRECT)
    (agent,), left = reader.agents, iter(range(calls))
    state = agent.state

    def raising(handle):
        if next(left, None) == calls - 1:
            raise RuntimeError("nobody expects this")
        return state(handle)

    agent.state = raising
    reader.threads[0].connect("P", producer.cards)
    tables = scattered_tables(dense(), 16, 1)
    order = ReadOrder("a", "P", LoadSpan(0, 16, 16), tables, tables, LeaseWord(0, 0, 1))
    reader.threads[0].submit(order)
    assert reader.result("a").failure == "the lane failed: nobody expects this"
    assert "please report it" in caplog.text
    reader.threads[0].submit(replace(order, key="b"))
    assert reader.result("b").failure is None, "its place is free again"
    assert agent.held["reads"] == 0


def preparation(src, dst, families, outgoing=8 << 20, **limits):
    (theirs,), (ours,) = ranks(src, families), ranks(dst, families)
    card = RankCard(theirs, b"", 0, 100, 1, Outgoing("127.0.0.1", 1, 1 << 50, outgoing, 8))
    made = _RoutePreparation(ours, StagingArea(8 << 20, Region(0, 1)), card, Costs(), **limits)
    (template,) = build_templates([theirs], ours)
    for route in template.routes:
        made.add(route)
    return made


def test_a_route_is_verified_by_an_announced_image_or_refused_if_the_peer_would_not_take_it(monkeypatch):
    engines = dense(), dense(layout="LBNHC")
    made = preparation(*engines, DENSE, verify=True)
    for one in made.routes:
        announced = made.gathers[one.digest.announced_route]
        assert announced.parts == digest_image(one.route).src
        assert announced.image_stride == one.digest.stride
    assert [one.digest for one in preparation(*engines, DENSE).routes] == [None] * len(made.routes)
    with pytest.raises(TransferError, match=r"cannot be verified: a cell of .* and 0 strided copies of all"):
        preparation(*engines, DENSE, verify=True, max_strided_copies=0)
    monkeypatch.setattr(prepared_routes, "MAX_DIGEST_BYTES", made.routes[0].digest.stride - 1)
    with pytest.raises(TransferError, match="cannot be verified: a cell of"):
        preparation(*engines, DENSE, verify=True)


@pytest.mark.parametrize(("src", "dst"), [(784, 400), (2096, 1056), (5760, 2944), (16, 16)])
def test_prepared_lists_have_a_row_per_cell_of_a_block_and_an_entry_per_cell_of_the_pool(src, dst):
    made = preparation(dense(block=src), dense(block=dst, layout="LBNHC"), DENSE)
    (prepared_route,) = made.routes
    route, blocks = prepared_route.route, dense().num_blocks
    assert (route.src_cells, route.dst_cells) == (src // route.cell_tokens, dst // route.cell_tokens)
    rows = {"src": 0, "dst": 0}
    for way in prepared_route.methods:
        assert way.src.cells in (1, route.src_cells)
        assert way.dst.cells in (1, route.dst_cells)
        assert {way.src.blocks, way.dst.blocks} & {blocks} or way.method.landing is not None
        rows["src"] += way.rows * way.src.cells
        rows["dst"] += way.rows * way.dst.cells
    assert len(made.src.table()) == rows["src"]
    assert len(made.dst.table()) == rows["dst"]
    direct = prepared_route.direct
    assert direct is not None
    assert direct.rows * direct.src.cells * blocks <= route.run_count * route.src_cells * blocks
    # A peer is told a few numbers for each cell of our block and its own, not for each of their pairs.
    offsets = sum(len(part.at) for gather in made.gathers for part in gather.parts)
    assert offsets <= 2 * (route.src_cells + route.dst_cells)


def test_ways_that_lists_have_no_room_for_are_left_out():
    everything = preparation(dense(), dense(layout="LBNHC"), DENSE)
    assert [way.method.strategy for way in everything.routes[0].methods] == [
        "direct",
        "over-read",
        "staged",
        "staged",
    ]
    most = max(everything.src.entries, everything.dst.entries)
    for room in (most, most - 1, most // 2, most // 8):
        made = preparation(dense(), dense(layout="LBNHC"), DENSE, max_descriptors=room)
        assert max(made.src.entries, made.dst.entries) <= room or len(made.routes[0].methods) == 1
        assert (len(made.routes[0].methods) == 4) == (room == most)


def test_images_of_too_many_copies_are_not_introduced():
    copies = sum(
        len(p.nests) for g in preparation(dense(), dense(layout="LBNHC"), DENSE).gathers for p in g.parts
    )
    made = preparation(dense(), dense(layout="LBNHC"), DENSE, max_strided_copies=copies - 1)
    assert made.gathers == []
    assert {way.method.strategy for way in made.routes[0].methods} == {"direct", "over-read"}


@pytest.mark.parametrize(("images", "fits"), [(3, False), (4, True)])
def test_images_that_the_peer_has_no_room_for_are_not_staged(images, fits):
    staged = preparation(wide(layout="LBNHC"), wide(), WIDE).routes[0].methods[-1]
    assert staged.method.strategy is Strategy.STAGED
    made = preparation(wide(layout="LBNHC"), wide(), WIDE, outgoing=images * staged.stride)
    assert (made.routes[0].methods[-1].method.strategy is Strategy.STAGED) == fits == bool(made.gathers)


def test_entries_lie_where_their_images_and_blocks_do():
    made = preparation(dense(block=24), dense(layout="LBNHC"), DENSE)
    for prepared_list, ends in (
        (made.src, [(way.rows, way.src) for way in made.routes[0].methods]),
        (made.dst, [(way.rows, way.dst) for way in made.routes[0].methods]),
    ):
        reached = 0
        for rows, entries in ends:
            assert entries.base == reached
            reached += rows * entries.cells * entries.blocks
        assert reached == prepared_list.entries == prepared_list.table()[:, 3].sum()


def test_cells_that_only_move_staged_and_cannot_are_refused_in_words(monkeypatch):
    monkeypatch.setattr("kvferry.planning.strategy.MAX_RUNS", 1)
    monkeypatch.setattr("kvferry.planning.strategy._fetch_image", lambda *_: None)
    with pytest.raises(TransferError, match="can only move staged, and the peer does not gather"):
        preparation(dense(), dense(layout="LBNHC"), DENSE, max_strided_copies=0)


def test_a_worker_gathers_for_peers_of_its_settings_alone(world):
    """The key is not enough."""
    found = []
    for peers in (parse_allowed_peers(["10.0.0.0/8"], "127.0.0.1", None), ANY_PEER):
        outgoing = world.workers(ranks(dense(), DENSE), peers=peers).cards[0].outgoing
        with zmq.Context() as context, context.socket(zmq.DEALER) as reader:
            reader.linger = 0
            secure_client(reader, KEYS)
            reader.connect(f"tcp://127.0.0.1:{outgoing.port}")
            reader.send(encode(Gather(1, 0, 0, 1, bytes(4), bytes(4))))
            found.append(bool(reader.poll(500)))
    assert found == [False, True]


def test_a_read_that_ran_when_it_was_posted_ends_before_the_next_one_starts(world):
    """The second order waits in the queue meanwhile: it is submitted while the first one is posted."""
    src_tables, dst_tables = scattered_tables(dense(), 60, 1), scattered_tables(dense(), 60, 2)
    producer = world.workers(ranks(dense(), DENSE))
    reader = world.workers(ranks(dense(), DENSE), 1000)
    orders = [
        ReadOrder(key, "P", LoadSpan(0, 60, 60), src_tables, dst_tables, LeaseWord(0, 0, 1)) for key in "ab"
    ]

    def submit_second(_: object) -> None:
        if len(orders) == 2:
            reader.threads[0].submit(orders.pop())

    reader.agents[0].before_post = submit_second
    reader.threads[0].connect("P", producer.cards)
    reader.threads[0].submit(orders[0])
    assert all(reader.result(key).failure is None for key in "ab")
    words = [length == 8 for _, length in reader.agents[0].reads]
    assert words.index(True) < len(words) // 2, "the first lease word was read after both prompts"


def test_each_lane_reads_some_of_many_small_orders_whole_and_large_orders_are_split(world):
    spec = dense(blocks=120)
    src_tables, dst_tables = scattered_tables(spec, 1600, 1), scattered_tables(spec, 1600, 2)
    producer = world.workers(ranks(spec, DENSE))
    for rank, memory in zip(producer.ranks, producer.memories, strict=True):
        fill(rank, src_tables, memory)
    reader = world.workers(ranks(spec, DENSE), 1000, lanes=2, lane_bytes=1)
    reader.threads[0].connect("P", producer.cards)

    def read(spans: list[LoadSpan]) -> list[int]:
        """Read these parts of the prompt at once; return the number of READs of data of each lane."""
        before = reader.memories[0].bytes.copy()
        for agent in reader.agents:
            agent.reads.clear()
        keys = [f"{next(_names)}" for _ in spans]
        orders = zip(keys, spans, strict=True)
        reader.threads[0].submit(
            *(ReadOrder(key, "P", one, src_tables, dst_tables, LeaseWord(0, 0, 1)) for key, one in orders)
        )
        assert all(reader.result(key).failure is None for key in keys)
        whole = LoadSpan(min(one.begins for one in spans), max(one.ends for one in spans), 1601)
        check = expect(reader.ranks[0], producer.ranks, [whole], dst_tables, before, cleared=True)
        check.check(reader.memories[0].bytes)
        return [sum(length == 8 for _, length in agent.reads) for agent in reader.agents]

    parts = [LoadSpan(at, at + 400, 1601) for at in range(0, 1600, 400)]
    assert read(parts) == [2, 2]
    assert read([LoadSpan(0, 1600, 1601)]) == [1, 1]
    assert read([LoadSpan(0, 1200, 1601), LoadSpan(1200, 1600, 1601)]) in ([1, 2], [2, 1])
    bounds = [0, 800, 1072, 1344, 1600]
    unequal = [LoadSpan(first, end, 1601) for first, end in itertools.pairwise(bounds)]
    assert sorted(read(unequal)) == [1, 3]


@pytest.mark.parametrize(("lane_bytes", "lanes"), [(1 << 20, 1), (1, 2)])
def test_only_lanes_that_have_something_to_read_plan_an_order(world, monkeypatch, lane_bytes, lanes):
    spec = hybrid()
    tables = tuple(table[:1] if n == 2 else table for n, table in enumerate(scattered_tables(spec, 64, 1)))
    producer = world.workers(ranks(spec, HYBRID))
    reader = world.workers(ranks(spec, HYBRID), 1000, lanes=2, lane_bytes=lane_bytes)
    reader.threads[0].connect("P", producer.cards)
    planned, plan = [], ConnectedPeer.plan
    monkeypatch.setattr(ConnectedPeer, "plan", lambda peer, order: planned.append(order) or plan(peer, order))
    for key in "ab":
        reader.threads[0].submit(ReadOrder(key, "P", LoadSpan(0, 64, 65), tables, tables, LeaseWord(0, 0, 1)))
        assert reader.result(key).failure is None
    assert len(planned) == 2 * lanes
    both = [any(length == 8 for _, length in agent.reads) for agent in reader.agents]
    assert both == [True, True], "small orders take turns"
