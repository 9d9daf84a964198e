"""vLLM's KV cache specs: each is known by its exact class, and its group is what vLLM's own manager keeps."""

from __future__ import annotations

import ast
import re
from dataclasses import MISSING, dataclass, fields
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm
from hypothesis import given, strategies as st
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.single_type_kv_cache_manager import get_manager_for_kv_cache_spec
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.request import Request

from kvferry.common.errors import ConfigError
from kvferry.engines.vllm.compat import specs
from kvferry.engines.vllm.compat.specs import (
    KINDS,
    REFUSED,
    attention_span_of,
    kind_of,
    snapshot_tokens,
    writes_before_hooks,
)
from kvferry.engines.vllm.scheduler import cache_group
from kvferry.geometry import Attention, Group, GroupKind
from kvferry.planning.coverage import NO_TIER, ChunkedPrompt, find_coverage
from kvferry.planning.select import LoadSpan, blocks_needed, first_attended
from kvferry.tools.models.store import LayerCache
from support.examples import examples

BLOCK, BLOCKS, LONGEST = 16, 64, 400
VALUES = {
    "block_size": BLOCK,
    "num_kv_heads": 1,
    "head_size": 8,
    "dtype": torch.float32,
    "sliding_window": 40,
    "attention_chunk_size": 48,
    "rswa_window": 32,
    "shapes": ((2, 2),),
    "dtypes": (torch.float32,),
    "page_size": 64,
    "blocks_per_request": 2,
}
"""A value of each field that a spec cannot do without."""


def spec_of(of: type[KVCacheSpec], **more: Any) -> Any:
    """A small spec of that class."""
    needed = {field.name for field in fields(of) if field.default is field.default_factory is MISSING}
    return of(**{name: VALUES[name] for name in needed} | more)


LATENT = spec_of(MLAAttentionSpec)
RING = spec_of(CircularBufferSpec, block_size=8, head_size_v=0)
NEVER_A_LAYERS = {"KVCacheSpec", "AttentionSpec", "UniformTypeKVCacheSpecs"}
"""Classes that no layer has itself."""
MOVED: list[Any] = [
    *(spec_of(of) for of in KINDS),
    spec_of(FullAttentionSpec, sliding_window=64),
    spec_of(FullAttentionSpec, tokens_per_state=Fraction(1, 4)),
    spec_of(MLAAttentionSpec, cache_role=SparseCacheRole.INDEXER),
    spec_of(MLAAttentionSpec, tokens_per_state=4),
    spec_of(SlidingWindowSpec, extra_retained_tokens=3),
    spec_of(SlidingWindowMLASpec, block_size=4, sliding_window=8, alignment=512),
    RING,
]
NOT_MOVED: list[tuple[Any, str]] = [
    *((spec_of(of), "serve|leave out") for of in REFUSED),
    (spec_of(FullAttentionSpec, non_causal=True), "not causal.*without a KV connector"),
    (spec_of(SlidingWindowMLASpec, bounded_replay=True), "--no-swa-bounded-replay"),
]
each_moved = pytest.mark.parametrize("spec", MOVED, ids=lambda one: type(one).__name__)


def test_every_spec_of_the_installed_vllm_is_moved_or_refused() -> None:
    texts = (path.read_text() for path in Path(vllm.__file__).parent.rglob("*.py"))
    bases = {
        node.name: {getattr(base, "id", getattr(base, "attr", "")) for base in node.bases}
        for text in texts
        if re.search(r"^\s*class \w+\([^)]*Spec", text, re.MULTILINE)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
    }
    found = {KVCacheSpec.__name__}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    known = [of.__name__ for of in (*KINDS, *REFUSED)]
    assert sorted(found - NEVER_A_LAYERS) == sorted(known), (
        "read each new class of vLLM, and add it to KINDS or REFUSED of kvferry.engines.vllm.compat.specs"
    )


@each_moved
def test_a_group_has_the_kind_of_its_spec_wrapped_or_not(spec: Any) -> None:
    kind, attention_span = kind_of(spec), attention_span_of(spec)
    assert (kind in (GroupKind.SLIDING, GroupKind.CHUNKED)) == (attention_span > 0)
    assert (kind is GroupKind.STATE) == (specs.is_recurrent(spec) or specs.is_ring(spec))
    assert (kind is GroupKind.MLA) == (
        kind is not GroupKind.STATE and not attention_span and specs.is_replicated(spec)
    )
    wrapped = UniformTypeKVCacheSpecs(block_size=spec.block_size, kv_cache_specs={"a": spec, "b": spec})
    assert (kind_of(wrapped), attention_span_of(wrapped)) == (kind, attention_span)


