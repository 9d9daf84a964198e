"""Stored and offered KV of requests that speculate, over vLLM's cache manager.

A stand-in for the worker writes the tokens of each step, drafts included, where the manager's tables say. So
the tests see whether a stored block holds the tokens that it is stored for.
"""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import event, given, strategies as st
from vllm import SamplingParams
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.request import Request, RequestStatus

from kvferry.connector.config import ConnectorConfig
from kvferry.connector.content import Adapters, TurnNames
from kvferry.connector.events import EventStream
from kvferry.connector.peers.producer import Producer
from kvferry.connector.tiers.storing import Progress
from kvferry.engines.vllm.compat.requests import VLLMRequest
from kvferry.geometry import GroupKind
from support.engine_info import made_up
from support.examples import examples
from support.producers import played_channel
from support.vllm_cache import BLOCK, STEP, VllmCache, full, state, window

pytestmark = pytest.mark.slow

LONGEST, WHOLE = 600, 640
FULL, WINDOW = full(), window(20)
DRAFT = -1
"""Content of a block's place after a draft that is not accepted."""


class WrittenCache(VllmCache):
    """vLLM's cache manager, and the content that a worker writes.

    Attributes:
        content: token by group, block and place in it.
    """

    def __init__(self, specs, drafts, *, eagle=False, modules=1, caching=True) -> None:
        super().__init__(
            specs,
            200,
            longest=LONGEST,
            common=max(spec.block_size for spec in specs),
            in_flight=2 * STEP,
            caching=caching,
            use_eagle=eagle,
            num_prefill_lookahead=modules if eagle else 0,
        )
        self.specs, self.drafts = specs, drafts
        self.content: dict[tuple[int, int, int], int] = {}

    def ask(self, tokens: int) -> Request:
        return self.request("r", range(tokens), answer=LONGEST)

    def allocate(self, request, tokens, **more) -> None:
        self.manager.new_step_starts()
        found = self.manager.allocate_slots(request, tokens, num_lookahead_tokens=self.drafts, **more)
        assert found is not None, "no room"

    def write(self, request, first, tokens) -> None:
        """Write the tokens that the worker computes from a position on."""
        for group, (spec, ids) in enumerate(zip(self.specs, self.tables(request), strict=True)):
            if isinstance(spec, MambaSpec):
                continue
            for position, token in enumerate(tokens, first):
                self.content[group, ids[position // BLOCK], position % BLOCK] = token

    def running(self, group: int, ids: list[int]) -> int:
        """Block of a group's running state: the one before the blocks of drafts, which are the last."""
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
@examples(150)
def test_stored_blocks_of_a_request_that_speculates_hold_accepted_tokens(
    kind, prompt, drafts, accepted, overlaps, eagle
):
    specs = [FULL, *{"full": [], "window": [WINDOW], "state": [state(BLOCK, drafts)]}[kind]]
    cache = WrittenCache(specs, drafts, eagle=eagle)
    request, progress, real = cache.ask(prompt), Progress(None), 0
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
            _step(cache, request, progress, tokens, real, list(range(real, real + tokens)))
            real += tokens
            request.num_computed_tokens += tokens
            if real == prompt:
                outputs.append((0, [prompt]))
        while len(outputs) > overlaps:
            hear()
        taken = min(wanted, drafts)
        event("rejected" if taken < drafts else "all accepted")
        written = [real + n if n <= taken else DRAFT for n in range(1 + drafts)]
        _step(cache, request, progress, 1 + drafts, real, written)
        request.num_computed_tokens += 1 + drafts
        outputs.append((drafts - taken, list(range(real + 1, real + 2 + taken))))
        real += 1 + taken


def _step(cache, request, progress, tokens, real, written) -> None:
    """Schedule a step, compute it, and look at what is stored after it."""
    cache.allocate(request, tokens)
    looked = progress.step(tokens)
    whole, with_tail = progress.take(BLOCK) if looked else (range(0), False)
    snapshots = cache.manager.take_boundary_state_offloads().get(request.request_id, [])
    tables = cache.tables(request)
    cache.write(request, real, written)
    ends = [(number * BLOCK, (number + 1) * BLOCK) for number in whole]
    if with_tail:
        ends.append((request.num_prompt_tokens // BLOCK * BLOCK, request.num_prompt_tokens))
    for first, last in ends:
        for group, spec in enumerate(cache.specs):
            if isinstance(spec, MambaSpec):
                continue
            for position in range(first, last):
                block = tables[group][position // BLOCK]
                if block:  # a window's that was let go of is not stored
                    assert cache.content[group, block, position % BLOCK] == position
    for group, block, tokens_before in snapshots:
        event("a snapshot is stored")
        ids = tables[group]
        assert tokens_before <= request.num_tokens
        assert [block] == cache.groups[group].table(ids, tokens_before)
        assert block not in ids[len(ids) - cache.drafts :] or not cache.drafts
        assert cache.manager.block_pool.blocks[block].block_hash is not None


def producer(cache, ahead=0) -> Producer:
    return Producer(
        made_up(groups=cache.groups, draft_lookahead=ahead),
        ConnectorConfig(),
        incarnation=1,
        events=EventStream(),
        names=TurnNames(Adapters()),
        adapters=Adapters(),
        channel=played_channel(),
        pool=cache.manager.block_pool,
        workers=1,
    )


HYBRID = (GroupKind.FULL, GroupKind.SLIDING, GroupKind.STATE)


@pytest.mark.parametrize("mode", ["none", "align"])
@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 64, 65, 100, 128])
def test_the_state_that_is_offered_and_loaded_is_never_a_scratch_block(mode, drafts, tokens):
    specs = [FULL, WINDOW, state(BLOCK if mode == "align" else WHOLE, drafts, mode)]
    cache = WrittenCache(specs, drafts, caching=mode == "align")
    request = cache.ask(tokens)
    while request.num_computed_tokens < tokens:
        count = min(STEP, tokens - request.num_computed_tokens)
        cache.allocate(request, count)
        request.num_computed_tokens += count
    ids = cache.tables(request)
    offered = made_up(groups=cache.groups).tables(ids, tokens)
    assert offered[2] == [cache.running(2, ids[2])]

    there = WrittenCache(specs, drafts, caching=mode == "align")
    waiting = there.ask(tokens + 1)
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
    specs = [FULL, WINDOW, state(BLOCK, ahead)][: len(kinds)]
    cache = WrittenCache(specs, ahead, eagle=ahead > 0, modules=ahead)
    request = cache.ask(prompt)
    request.kv_transfer_params = {"do_remote_decode": True}
    giving = producer(cache, ahead)
    ours = VLLMRequest(request, sampled_below=1000 if ahead else 0)
    giving.on_new_request(ours)
    computed = prompt - 1
    assert request.num_prompt_tokens == computed
    assert request.sampling_params.allowed_token_ids == ([computed] if ahead else None)
    while request.num_computed_tokens < computed:
        count = min(STEP, computed - request.num_computed_tokens)
        cache.allocate(request, count)
        request.num_computed_tokens += count
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    kept, said = giving.finished(ours, cache.tables(request))
    assert kept == (offered > 0)
    assert said["remote_num_tokens"] == offered


def test_prompts_that_share_parameters_each_say_their_own_token():
    shared = SamplingParams(max_tokens=1)
    one, two = (Request(name, [1, 2, last], shared, None) for name, last in (("a", 7), ("b", 8)))
    assert VLLMRequest(one, sampled_below=9).trim_prompt()
    assert VLLMRequest(two, sampled_below=9).trim_prompt()
    assert [r.sampling_params.allowed_token_ids for r in (one, two)] == [[7], [8]]
    assert shared.allowed_token_ids is None


def test_a_token_that_cannot_be_sampled_is_not_requested():
    request = Request("a", [1, 2, 9], SamplingParams(max_tokens=1), None)
    assert VLLMRequest(request, sampled_below=9).trim_prompt()
    assert request.sampling_params.allowed_token_ids is None


def test_a_grammar_decides_what_is_sampled():
    request = Request("a", [1, 2, 3], SamplingParams(max_tokens=1), None)
    request.structured_output_request = object()
    assert VLLMRequest(request, sampled_below=9).trim_prompt()
    assert request.sampling_params.allowed_token_ids is None
