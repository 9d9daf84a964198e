"""The producer's gatherer over real ZeroMQ on loopback, with a clock of its own."""

import errno
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import pytest
import zmq

from kvferry.common.errors import ConfigError
from kvferry.geometry import Region
from kvferry.geometry.rank import RankGeometry
from kvferry.memory.copies import StagingCopies
from kvferry.memory.image_digest import digest_bytes
from kvferry.planning.cell_copy import PoolCopies
from kvferry.planning.strided_copy import Loop, StridedCopy
from kvferry.transport import gather_server, security
from kvferry.transport.addresses import ANY_PEER, AllowedPeers, parse_allowed_peers
from kvferry.transport.costs import TransferSettings
from kvferry.transport.gather_client import (
    MAX_DIGEST_BYTES,
    AnnounceRoutes,
    Digested,
    Done,
    Gather,
    Gathered,
    GatherRoute,
    NotGathered,
    decode_reply,
)
from kvferry.transport.gather_server import ALLOCATION_SECONDS, WAIT_SECONDS, GatherServer
from kvferry.transport.lease import LeaseWords
from kvferry.transport.messages import PROTOCOL, encode
from kvferry.transport.staging import UNIT_BYTES, StagingArea
from support.keys import KEYS, OTHER_KEYS
from support.memory import memory
from support.waiting import wait_for

# The last block of memory is none of the engine's.
BLOCKS, STRIDE, LEASES, UNITS, INCARNATION = 8, 4096, 4, 3, 77
HOST = "127.0.0.1"
WIDE = UNIT_BYTES // 2
"""An image as far from the next as this: two of them take more than a unit."""


class World:
    """A pool of noise, a gatherer, and whoever speaks to it.

    Attributes:
        gather: called in place of a copy, with the copy that it stands for.
        digest: called before each digest.
    """

    def __init__(
        self,
        stack: ExitStack,
        units: int = UNITS,
        peers: AllowedPeers = ANY_PEER,
        shared: int = 0,
    ) -> None:
        self.stack, self.now = stack, 1000.0
        self.gather: Callable[[Callable[[], None]], object] = lambda copy: copy()
        self.digest: Callable[[], object] = lambda: None
        self.pool = np.random.default_rng(1).integers(0, 256, BLOCKS * STRIDE, np.uint8)
        self.address = int(self.pool.ctypes.data)
        region = Region(self.address, len(self.pool))
        self.area = StagingArea(units * UNIT_BYTES, region)
        self.words = LeaseWords(INCARNATION, LEASES)
        first = self.words.add(units + shared)
        self.shared = StagingArea(shared * UNIT_BYTES, region) if shared else None
        geometry = RankGeometry(0, 1, 0, 1, BLOCKS - 1, (), (region,))
        self.server = GatherServer(
            geometry,
            self.area,
            self.words,
            first,
            TransferSettings(host=HOST, keys=KEYS, peers=peers),
            lambda: self.now,
            make_copies=self._copies,
            shared=self.shared,
        )
        stack.callback(self.server.close)

    def _copies(self, *arguments) -> StagingCopies:
        world = self

        class Copies(StagingCopies):
            def gather(self, *order) -> None:
                world.gather(lambda: StagingCopies.gather(self, *order))

            def digest(self, *order) -> bytes:
                world.digest()
                return StagingCopies.digest(self, *order)

        return Copies(*arguments)

    def reader(self, *routes: GatherRoute, keys: security.Keys | None = KEYS) -> "Reader":
        reader = Reader(self, keys)
        if routes:
            reader.say(AnnounceRoutes(PROTOCOL, list(routes)))
        return reader

    def route(self, *copies: StridedCopy, stride: int = 64, blocks: int = BLOCKS, at=(0,)) -> GatherRoute:
        parts = (PoolCopies(at, tuple(copy.at(self.address, 0) for copy in copies)),)
        return GatherRoute(STRIDE, blocks, stride, parts)

    def images(self, position: int, stride: int, count: int) -> np.ndarray:
        whole = memory(self.area.region)
        return whole[position * stride : (position + count) * stride].reshape(count, stride)

    def word(self, gathered: Gathered) -> int:
        return int(self.words.array[gathered.word])

    def idle(self) -> None:
        """Everything said so far has been dealt with, and the area is looked after."""
        reader = self.reader(self.route(StridedCopy(0, 0, 8)))
        reader.say(ask(1, blocks=(0,)))
        assert isinstance(reader.hear(), NotGathered)