@pytest.mark.parametrize(("spec", "words"), NOT_MOVED, ids=lambda one: type(one).__name__)
def test_specs_that_do_not_move_are_refused_with_a_way_out(spec: Any, words: str) -> None:
    refusal = f"cannot move {type(spec).__name__}.*({words})"
    with pytest.raises(ConfigError, match=refusal):
        kind_of(spec)
    with pytest.raises(ConfigError, match=refusal):
        kind_of(UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs={"a": LATENT, "b": spec}))


@pytest.mark.parametrize("base", KINDS, ids=lambda of: of.__name__)
def test_an_unknown_subclass_is_not_taken_for_its_base(base: type[KVCacheSpec]) -> None:
    other = object.__new__(type("OfAPlugin", (base,), {}))
    for name, value in vars(spec_of(base)).items():
        object.__setattr__(other, name, value)
    with pytest.raises(ConfigError, match="does not know the KV cache spec OfAPlugin"):
        kind_of(other)


def test_a_group_of_several_specs_is_one_kind_or_refused() -> None:
    def group(*of: Any) -> Any:
        return UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=dict(zip("abc", of, strict=False)))

    assert kind_of(group(LATENT, spec_of(MLAAttentionSpec, tokens_per_state=4))) is GroupKind.MLA
    assert kind_of(group(LATENT, spec_of(FullAttentionSpec))) is GroupKind.FULL
    windows = [spec_of(SlidingWindowSpec, sliding_window=attention_span) for attention_span in (40, 41)]
    with pytest.raises(ConfigError, match="continued differently"):
        kind_of(group(*windows))


def _table(spec, block_ids, tokens):
    group = cache_group(SimpleNamespace(kv_cache_spec=spec, layer_names=["one"]))
    return group.table(list(block_ids), tokens)


def test_a_snapshot_is_in_the_block_of_the_last_token_or_the_only_one() -> None:
    for mode, places, apart in (("none", [0, 0, 0], 0), ("align", [0, 0, 1], BLOCK)):
        spec = spec_of(MambaSpec, mamba_cache_mode=mode)
        assert [_table(spec, range(2), tokens) for tokens in (1, 16, 17)] == [[place] for place in places]
        assert snapshot_tokens(spec) == apart
    assert [_table(RING, [7], tokens) for tokens in (1, 8, 900)] == [[7], [7], [7]]
    assert snapshot_tokens(RING) == 0
    assert snapshot_tokens(LATENT) is None


def test_generated_tokens_have_names_unless_they_see_less_than_a_prompts() -> None:
    for spec in MOVED:
        config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
        assert specs.reuses_prompts_only(config) == (type(spec) is RSWASpec)


# -- what vLLM's own managers keep ------------------------------------------------------------------------


