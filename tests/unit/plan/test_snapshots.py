"""Where an engine leaves snapshots, against what a real engine of blocks of 128 tokens was seen to leave."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st
from vllm.v1.core.sched.scheduler import Scheduler

from kvferry.common.errors import ConfigError
from kvferry.connector.engine import PlainStep
from kvferry.connector.tiers.milestones import SnapshotPlaces
from kvferry.engines.vllm.compat.requests import VLLMRequest
from kvferry.planning.retention import snapshot_positions
from kvferry.tools.plan.blocks import SnapshotSteps, parse_retention


@pytest.mark.parametrize(
    ("prompt", "step", "retention", "seen"),
    [
        (700, 256, 0, [640]),
        (700, 2048, 0, [640]),
        (2000, 2048, 0, [1920]),
        (2000, 2048, None, [1920]),
        (700, 256, None, [256, 512, 640]),
        (2000, 256, None, [256, 512, 768, 1024, 1280, 1536, 1792, 1920]),
        (2000, 600, None, [512, 1024, 1536, 1920]),
        (2000, 100, None, list(range(128, 2000, 128))),
        (2000, 2048, 512, [1920]),
        (2000, 800, 512, [1536, 1920]),
        (2000, 256, 512, [512, 1024, 1536, 1920]),
    ],
)
def test_snapshots_are_where_a_real_engine_left_them(prompt, step, retention, seen):
    assert list(SnapshotSteps(128, step, retention).positions(prompt)) == seen


def test_a_prompt_of_whole_blocks_has_one_at_its_end_only_if_that_is_retained():
    # The last token is computed again, so the prompt itself continues a block before its end.
    assert list(SnapshotSteps(128, 256, 0).positions(512)) == [384]
    assert list(SnapshotSteps(128, 256, None).positions(512)) == [256, 384, 512]
    assert list(SnapshotSteps(128, 256, 256).positions(512)) == [256, 384, 512]
    assert list(SnapshotSteps(128, 256, 128).positions(640)) == [256, 512, 640]


def test_steps_begin_where_a_load_ends_and_stop_where_another_prompt_parts():
    steps = SnapshotSteps(128, 256, None)
    assert list(steps.positions(1000, start=300)) == [384, 640, 896]
    assert list(steps.positions(1000, start=256, shared=384)) == [384, 640, 896]
    assert list(SnapshotSteps(128, 512, 0).positions(1000, shared=384)) == [384, 896]
    assert list(steps.step_ends(300, start=256)) == [300]


@pytest.mark.parametrize("prompt", [1, 127, 128])
def test_a_prompt_within_the_first_block_leaves_none(prompt):
    assert not list(SnapshotSteps(128, 2048, 0).positions(prompt))


def test_an_interval_that_vllm_refuses_is_refused():
    with pytest.raises(ConfigError, match="--retention is 300; vLLM takes 0, None or multiples of a block"):
        SnapshotSteps(128, 2048, 300)


@pytest.mark.parametrize("text", ["-1", "all", "1.5"])
def test_an_invalid_interval_is_refused(text):
    with pytest.raises(ConfigError, match="give a number of tokens, 0 for the last only, or None"):
        parse_retention(text)


def vllm_step_ends(
    block: int, step: int, prompt: int, start: int, shared: int, places: SnapshotPlaces | None = None
) -> list[int]:
    """Ends of the steps in which vLLM's scheduler computes a prompt, for which positions may be placed."""
    scheduler = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=block),
        scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
        block_size=block,
        hash_block_size=block,
        max_num_scheduled_tokens=step,
        use_eagle_block_drop=False,
        mamba_partial_cache_hit=False,
        mamba_shared_prefix_checkpoint=False,
        mamba_has_prefill_checkpoint_blocks=False,
        mamba_prefill_checkpoint_alignment=None,
    )
    request = SimpleNamespace(
        request_id="r",
        num_computed_tokens=start,
        num_prompt_tokens=prompt,
        num_tokens=prompt,
        shared_prefix_boundary=shared,
    )
    if places is not None:
        places.admit(VLLMRequest(request), start, 0)
    ends = []
    while request.num_computed_tokens < prompt:
        new = min(step, prompt - request.num_computed_tokens)
        new = Scheduler._mamba_block_aligned_split(scheduler, request, new)
        if places is not None:
            scheduled = PlainStep(tokens={"r": new})
            places.count(scheduled)
            places.schedule(scheduled, [] if ends else ["r"])
        request.num_computed_tokens += new
        ends.append(request.num_computed_tokens)
    return ends


@given(
    block=st.sampled_from([16, 128]),
    step_blocks=st.floats(1, 9),
    prompt=st.integers(1, 2500),
    start=st.floats(0, 1),
    shared=st.floats(0, 1),
)
def test_steps_end_where_those_of_vllm_end(block, step_blocks, prompt, start, shared):
    step, begin = int(step_blocks * block), int(start * (prompt - 1))
    boundary = int(shared * prompt) // block * block
    found = list(SnapshotSteps(block, step).step_ends(prompt, begin, boundary))
    assert found == vllm_step_ends(block, step, prompt, begin, boundary)


@given(
    block=st.sampled_from([16, 128]),
    step_blocks=st.floats(1, 9),
    prompt=st.integers(1, 2500),
    start=st.floats(0, 1),
    first_blocks=st.integers(0, 5),
    own=st.floats(0, 1),
)
def test_steps_end_at_the_positions_that_the_connector_places(
    block, step_blocks, prompt, start, first_blocks, own
):
    step, begin, first = int(step_blocks * block), int(start * (prompt - 1)), first_blocks * block
    boundary = int(own * prompt) // block * block
    placed = snapshot_positions(prompt, begin, 0, first, block)
    found = list(SnapshotSteps(block, step).step_ends(prompt, begin, boundary, placed))
    assert found == vllm_step_ends(block, step, prompt, begin, boundary, SnapshotPlaces(first, block))
