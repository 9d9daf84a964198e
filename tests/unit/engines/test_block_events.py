"""Events about blocks in vLLM's format, decoded again as a router decodes them."""

from __future__ import annotations

import time
from array import array
from types import SimpleNamespace

import msgspec
import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request

from kvferry.connector.events import BlocksRemoved, BlocksStored, LateBlocks
from kvferry.engines.vllm.compat.block_events import BlockEventPublisher
from kvferry.engines.vllm.compat.requests import VLLMRequest
from kvferry.engines.vllm.compat.specs import scheduled_groups

HASHED, SHAPE = 16, {"num_kv_heads": 1, "head_size": 8, "dtype": None}
GROUPS = [
    KVCacheGroupSpec(["one"], FullAttentionSpec(block_size=16, **SHAPE)),
    KVCacheGroupSpec(["two"], SlidingWindowSpec(block_size=32, sliding_window=64, **SHAPE)),
]


@pytest.fixture
def publisher():
    return BlockEventPublisher(GROUPS)


def request(tokens, **options):
    init_none_hash(sha256)
    raw = Request(
        "a",
        list(tokens),
        SamplingParams(),
        None,
        block_hasher=get_request_block_hasher(HASHED, sha256),
        **options,
    )
    return VLLMRequest(raw, HASHED)


def decoded(publisher):
    """What a router gets: through vLLM's encoder and its own schema."""
    batch = KVEventBatch(ts=time.time(), events=publisher.take())
    return msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch).events


def test_blocks_have_the_hashes_and_the_parent_of_vllms_own_prefix_cache(publisher):
    one = request(range(100))
    run = publisher.describe(one, 0, range(32, 100))
    assert run.hashes == tuple(one.raw.block_hashes[2:6])
    assert (run.parent, run.tokens) == (one.raw.block_hashes[1], array("I", range(32, 96)))
    assert run.tokens.itemsize == 4
    wide = publisher.describe(one, 1, range(32, 100))
    assert wide.hashes == (one.raw.block_hashes[3], one.raw.block_hashes[5])
    assert publisher.describe(one, 1, range(48, 64)) == publisher.describe(one, 1, range(32, 64))
    assert publisher.describe(one, 1, range(96, 100)) is None


def test_a_stored_block_says_where_it_is_and_what_it_holds(publisher):
    one = request(range(64), cache_salt="tenant")
    publisher(BlocksStored(0.0, "host", publisher.describe(one, 0, range(32))))
    publisher(BlocksStored(0.0, "object", publisher.describe(one, 1, range(64))))
    publisher(LateBlocks(0.0, 1))
    host, remote = decoded(publisher)
    assert isinstance(host, BlockStored)
    assert (host.medium, host.locality, host.ownership) == ("CPU", "LOCAL", "host")
    assert (host.token_ids, host.block_size, host.group_idx) == (list(range(32)), 16, 0)
    assert (host.parent_block_hash, host.kv_cache_spec_kind) == (None, "full_attention")
    assert host.extra_keys == [("tenant",), None]
    assert (remote.medium, remote.locality, remote.ownership) == ("STORAGE", "REMOTE", "object")
    assert (remote.kv_cache_spec_kind, remote.kv_cache_spec_sliding_window) == ("sliding_window", 64)
    assert publisher.take() == []


def test_a_removed_block_names_the_same_hash_and_tier(publisher):
    one = request(range(32))
    run = publisher.describe(one, 0, range(32))
    publisher(BlocksStored(0.0, "file.2", run))
    publisher(BlocksRemoved(0.0, "file.2", 0, run.hashes))
    stored, removed = decoded(publisher)
    assert isinstance(removed, BlockRemoved)
    assert removed.block_hashes == stored.block_hashes
    for name in ("medium", "locality", "ownership", "group_idx"):
        assert getattr(removed, name) == getattr(stored, name)


def test_without_prefix_caching_there_are_no_blocks_to_name(publisher):
    unhashed = VLLMRequest(request(range(32)).raw, None)
    assert publisher.describe(unhashed, 0, range(32)) is None


def test_a_block_that_ranks_share_has_the_tokens_of_all_of_them():
    engine = SimpleNamespace(parallel_config=SimpleNamespace(decode_context_parallel_size=2))
    publisher = BlockEventPublisher(scheduled_groups(engine, KVCacheConfig(8, [], GROUPS[:1])))
    one = request(range(100))
    run = publisher.describe(one, 0, range(32, 100))
    assert run.hashes == (one.raw.block_hashes[3], one.raw.block_hashes[5])
    assert (run.block_tokens, run.tokens) == (32, array("I", range(32, 96)))
