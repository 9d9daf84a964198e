"""What is kept and handed over of requests that speculate, over vLLM's cache manager.

The worker is played: it writes what each step computes, drafts included, where the manager's tables say. So
it shows whether a block that is stored holds the tokens that it is stored for.
"""

from __future__ import annotations

from collections import deque

import pytest
import torch
from hypothesis import event, given, settings, strategies as st
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus

from kvferry.connector.adapters import Adapters
from kvferry.connector.config import ConnectorConfig
from kvferry.connector.peers.producer import Producer
from kvferry.connector.peers.turn_names import TurnNames
from kvferry.connector.stream import EventStream
from kvferry.connector.tiers.progress import Progress
from kvferry.engines.vllm.compat.requests import trim_prompt
from kvferry.engines.vllm.info import cache_group
from kvferry.engines.vllm.requests import VLLMRequest
from kvferry.geometry import GroupKind
from support.engine_info import made_up

pytestmark = pytest.mark.slow

BLOCK, STEP, LONGEST, WHOLE = 16, 64, 600, 640
LIKE = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
FULL, WINDOW = FullAttentionSpec(**LIKE), SlidingWindowSpec(sliding_window=20, **LIKE)
DRAFT = -1
"""What a draft that is not accepted leaves in a block."""


def state(drafts: int, mode: str) -> MambaSpec:
    return MambaSpec(
        block_size=BLOCK if mode == "align" else WHOLE,
        shapes=((16, 16),),
        dtypes=(torch.float32,),
        mamba_cache_mode=mode,
        num_speculative_blocks=drafts,
    )