@dataclass
class Managed:
    """One group's manager, as vLLM's coordinator makes it, and its pool."""

    spec: Any

    def __post_init__(self) -> None:
        size = self.spec.block_size
        self.pool = BlockPool(BLOCKS + LONGEST // size, enable_caching=True, hash_block_size=size)
        self.manager = get_manager_for_kv_cache_spec(
            kv_cache_spec=self.spec,
            max_in_flight_tokens=64,
            max_model_len=LONGEST,
            block_pool=self.pool,
            role=None,
            enable_caching=True,
            kv_cache_group_id=0,
            dcp_world_size=1,
            pcp_world_size=1,
            scheduler_block_size=size,
            needs_kv_cache_zeroing=False,
        )

    def table(self, tokens: int) -> list[int]:
        """Its block table of a request that has computed so many tokens of a prompt, freed as vLLM frees."""
        self.manager.allocate_new_blocks("r", tokens, tokens)
        self.manager.remove_skipped_blocks("r", tokens, tokens + 1)
        return [block.block_id for block in self.manager.req_to_blocks["r"]]


each_positional = pytest.mark.parametrize(
    "spec",
    [spec for spec in MOVED if kind_of(spec) is not GroupKind.STATE],
    ids=lambda one: type(one).__name__,
)


@each_positional
def test_selected_blocks_are_those_that_vllm_holds_for_the_next_token(spec: Any) -> None:
    size, kind, attention_span = spec.block_size, kind_of(spec), attention_span_of(spec)
    for tokens in range(1, 200, 7):
        table = Managed(spec).table(tokens)
        held = {at for at, block in enumerate(table) if block}
        seen = max(first_attended(Attention(kind, attention_span), tokens), 0)
        selected = blocks_needed(
            Group(kind, size, attention_span, ()), LoadSpan(0, tokens, tokens + 1), np.array(table)
        ).tolist()
        assert 0 not in selected, "vLLM has freed what is said to be needed"
        assert {table.index(block) for block in selected} == {at for at in held if (at + 1) * size > seen}
        if kind is not GroupKind.CHUNKED:  # vLLM may free fewer blocks of a chunk than nobody sees
            assert {table.index(block) for block in selected} == held


@each_positional
@examples(60)
@given(cached=st.sets(st.integers(0, 11)), more=st.integers(1, 40))
def test_a_prefix_that_is_covered_is_one_that_vllm_would_take(spec: Any, cached: set[int], more: int) -> None:
    managed, size, count = Managed(spec), spec.block_size, 12
    init_none_hash(sha256)
    hasher = get_request_block_hasher(size, sha256)
    request = Request(
        "r", list(range(count * size + more)), SamplingParams(max_tokens=1), None, block_hasher=hasher
    )
    hashes = request.block_hashes[:count]
    managed.pool.cache_full_blocks(
        request=request,
        blocks=managed.pool.get_new_blocks(count),
        num_cached_blocks=0,
        num_full_blocks=count,
        block_size=size,
        kv_cache_group_id=0,
        block_mask=[at in cached for at in range(count)],
    )
    _, hit = managed.manager.find_longest_cache_hit(
        hashes, count * size, [0], managed.pool, spec, drop_eagle_block=False, alignment_tokens=size
    )
    places = np.array([[0 if at in cached else NO_TIER for at in range(count)]], np.int64)
    cut = ChunkedPrompt(count * size, size, request.num_tokens)
    found, _ = find_coverage([LayerCache(kind_of(spec), attention_span_of(spec), ())], cut, places).longest()
    assert found == hit


def test_a_ring_is_one_block_however_long_the_prompt() -> None:
    for tokens in (1, 8, 9, 300):
        (block,) = table = Managed(RING).table(tokens)
        moved = _table(RING, table, tokens)
        assert moved == [block] != [0]
        span = LoadSpan(0, tokens, tokens + 1)
        assert blocks_needed(Group(GroupKind.STATE, 8, 0, ()), span, np.array(moved)).tolist() == [block]


@pytest.mark.parametrize(
    ("groups", "unit", "dcp", "second", "writes"),
    [
        ([spec_of(FullAttentionSpec), spec_of(SlidingWindowSpec)], None, 1, True, False),
        ([spec_of(FullAttentionSpec)], BLOCK, 1, True, False),
        ([spec_of(FullAttentionSpec)], 2 * BLOCK, 2, True, False),
        ([spec_of(FullAttentionSpec)], BLOCK, 2, True, True),
        ([spec_of(FullAttentionSpec)], BLOCK // 2, 1, True, True),
        ([spec_of(FullAttentionSpec), spec_of(SlidingWindowSpec, block_size=2 * BLOCK)], None, 1, True, True),
        ([spec_of(FullAttentionSpec), spec_of(FullAttentionSpec, dtype=torch.float16)], None, 1, True, True),
        ([spec_of(FullAttentionSpec), spec_of(MambaSpec)], None, 1, True, True),
        ([spec_of(FullAttentionSpec), spec_of(MambaSpec)], BLOCK // 2, 1, False, False),
    ],
    ids=[
        "attention",
        "whole blocks",
        "whole blocks of two ranks",
        "parts of blocks of two ranks",
        "parts of blocks",
        "two sizes",
        "two precisions",
        "state",
        "first runner",
    ],
)
def test_second_runner_writes_before_hooks_if_it_zeroes_or_copies(
    groups: list[Any], unit: int | None, dcp: int, second: bool, writes: bool
) -> None:
    engine = SimpleNamespace(
        use_v2_model_runner=second,
        cache_config=SimpleNamespace(prefix_match_unit=unit),
        parallel_config=SimpleNamespace(decode_context_parallel_size=dcp),
    )
    config = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec([str(n)], one) for n, one in enumerate(groups)])
    assert writes_before_hooks(engine, config) == writes


def test_vllm_reserves_no_blocks_for_sinks() -> None:
    """Were it to, they could be moved: of requests' tables they are no part."""
    with pytest.raises(TypeError, match="needs_kv_cache_zeroing"):
        Managed(spec_of(SinkFullAttentionSpec, sink_len=BLOCK))


def test_blocks_between_prompt_and_window_are_freed_of_rswa_alone() -> None:
    for spec, freed in ((spec_of(RSWASpec), True), (spec_of(FullAttentionSpec), False)):
        managed = Managed(spec)
        managed.manager.allocate_new_blocks("r", 200, 200)
        managed.manager.remove_skipped_blocks("r", 200, 40)
        assert (managed.pool.null_block in managed.manager.req_to_blocks["r"]) == freed
