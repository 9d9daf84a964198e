"""The index of the blocks that engines have in host memory, from vLLM's own events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from kvferry.tools.serving.router.block_index import BlockIndex, HostBlocks
from kvferry.tools.serving.router.kv_events import decode_batch
from support.kv_events import batch, removed, stored

PROMPT = list(range(100, 164))


def apply(index: BlockIndex, engine: HostBlocks, *events: Any) -> None:
    for event in decode_batch(batch(*events)):
        index.apply(engine, event)


def lengths(index: BlockIndex, tokens: Sequence[int], *engines: HostBlocks, **of: Any) -> list[int]:
    found = index.longest(tokens, of.get("model"), of.get("salt"))
    return [found.get(engine, 0) for engine in engines]


@pytest.fixture
def index() -> BlockIndex:
    return BlockIndex()


@pytest.fixture
def engine(index: BlockIndex) -> HostBlocks:
    return index.add_engine()


def test_each_engine_has_the_prefix_that_it_has_published_in_blocks_of_its_own_size(index):
    small, large = index.add_engine(), index.add_engine()
    apply(index, small, stored(PROMPT[:32], 4, seed="small"))
    apply(index, large, stored(PROMPT[:48], 16, seed="large"), stored(PROMPT[48:], 16, "large", PROMPT[:48]))
    assert lengths(index, PROMPT, small, large) == [32, 64]
    assert lengths(index, PROMPT[:20], small, large) == [20, 16]
    assert lengths(index, [1, *PROMPT[1:]], small, large) == [0, 0]
    assert lengths(index, [*PROMPT[:40], 1, *PROMPT[41:]], small, large) == [32, 32]


def test_a_removed_block_ends_the_prefix_of_its_engine_only(index):
    one, other = index.add_engine(), index.add_engine()
    for engine in (one, other):
        apply(index, engine, stored(PROMPT, 16))
    apply(index, one, removed(PROMPT[16:32], 16, before=PROMPT[:16]))
    assert lengths(index, PROMPT, one, other) == [16, 64]
    index.clear(other)
    assert lengths(index, PROMPT, one, other) == [16, 0]
    assert len(index) == 3


def test_hashes_of_64_bits_are_the_ends_of_whole_ones(index, engine):
    apply(index, engine, stored(PROMPT[:32], 16))
    whole = stored(PROMPT[32:], 16, before=PROMPT[:32])
    short = msgspec.structs.replace(
        whole,
        parent_block_hash=int.from_bytes(whole.parent_block_hash[-8:]),
        block_hashes=[int.from_bytes(one[-8:]) for one in whole.block_hashes],
    )
    apply(index, engine, short)
    assert lengths(index, PROMPT, engine) == [64]


@pytest.mark.parametrize(
    "other",
    [
        {"medium": "GPU", "ownership": None},
        {"medium": "STORAGE", "ownership": "file"},
        {"ownership": "another connector's"},
        {"kv_cache_spec_kind": "sliding_window"},
        {"kv_cache_spec_kind": "mamba"},
    ],
    ids=str,
)
def test_only_whole_prefixes_in_host_memory_count(index, engine, other):
    apply(index, engine, msgspec.structs.replace(stored(PROMPT, 16), **other))
    assert lengths(index, PROMPT, engine) == [0]


def test_one_group_stands_for_all(index, engine):
    apply(index, engine, stored(PROMPT, 16, group_idx=1), stored(PROMPT, 16, group_idx=3))
    apply(index, engine, removed(PROMPT[32:48], 16, before=PROMPT[:32], group_idx=3))
    assert lengths(index, PROMPT, engine) == [64]
    apply(index, engine, removed(PROMPT[32:48], 16, before=PROMPT[:32], group_idx=1))
    assert lengths(index, PROMPT, engine) == [32]


def test_salts_and_adapters_have_blocks_of_their_own(index, engine):
    salted = [("secret",), None, None, None]
    adapted = [("adapter",)] * 4
    both = [("adapter", "secret"), *adapted[1:]]
    for keys in (salted, adapted, both):
        apply(index, engine, stored(PROMPT, 16, seed=str(keys), extra_keys=keys))
        index_of = {"salt": "secret" if keys is not adapted else None}
        index_of["model"] = "adapter" if keys is not salted else "base"
        assert lengths(index, PROMPT, engine, **index_of) == [64]
        assert lengths(index, PROMPT, engine) == [0]
        assert lengths(index, PROMPT, engine, model="base", salt="other") == [0]
        index.clear(engine)


def test_blocks_whose_beginning_is_not_known_do_not_count(index, engine):
    apply(index, engine, stored(PROMPT[32:], 16, before=PROMPT[:32]))
    assert lengths(index, PROMPT[32:], engine) == lengths(index, PROMPT, engine) == [0]
    assert len(index) == 0


def test_a_full_index_drops_the_oldest_blocks_but_for_those_that_prompts_have_had():
    index = BlockIndex(most_blocks=8)
    engine, other = index.add_engine(), index.add_engine()
    prompts = [[number, *PROMPT[1:]] for number in range(3)]
    for prompt in prompts[:2]:
        apply(index, engine, stored(prompt, 16))
    assert lengths(index, prompts[0], engine) == [64]
    apply(index, engine, stored(prompts[2], 16))
    assert [lengths(index, prompt, engine) for prompt in prompts] == [[64], [0], [64]]
    apply(index, other, stored(prompts[1], 16))
    assert len(index) == 8
    index.remove_engine(engine)
    assert lengths(index, prompts[1], other) == [64]
    index.remove_engine(other)
    assert len(index) == 0
    assert not index.longest(prompts[1], None, None)


def test_an_engine_that_is_added_is_not_taken_for_one_that_was_removed(index, engine):
    apply(index, engine, stored(PROMPT, 16))
    keeps = index.add_engine()
    index.remove_engine(engine)
    assert lengths(index, PROMPT, index.add_engine(), keeps) == [0, 0]