class Reader:
    def __init__(self, world: World, keys: security.Keys | None) -> None:
        context = zmq.Context()
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        if keys is not None:
            security.secure_client(self._socket, keys)
        self._socket.connect(f"tcp://{HOST}:{world.server.port}")
        world.stack.callback(context.term)
        world.stack.callback(self._socket.close)

    def say(self, *messages) -> None:
        for message in messages:
            self._socket.send(message if isinstance(message, bytes) else encode(message))

    def frames(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def hear(self, seconds: float = 60.0):
        return decode_reply(self._socket.recv()) if self._socket.poll(seconds * 1000) else None


def closed(server: GatherServer) -> bool:
    """Return whether the port of the server is free again."""
    with socket.socket() as other:
        return other.connect_ex((HOST, server.port)) == errno.ECONNREFUSED


def ask(
    segment: int, blocks=(1,), route: int = 0, slot: int = 0, generation: int = 0, cells=None, shared=False
) -> Gather:
    ids, places = (np.array(each, np.int32).tobytes() for each in (blocks, cells or [0] * len(blocks)))
    return Gather(segment, route, slot, generation, ids, places, shared)


def ask_digest(segment: int, blocks=(1,), route: int = 0, slot: int = 0, cells=None) -> Gather:
    ids, places = (np.array(each, np.int32).tobytes() for each in (blocks, cells or [0] * len(blocks)))
    return Gather(segment, route, slot, 0, ids, places, digest=True)


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def world(stack):
    return World(stack)


def test_gathered_images_hold_the_bytes_that_the_copies_name(world):
    reader = world.reader(world.route(StridedCopy(16, 8, 4, (Loop(3, 100, 12),))))
    before = memory(world.area.region).copy()
    reader.say(ask(5, (3, 6, 1)))
    found = reader.hear()
    assert isinstance(found, Gathered)
    assert (found.segment, world.word(found)) == (5, INCARNATION << 32 | found.generation)
    assert found.word == LEASES
    expected = before[found.position * 64 :][: 3 * 64].reshape(3, 64).copy()
    for number, block in enumerate((3, 6, 1)):
        for row in range(3):
            at = block * STRIDE + 16 + 100 * row
            expected[number, 8 + 12 * row :][:4] = world.pool[at : at + 4]
    assert (world.images(found.position, 64, 3) == expected).all()


@pytest.mark.parametrize("cells", [(0, 1, 2, 0, 1), (2, 0, 1, 2, 0), (1, 1, 0, 2, 0)])
def test_cells_lie_anywhere_in_their_blocks(world, cells):
    one = world.route(StridedCopy(0, 0, 40), at=(0, 1000, 3000))
    other = world.route(StridedCopy(7, 40, 24), at=(0, 24, 48))
    both = GatherRoute(STRIDE, BLOCKS, 64, one.parts + other.parts)
    reader = world.reader(both)
    reader.say(ask(1, (1, 2, 3, 4, 5), cells=cells))
    found = world.images(reader.hear().position, 64, 5)
    for number, (block, place) in enumerate(zip((1, 2, 3, 4, 5), cells, strict=True)):
        first = block * STRIDE + (0, 1000, 3000)[place]
        second = block * STRIDE + 7 + 24 * place
        assert (found[number, :40] == world.pool[first : first + 40]).all()
        assert (found[number, 40:] == world.pool[second : second + 24]).all()


def test_cells_are_gathered_into_the_memory_that_the_reader_has_mapped_if_it_asks_so(stack):
    world = World(stack, shared=2)
    reader = world.reader(world.route(StridedCopy(8, 0, 64), stride=WIDE))
    before = memory(world.area.region).copy()
    reader.say(ask(1, (3,), shared=True), ask(2, (4,), shared=True))
    first, second = reader.hear(), reader.hear()
    images = memory(world.shared.region).reshape(-1, WIDE)
    for found, block in ((first, 3), (second, 4)):
        assert (images[found.position, :64] == world.pool[block * STRIDE + 8 :][:64]).all()
    assert (memory(world.area.region) == before).all()
    assert (first.word, second.word) == (LEASES + UNITS, LEASES + UNITS + 1)
    reader.say(ask(3, (5,), shared=True), ask(4, (6,)), Done(1))
    third, other = reader.hear(), reader.hear()
    assert (third.segment, third.word) == (3, first.word), "the room of the first"
    assert world.word(first) != INCARNATION << 32 | first.generation
    assert (other.segment, other.word) == (4, LEASES)
    assert (world.shared.used_units, world.area.used_units) == (2, 1)


def test_cells_for_memory_that_nobody_can_map_are_refused(world):
    reader = world.reader(world.route(StridedCopy(0, 0, 8)))
    reader.say(ask(1, shared=True))
    assert reader.hear() == NotGathered(1, "this worker has no memory that others can map")


def test_an_ended_lease_is_refused_and_nothing_is_gathered(world):
    copies = []
    world.gather = lambda copy: copies.append(copy())
    world.words.end([2])
    reader = world.reader(world.route(StridedCopy(0, 0, 8)))
    reader.say(ask(1, slot=2), ask(2, slot=2, generation=1), ask(3, slot=LEASES), ask(4, slot=1 << 30))
    assert reader.hear() == NotGathered(1, "the lease has ended")
    assert isinstance(reader.hear(), Gathered)
    assert reader.hear() == NotGathered(3, "the lease has ended"), "the area's words are no leases"
    assert reader.hear() == NotGathered(4, "the lease has ended")
    assert world.area.used_units == len(copies) == 1


def test_a_lease_that_ends_while_its_blocks_are_gathered_is_refused_and_gives_its_room_back(world):
    def ending(copy):
        copy()
        world.words.end([0])

    world.gather = ending
    reader = world.reader(world.route(StridedCopy(0, 0, 8)))
    reader.say(ask(1))
    assert reader.hear() == NotGathered(1, "the lease has ended")
    assert world.area.used_units == 0


def test_a_digest_is_of_the_cells_of_the_blocks_and_takes_no_room(world):
    reader = world.reader(world.route(StridedCopy(16, 0, 4, (Loop(3, 100, 4),)), at=(0, 1000)))
    reader.say(ask_digest(5, (3, 6, 1), cells=[1, 0, 1]))
    expected = b"".join(
        bytes(world.pool[block * STRIDE + at + 16 + 100 * row :][:4])
        for block, at in ((3, 1000), (6, 0), (1, 1000))
        for row in range(3)
    )
    images = b"".join(expected[at : at + 12].ljust(64, b"\0") for at in (0, 12, 24))
    digest = digest_bytes(np.frombuffer(images, np.uint8)[None], np.zeros(1, np.int64)) % (1 << 64)
    assert reader.hear() == Digested(5, digest.to_bytes(8, "little"))
    assert world.area.used_units == 0


def test_a_lease_that_ends_before_or_while_its_blocks_are_digested_gets_no_digest(world):
    reader = world.reader(world.route(StridedCopy(0, 0, 8)))
    world.words.end([2])
    reader.say(ask_digest(1, slot=2))
    assert reader.hear() == NotGathered(1, "the lease has ended")
    world.digest = lambda: world.words.end([0])
    reader.say(ask_digest(2))
    assert reader.hear() == NotGathered(2, "the lease has ended")


def test_a_digest_that_fails_is_refused_and_the_server_goes_on(world):
    reader = world.reader(world.route(StridedCopy(0, 0, 8)))
    world.digest = lambda: failing(None)
    reader.say(ask_digest(1))
    assert reader.hear() == NotGathered(1, "the digest failed: no such device")
    world.digest = lambda: None
    reader.say(ask_digest(2))
    assert isinstance(reader.hear(), Digested)


def test_requests_for_digests_of_too_many_bytes_or_other_blocks_are_refused(world):
    whole = 1 << 28
    reader = world.reader(world.route(StridedCopy(0, 0, 8), stride=whole))
    reader.say(ask_digest(1, (1,) * 4), ask_digest(2, (1,) * 5), ask_digest(3, (0,)), ask_digest(4, route=1))
    assert isinstance(reader.hear(), Digested)
    assert reader.hear() == NotGathered(
        2, f"{5 * whole} bytes to digest, at most {MAX_DIGEST_BYTES} per request"
    )
    assert reader.hear() == NotGathered(3, "blocks 0 to 0 are not in the pool")
    assert reader.hear() == NotGathered(4, "there is no route 1")


def failing(_):
    raise RuntimeError("no such device")


def test_a_copy_that_fails_is_refused_and_gives_its_room_back(world):
    world.gather = failing
    reader = world.reader(world.route(StridedCopy(0, 0, 8)))
    reader.say(ask(1))
    assert reader.hear() == NotGathered(1, "the copy failed: no such device")
    assert world.area.used_units == 0
    world.gather = lambda copy: copy()
    reader.say(ask(2))
    assert isinstance(reader.hear(), Gathered), "it serves on"


def test_a_copy_that_fails_when_its_turn_comes_holds_up_nobody(world):
    reader = world.reader(world.route(StridedCopy(0, 0, 8), stride=WIDE))
    reader.say(ask(1, (1,) * 5), ask(2), ask(3))
    assert reader.hear().segment == 1
    faults = iter([True])
    world.gather = lambda copy: failing(copy) if next(faults, False) else copy()
    reader.say(Done(1))
    assert reader.hear() == NotGathered(2, "the copy failed: no such device")
    assert isinstance(reader.hear(), Gathered)


@pytest.mark.parametrize(
    ("order", "says"),
    [
        (ask(1, route=1), "there is no route 1"),
        (ask(1, cells=(1,)), "cells 1 to 1 of 1"),
        (ask(1, cells=(-1,)), "cells -1 to -1 of 1"),
        (ask(1, (3, 0)), "blocks 0 to 3 are not in the pool"),
        (ask(1, (-1, 3)), "blocks -1 to 3 are not in the pool"),
        (ask(1, (BLOCKS - 1,)), f"blocks {BLOCKS - 1} to {BLOCKS - 1} are not in the pool"),
        (ask(1, (BLOCKS,)), f"blocks {BLOCKS} to {BLOCKS} are not in the pool"),
        (ask(1, (1,) * (UNITS * 16384)), "the images of one request have no room in the staging area"),
    ],
)
def test_an_impossible_request_is_refused_with_its_reason(world, order, says):
    reader = world.reader(world.route(StridedCopy(0, 0, 8)))
    reader.say(order)
    assert reader.hear() == NotGathered(1, says)
    assert world.area.used_units == 0


def test_blocks_past_those_introduced_are_not_in_the_pool(world):
    reader = world.reader(world.route(StridedCopy(0, 0, 8), blocks=4))
    reader.say(ask(1, (3,)), ask(2, (4,)))
    assert isinstance(reader.hear(), Gathered)
    assert reader.hear() == NotGathered(2, "blocks 4 to 4 are not in the pool")


def test_a_chunk_of_a_name_that_is_held_is_refused_and_the_first_stays(world):
    reader = world.reader(world.route(StridedCopy(0, 0, 8)))
    reader.say(ask(1), ask(1))
    first = reader.hear()
    assert reader.hear() == NotGathered(1, "a chunk of that name is held")
    assert world.word(first) == INCARNATION << 32 | first.generation


def test_a_reader_without_routes_is_asked_to_announce_them(world):
    reader = world.reader()
    for number, order in enumerate((ask(0), ask_digest(1))):
        reader.say(order)
        assert reader.hear() == NotGathered(number, "the reader has not introduced itself", unknown=True)


@pytest.mark.parametrize(
    "copy",
    [
        StridedCopy(-(1 << 40), 0, 8),
        StridedCopy(1 << 62, 0, 8),
        StridedCopy(STRIDE, 0, 8),
        StridedCopy(0, 0, 8, (Loop(2, STRIDE, 8),)),
        StridedCopy(0, 0, 8, (Loop(2, (1 << 63) - 1, 8),)),
    ],
)
def test_copies_that_leave_the_pool_introduce_nobody(world, copy):
    reader = world.reader(world.route(copy))
    reader.say(ask(1))
    assert reader.hear().unknown


@pytest.mark.parametrize(("at", "inside"), [((0, STRIDE - 8), True), ((STRIDE - 7, 0), False)])
def test_cells_that_leave_the_pool_introduce_nobody(world, at, inside):
    reader = world.reader(world.route(StridedCopy(0, 0, 8), at=at))
    reader.say(ask(1))
    assert isinstance(reader.hear(), Gathered) == inside


def test_without_room_a_request_waits_until_there_is_some(world):
    reader = world.reader(world.route(StridedCopy(0, 0, 8), stride=WIDE))
    reader.say(ask(1, (1,) * 5), ask(2, (2,)))
    first = reader.hear()
    assert reader.hear(0.3) is None
    reader.say(Done(1))
    second = reader.hear()
    assert (second.segment, type(second)) == (2, Gathered)
    assert world.word(first) != INCARNATION << 32 | first.generation, "its word was raised before"
    assert (world.images(second.position, WIDE, 1)[0, :8] == world.pool[2 * STRIDE :][:8]).all()


def test_a_request_that_raises_once_there_is_room_ends_the_waiting_of_no_other(world):
    reader = world.reader(world.route(StridedCopy(0, 0, 8), stride=WIDE))
    reader.say(ask(1, (1,) * 5), ask(2, (2,)), ask(3, (3,)))
    assert reader.hear().segment == 1
    assert reader.hear(0.3) is None, "both wait"
    allocate, faults = world.area.allocate, iter([True])

    def raising(*arguments):
        if next(faults, False):
            raise RuntimeError("nobody expects this")
        return allocate(*arguments)

    world.area.allocate = raising
    reader.say(Done(1))
    third = reader.hear()
    assert (third.segment, type(third)) == (3, Gathered)


def test_small_requests_do_not_overtake_a_large_one(world):
    large, small = (world.reader(world.route(StridedCopy(0, 0, 8), stride=WIDE)) for _ in range(2))
    small.say(ask(1))
    assert isinstance(small.hear(), Gathered)
    large.say(ask(1, (1,) * 5))
    assert large.hear(0.3) is None
    small.say(ask(2))
    assert small.hear(0.3) is None
    small.say(Done(1))
    assert isinstance(large.hear(), Gathered)
    large.say(Done(1))
    assert isinstance(small.hear(), Gathered)


def test_a_request_that_is_no_longer_wanted_does_not_wait_on(world):
    reader = world.reader(world.route(StridedCopy(0, 0, 8), stride=WIDE))
    reader.say(ask(1, (1,) * 5), ask(2), ask(3), Done(2), Done(1))
    assert [reader.hear().segment, reader.hear().segment] == [1, 3]


def test_a_request_that_waits_in_vain_is_refused(world):
    reader = world.reader(world.route(StridedCopy(0, 0, 8), stride=WIDE))
    reader.say(ask(1, (1,) * 5), ask(2))
    assert reader.hear().segment == 1
    assert reader.hear(0.3) is None
    world.now += WAIT_SECONDS + 1
    assert reader.hear() == NotGathered(2, f"no room in the staging area for {WAIT_SECONDS:g} s")


def test_room_of_a_silent_reader_is_reclaimed_and_its_word_raised_before(world):
    silent, other = (world.reader(world.route(StridedCopy(0, 0, 8), stride=WIDE)) for _ in range(2))
    silent.say(ask(1, (1,) * 5))
    held = silent.hear()
    world.now += ALLOCATION_SECONDS - 2
    other.say(ask(1, (2,)))
    assert other.hear(0.3) is None
    assert world.word(held) == INCARNATION << 32 | held.generation
    world.now += 1.5
    assert other.hear(0.5) is None, "not before its time"
    world.now += 1.5
    assert isinstance(other.hear(), Gathered)
    assert world.word(held) != INCARNATION << 32 | held.generation


def test_room_of_a_silent_reader_is_reclaimed_while_others_speak_without_pause(world):
    silent, talker = (world.reader(world.route(StridedCopy(0, 0, 8))) for _ in range(2))
    silent.say(ask(1))
    held = silent.hear()
    world.now += ALLOCATION_SECONDS + 1
    for number in range(1, 40):
        talker.say(ask(number), Done(number))
        assert isinstance(talker.hear(), Gathered)
        if world.word(held) != INCARNATION << 32 | held.generation:
            return
    pytest.fail("a reader that is gone holds its room for as long as others speak")


def test_the_word_of_a_part_of_the_area_that_was_given_often_is_said_in_full(world):
    generation = 0x81234567
    world.words.array[LEASES] = INCARNATION << 32 | generation
    reader = world.reader(world.route(StridedCopy(0, 0, 8)))
    reader.say(ask(1))
    found = reader.hear()
    assert (found.word, found.generation) == (LEASES, generation)


def test_done_for_a_chunk_that_nobody_has_changes_nothing(world):
    reader, stranger = world.reader(world.route(StridedCopy(0, 0, 8))), world.reader()
    reader.say(ask(1))
    held = reader.hear()
    reader.say(Done(2))
    stranger.say(Done(1))
    world.idle()
    assert world.word(held) == INCARNATION << 32 | held.generation
    assert world.area.used_units == 1


def test_done_raises_the_word_and_frees_the_room(world):
    reader = world.reader(world.route(StridedCopy(0, 0, 8)))
    reader.say(ask(1))
    held = reader.hear()
    reader.say(Done(1))
    world.idle()
    assert world.word(held) == INCARNATION << 32 | held.generation + 1
    assert world.area.used_units == 0


def test_room_is_free_only_once_its_word_is_raised(world):
    reader = world.reader(world.route(StridedCopy(0, 0, 8)))
    reader.say(ask(1))
    held, seen = reader.hear(), []
    inner = world.area.free
    world.area.free = lambda allocation: seen.append(world.word(held)) or inner(allocation)
    reader.say(Done(1))
    world.idle()
    assert seen == [INCARNATION << 32 | held.generation + 1]


def test_another_introduction_frees_what_was_held(world):
    reader = world.reader(world.route(StridedCopy(0, 0, 8)))
    reader.say(ask(1))
    held = reader.hear()
    reader.say(AnnounceRoutes(PROTOCOL, [world.route(StridedCopy(8, 0, 8))]), ask(1))
    again = reader.hear()
    assert world.word(held) != INCARNATION << 32 | held.generation
    assert (world.images(again.position, 64, 1)[0, :8] == world.pool[STRIDE + 8 :][:8]).all()
    assert world.area.used_units == 1


def test_the_first_of_too_many_readers_is_forgotten(stack, monkeypatch):
    monkeypatch.setattr(gather_server, "MAX_READERS", 2)
    world = World(stack)
    readers = []
    for _ in range(3):
        readers.append(world.reader(world.route(StridedCopy(0, 0, 8))))
        readers[-1].say(ask(1))
        assert isinstance(readers[-1].hear(), Gathered)
    assert world.area.used_units == 2
    readers[0].say(ask(2))
    assert readers[0].hear().unknown
    readers[1].say(ask(2))
    assert isinstance(readers[1].hear(), Gathered)


def test_more_than_may_wait_are_refused(stack, monkeypatch):
    monkeypatch.setattr(gather_server, "MAX_WAITING", 1)
    world = World(stack)
    reader = world.reader(world.route(StridedCopy(0, 0, 8), stride=WIDE))
    reader.say(ask(1, (1,) * 5), ask(2), ask(3))
    assert reader.hear().segment == 1
    assert reader.hear() == NotGathered(3, "1 requests are waiting already")


def test_garbage_is_dropped_and_others_are_served(world):
    reader = world.reader(world.route(StridedCopy(0, 0, 8)))
    for garbage in (
        b"",
        b"\xc1",
        bytes(1000),
        encode(NotGathered(1, "")),
        np.random.default_rng(2).bytes(300),
    ):
        reader.say(garbage)
    reader.frames(b"a", b"b", b"c")
    reader.say(ask(1))
    assert reader.hear().segment == 1


def test_keys_let_in_whoever_has_them_and_nobody_else(stack):
    world = World(stack)
    route = world.route(StridedCopy(0, 0, 8))
    others = [world.reader(route, keys=OTHER_KEYS), world.reader(route, keys=None)]
    friend = world.reader(route)
    for reader in (*others, friend):
        reader.say(ask(1))
    assert isinstance(friend.hear(), Gathered)
    assert all(reader.hear(0.3) is None for reader in others)


def test_a_reader_that_is_no_peer_is_not_let_in_even_with_the_key(stack):
    world = World(stack, peers=parse_allowed_peers(["10.0.0.0/8"], HOST, None))
    reader = world.reader(world.route(StridedCopy(0, 0, 8)))
    reader.say(ask(1))
    assert reader.hear(0.5) is None


def test_an_address_of_another_machine_is_refused_in_words(stack):
    world = World(stack)
    settings = TransferSettings(host="203.0.113.1", keys=KEYS)
    with pytest.raises(ConfigError, match=r"gather channel: cannot listen on 203\.0\.113\.1: .*; set host"):
        GatherServer(RankGeometry(0, 1, 0, 1, 1, (), ()), world.area, world.words, LEASES, settings)


def test_closing_ends_the_thread_with_messages_still_to_come(world):
    reader = world.reader(world.route(StridedCopy(0, 0, 8)))
    reader.say(*[ask(number) for number in range(100)])
    world.server.close()
    assert closed(world.server)


def test_closing_leaves_a_copy_behind_that_hangs(world, caplog):
    begun, let_go = threading.Event(), threading.Event()
    world.gather = lambda _: begun.set() or let_go.wait(60)
    reader = world.reader(world.route(StridedCopy(0, 0, 8)))
    reader.say(ask(1))
    assert begun.wait(60)
    world.server.close(patience_seconds=0.1)
    assert not closed(world.server)
    assert "still busy after 0.1 s, left behind" in caplog.text
    let_go.set()
    wait_for(lambda: closed(world.server))  # it ends by itself once the copy does


def test_readers_with_very_many_cells_are_forgotten_the_oldest_first(stack, monkeypatch):
    monkeypatch.setattr(gather_server, "MAX_READERS_CELLS", 100)
    world = World(stack)
    readers = []
    for _ in range(2):
        readers.append(world.reader(world.route(StridedCopy(0, 0, 8), at=tuple(range(60)))))
        readers[-1].say(ask(1))
        assert isinstance(readers[-1].hear(), Gathered)
    readers[0].say(ask(2))
    assert readers[0].hear().unknown


def test_waiting_requests_are_bounded_by_their_size_and_by_their_reader(stack, monkeypatch):
    monkeypatch.setattr(gather_server, "MAX_WAITING_OF_READER", 2)
    monkeypatch.setattr(gather_server, "MAX_WAITING_BYTES", 100)
    world = World(stack, units=1)
    one, other = (world.reader(world.route(StridedCopy(0, 0, 8), stride=WIDE)) for _ in range(2))
    one.say(ask(1))
    assert isinstance(one.hear(), Gathered)
    one.say(ask(2), ask(3), ask(4))
    assert "2 requests are waiting" in one.hear().reason
    other.say(ask(1, (1,) * 50))
    assert "2 requests are waiting" in other.hear().reason
    other.say(ask(2))
    assert other.hear(0.3) is None, "it waits, though another reader has as many as it may"