class Engine:
    """vLLM's cache manager, and a worker that writes what it is told to compute.

    Attributes:
        content: by group, block and place in it, the token that is there.
    """

    def __init__(self, specs, drafts, *, eagle=False, modules=1, caching=True) -> None:
        self.specs, self.drafts = specs, drafts
        groups = [KVCacheGroupSpec([f"layer {n}"], spec) for n, spec in enumerate(specs)]
        self.groups = tuple(map(cache_group, groups))
        self.config = KVCacheConfig(200, [], groups, hash_block_size=BLOCK)
        self.manager = KVCacheManager(
            self.config,
            LONGEST,
            max(spec.block_size for spec in specs),
            BLOCK,
            max_in_flight_tokens=2 * STEP,
            enable_caching=caching,
            use_eagle=eagle,
            num_prefill_lookahead=modules if eagle else 0,
        )
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256) if caching else None
        self.content: dict[tuple[int, int, int], int] = {}

    def request(self, tokens: int) -> Request:
        return Request(
            "r", list(range(tokens)), SamplingParams(max_tokens=LONGEST), None, block_hasher=self.hasher
        )

    def allocate(self, request, tokens, **more) -> None:
        self.manager.new_step_starts()
        found = self.manager.allocate_slots(request, tokens, num_lookahead_tokens=self.drafts, **more)
        assert found is not None, "no room"

    def tables(self, request) -> tuple[list[int], ...]:
        return self.manager.get_block_ids(request.request_id)

    def write(self, request, first, tokens) -> None:
        """The worker computes these from a position on."""
        for group, (spec, ids) in enumerate(zip(self.specs, self.tables(request), strict=True)):
            if isinstance(spec, MambaSpec):
                continue
            for position, token in enumerate(tokens, first):
                self.content[group, ids[position // BLOCK], position % BLOCK] = token

    def running(self, group: int, ids: list[int]) -> int:
        """Where a state group's running state is: before the blocks of drafts, which are the last."""
        return ids[len(ids) - 1 - self.specs[group].num_speculative_blocks]


SPECS = st.sampled_from(["full", "window", "state"])


@given(
    kind=SPECS,
    prompt=st.integers(1, 150),
    drafts=st.integers(0, 5),
    accepted=st.lists(st.integers(0, 5), min_size=1, max_size=40),
    overlaps=st.booleans(),
    eagle=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_what_is_stored_of_a_request_that_speculates_is_certain(
    kind, prompt, drafts, accepted, overlaps, eagle
):
    specs = [FULL, *{"full": [], "window": [WINDOW], "state": [state(drafts, "align")]}[kind]]
    engine = Engine(specs, drafts, eagle=eagle)
    request, progress, real = engine.request(prompt), Progress(None), 0
    progress.request = request
    outputs = deque()

    def hear():
        """The output of a step comes back: drafts that were not accepted were not computed."""
        rejected, said = outputs.popleft()
        request.num_computed_tokens -= rejected
        request.append_output_token_ids(said)

    for wanted in accepted:
        while len(outputs) > overlaps:
            hear()
        while request.num_computed_tokens < prompt:
            tokens = min(STEP, prompt - request.num_computed_tokens)
            _step(engine, request, progress, tokens, real, list(range(real, real + tokens)))
            real += tokens
            request.num_computed_tokens += tokens
            if real == prompt:
                outputs.append((0, [prompt]))
        while len(outputs) > overlaps:
            hear()
        taken = min(wanted, drafts)
        event("rejected" if taken < drafts else "all accepted")
        written = [real + n if n <= taken else DRAFT for n in range(1 + drafts)]
        _step(engine, request, progress, 1 + drafts, real, written)
        request.num_computed_tokens += 1 + drafts
        outputs.append((drafts - taken, list(range(real + 1, real + 2 + taken))))
        real += 1 + taken


def _step(engine, request, progress, tokens, real, written) -> None:
    """Schedule a step, compute it, and look at what is stored after it."""
    engine.allocate(request, tokens)
    looked = progress.step(tokens)
    whole, with_tail = progress.take(BLOCK) if looked else (range(0), False)
    snapshots = engine.manager.take_boundary_state_offloads().get(request.request_id, [])
    tables = engine.tables(request)
    engine.write(request, real, written)
    ends = [(number * BLOCK, (number + 1) * BLOCK) for number in whole]
    if with_tail:
        ends.append((request.num_prompt_tokens // BLOCK * BLOCK, request.num_prompt_tokens))
    for first, last in ends:
        for group, spec in enumerate(engine.specs):
            if isinstance(spec, MambaSpec):
                continue
            for position in range(first, last):
                block = tables[group][position // BLOCK]
                if block:  # a window's that was let go of is not stored
                    assert engine.content[group, block, position % BLOCK] == position
    for group, block, tokens_before in snapshots:
        event("a snapshot is stored")
        ids = tables[group]
        assert tokens_before <= request.num_tokens
        assert [block] == engine.groups[group].table(ids, tokens_before)
        assert block not in ids[len(ids) - engine.drafts :] or not engine.drafts
        assert engine.manager.block_pool.blocks[block].block_hash is not None


def producer(engine, ahead=0) -> Producer:
    return Producer(
        made_up(groups=engine.groups, draft_lookahead=ahead),
        ConnectorConfig(),
        incarnation=1,
        events=EventStream(),
        names=TurnNames(Adapters()),
        adapters=Adapters(),
    )


HYBRID = (GroupKind.FULL, GroupKind.SLIDING, GroupKind.STATE)


@pytest.mark.parametrize("mode", ["none", "align"])
@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 64, 65, 100, 128])
def test_the_state_that_is_offered_and_loaded_is_never_a_scratch_block(mode, drafts, tokens):
    specs = [FULL, WINDOW, state(drafts, mode)]
    engine = Engine(specs, drafts, caching=mode == "align")
    request = engine.request(tokens)
    while request.num_computed_tokens < tokens:
        count = min(STEP, tokens - request.num_computed_tokens)
        engine.allocate(request, count)
        request.num_computed_tokens += count
    ids = engine.tables(request)
    offered = made_up(groups=engine.groups).tables(ids, tokens)
    assert offered[2] == [engine.running(2, ids[2])]

    there = Engine(specs, drafts, caching=mode == "align")
    waiting = there.request(tokens + 1)
    there.manager.new_step_starts()
    # vLLM adds no room for drafts while a load is under way.
    assert there.manager.allocate_slots(
        waiting, 0, num_external_computed_tokens=tokens, delay_cache_blocks=True, num_lookahead_tokens=0
    )
    ids = there.tables(waiting)
    (block,) = there.groups[2].table(ids[2], tokens)
    assert block
    assert block == there.running(2, ids[2])
    waiting.num_computed_tokens = tokens
    there.allocate(waiting, 1 + drafts)
    after = there.tables(waiting)[2]
    assert there.groups[2].table(after, tokens) == [block], "the state is where the first step looks"


@pytest.mark.parametrize(("kinds", "ahead", "prompt", "offered"), [
    ((GroupKind.FULL,), 0, 100, 99),
    ((GroupKind.FULL,), 1, 100, 99),
    ((GroupKind.FULL,), 3, 100, 97),
    ((GroupKind.FULL,), 3, 4, 1),
    ((GroupKind.FULL,), 3, 3, 0),
    ((GroupKind.FULL,), 3, 2, 0),
    (HYBRID, 1, 100, 99),
    (HYBRID, 3, 100, 99),
])  # fmt: skip
def test_a_prefix_is_offered_up_to_where_all_modules_of_a_draft_have_seen_what_follows(
    kinds, ahead, prompt, offered
):
    specs = [FULL, WINDOW, state(ahead, "align")][: len(kinds)]
    engine = Engine(specs, ahead, eagle=ahead > 0, modules=ahead)
    request = engine.request(prompt)
    request.kv_transfer_params = {"do_remote_decode": True}
    giving = producer(engine, ahead)
    ours = VLLMRequest(request, sampled_below=1000 if ahead else 0)
    giving.on_new_request(ours)
    computed = prompt - 1
    assert request.num_prompt_tokens == computed
    assert request.sampling_params.allowed_token_ids == ([computed] if ahead else None)
    while request.num_computed_tokens < computed:
        count = min(STEP, computed - request.num_computed_tokens)
        engine.allocate(request, count)
        request.num_computed_tokens += count
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    kept, said = giving.finished(ours, engine.tables(request))
    assert kept == (offered > 0)
    assert said["remote_num_tokens"] == offered


def test_prompts_that_share_parameters_each_say_their_own_token():
    shared = SamplingParams(max_tokens=1)
    one, two = (Request(name, [1, 2, last], shared, None) for name, last in (("a", 7), ("b", 8)))
    assert trim_prompt(one, None, sampled_below=9)
    assert trim_prompt(two, None, sampled_below=9)
    assert [r.sampling_params.allowed_token_ids for r in (one, two)] == [[7], [8]]
    assert shared.allowed_token_ids is None


def test_a_token_that_cannot_be_sampled_is_not_asked_for():
    request = Request("a", [1, 2, 9], SamplingParams(max_tokens=1), None)
    assert trim_prompt(request, None, sampled_below=9)
    assert request.sampling_params.allowed_token_ids is None


def test_a_grammar_decides_what_is_sampled():
    request = Request("a", [1, 2, 3], SamplingParams(max_tokens=1), None)
    request.structured_output_request = object()
    assert trim_prompt(request, None, sampled_below=9)
    assert request.sampling_params.allowed_token_ids is None
