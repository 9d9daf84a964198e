"""Events about the engine's blocks in tiers, over a real key table."""

from __future__ import annotations

from kvferry.cache.chunk_cache import PromptChunk
from kvferry.connector.engine import BlockRun, PlainRequest
from kvferry.connector.events import BlocksStored, EventStream
from kvferry.connector.tiers.events import BlockEvents
from kvferry.keys.chunk import ChunkKeys
from kvferry.tiers.index import KeyTable, TierKeys

CHUNK, BLOCK = 8, 4


def blocks_of(request, group, tokens):
    """Blocks whose hash is the text of all tokens up to their end."""
    first, last = tokens.start // BLOCK, tokens.stop // BLOCK
    ids = request.all_token_ids
    names = [bytes(ids[: (at + 1) * BLOCK]) for at in range(last)]
    if first >= last:
        return None
    parent = names[first - 1] if first else None
    return BlockRun(group, tuple(names[first:]), parent, tuple(ids[first * BLOCK : last * BLOCK]), BLOCK)


class World:
    """Two tiers over one table, and what listeners are told of them."""

    def __init__(self, **options):
        table = KeyTable()
        self.host, self.file = TierKeys(table), TierKeys(table)
        self.told = []
        tiers = {self.host.bit: "host", self.file.bit: "file"}
        self.events = BlockEvents(blocks_of, table, tiers, EventStream(self.told.append), BLOCK, **options)

    def remember(self, tokens, begin=0, groups=(0,)):
        """Remember the chunk of these tokens that starts at `begin`; return its key."""
        request = PlainRequest(request_id="a", prompt_token_ids=list(tokens))
        keys = ChunkKeys(CHUNK, list(tokens))
        chunk = PromptChunk(0, begin // CHUNK, keys.at(len(tokens)), len(tokens) - begin)
        spans = [(group, range(begin, len(tokens))) for group in groups]
        inner = range(begin + BLOCK, min(len(tokens) + 1, begin + CHUNK), BLOCK)
        self.events.remember(request, chunk, spans, (keys.at(end) for end in inner))
        return chunk.key

    def news(self):
        """(what, tier, group, ends of blocks in tokens) since the last call."""
        self.events.emit_changes()
        told, self.told[:] = list(self.told), []
        return [
            ("+", event.tier, event.blocks.group, [len(name) for name in event.blocks.hashes])
            if isinstance(event, BlocksStored)
            else ("-", event.tier, event.group, [len(name) for name in event.hashes])
            for event in told
        ]


def test_a_chunk_is_reported_for_each_tier_that_gains_and_loses_it():
    world = World()
    key = world.remember(range(8))
    assert world.news() == []
    world.host.add(key)
    assert world.news() == [("+", "host", 0, [4, 8])]
    world.file.add(key)
    world.host.discard(key)
    assert world.news() == [("-", "host", 0, [4, 8]), ("+", "file", 0, [4, 8])]
    world.host.add(key)
    assert world.news() == [("+", "host", 0, [4, 8])]


def test_a_chunk_that_a_tier_had_before_is_reported_when_a_request_has_its_tokens():
    world = World()
    key = ChunkKeys(CHUNK, list(range(8))).at(8)
    world.file.add(key)
    assert world.news() == []
    world.remember(range(8))
    assert world.news() == [("+", "file", 0, [4, 8])]
    world.remember(range(8))
    assert world.news() == []


def test_a_chunk_is_found_by_its_beginning_while_its_blocks_are_announced():
    world = World()
    first, second = (world.remember([*range(4), *rest]) for rest in (range(4), range(9, 13)))
    beginning = ChunkKeys(CHUNK, range(4)).at(4)

    def found():
        world.events.emit_changes()
        return [chunk.key for chunk in world.events.beginnings.chunks_with(beginning)]

    assert found() == []
    for key in (first, second):
        world.host.add(key)
    world.file.add(first)
    assert found() == [first, second]
    world.host.discard(first)
    world.host.discard(second)
    assert found() == [first]
    world.file.discard(first)
    assert found() == []
    world.host.add(second)
    assert found() == [second]
    world.events.start_anew()
    assert found() == []


def test_an_event_carries_the_tokens_and_the_block_before():
    world = World()
    world.host.add(world.remember(range(16), 8))
    world.events.emit_changes()
    (event,) = world.told
    assert event.blocks == BlockRun(
        0, (bytes(range(12)), bytes(range(16))), bytes(range(8)), tuple(range(8, 16)), BLOCK
    )


def test_blocks_are_reported_after_the_blocks_before_them():
    world = World()
    keys = [world.remember(range(end), end - CHUNK) for end in range(CHUNK, 16 * CHUNK + 1, CHUNK)]
    assert world.news() == []
    for key in reversed(keys):
        world.host.add(key)
    world.events.emit_changes()
    known = {None}
    for event in world.told:
        assert event.blocks.parent in known
        known.update(event.blocks.hashes)
    assert len(known) == 33


def test_chunks_are_forgotten_by_their_tokens_too():
    world = World(most_tokens=20)
    first, second, third = [world.remember(range(end), end - CHUNK) for end in (8, 16, 24)]
    for key in (first, second, third):
        world.host.add(key)
    assert world.news() == [("+", "host", 0, [12, 16]), ("+", "host", 0, [20, 24])]
    world.remember(range(8))
    assert world.news() == [("-", "host", 0, [12, 16]), ("+", "host", 0, [4, 8])]
    world.events.start_anew()
    world.news()
    for end in (16, 24):
        world.remember(range(end), end - CHUNK)
    assert world.news() == [("+", "host", 0, [12, 16]), ("+", "host", 0, [20, 24])]


def test_each_group_is_reported_by_itself():
    world = World()
    world.host.add(world.remember(range(8), groups=(0, 2)))
    assert world.news() == [("+", "host", 0, [4, 8]), ("+", "host", 2, [4, 8])]


def test_a_block_that_two_chunks_cover_is_stored_once_and_removed_with_the_last():
    world = World()
    tail, whole = world.remember(range(14), 8), world.remember(range(16), 8)
    world.host.add(tail)
    assert world.news() == [("+", "host", 0, [12])]
    world.host.add(whole)
    assert world.news() == [("+", "host", 0, [16])]
    world.host.discard(tail)
    assert world.news() == []
    world.host.discard(whole)
    assert sorted(world.news()[0][-1]) == [12, 16]


def test_a_block_that_moves_to_another_chunk_in_one_step_stays():
    world = World()
    tail, whole = world.remember(range(14), 8), world.remember(range(16), 8)
    world.host.add(tail)
    world.news()
    world.host.discard(tail)
    world.host.add(whole)
    assert world.news() == [("-", "host", 0, [12]), ("+", "host", 0, [12, 16])]


def test_a_chunk_that_comes_and_goes_between_two_steps_is_not_reported():
    world = World()
    key = world.remember(range(8))
    world.host.add(key)
    world.host.discard(key)
    assert world.news() == []


def test_a_chunk_too_many_is_reported_as_removed():
    world = World(most_chunks=2)
    keys = [world.remember([number] * 8) for number in range(2)]
    for key in keys:
        world.host.add(key)
    assert world.news() == [("+", "host", 0, [4, 8])] * 2
    world.remember([2] * 8)
    assert world.news() == [("-", "host", 0, [4, 8])]
    world.host.discard(keys[0])
    assert world.news() == []


def test_clearing_a_tier_removes_its_blocks_only():
    world = World()
    key = world.remember(range(8))
    world.host.add(key)
    world.file.add(key)
    world.news()
    world.host.clear()
    assert world.news() == [("-", "host", 0, [4, 8])]


def test_a_reset_removes_all_blocks_and_forgets_them():
    world = World()
    key = world.remember(range(8))
    world.host.add(key)
    world.file.add(key)
    world.news()
    world.events.start_anew()
    assert sorted(world.news()) == [("-", "file", 0, [4, 8]), ("-", "host", 0, [4, 8])]
    world.host.discard(key)
    assert world.news() == []


def test_chunks_without_a_whole_block_are_not_remembered():
    world = World()
    world.host.add(world.remember(range(3)))
    assert world.news() == []


def test_only_watched_chunks_are_recorded():
    table, tags = KeyTable(), {1}
    watch, bit = table.watch(tags), table.add_tier()
    table.update(1, add=bit)
    table.update(1, add=bit)
    table.update(2, add=bit)
    assert (list(watch.changed), watch.cleared) == ([1], False)
    table.clear(bit)
    assert watch.cleared
