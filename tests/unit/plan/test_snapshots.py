"""Where an engine leaves snapshots, against what a real engine of blocks of 128 tokens was seen to leave."""

from __future__ import annotations

import pytest

from kvferry.errors import ConfigError
from kvferry.plan.snapshots import SnapshotSteps, parse_retention


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
def test_what_is_no_interval_is_refused(text):
    with pytest.raises(ConfigError, match="give a number of tokens, 0 for the last only, or None"):
        parse_retention(text)
