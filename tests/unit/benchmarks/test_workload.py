"""Workloads: what is read of a trace, what is left of it, and what is drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.choice.workload import (
    RECORDED_BLOCK,
    Prompt,
    Workload,
    draw_workload,
    read_trace,
    select_conversations,
)
from kvferry.common.errors import ConfigError


def line(tokens: int, *blocks: object) -> str:
    return json.dumps({"timestamp": 0, "input_length": tokens, "output_length": 9, "hash_ids": list(blocks)})


def written(folder: Path, *lines: str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_trace_is_read_line_by_line(tmp_path: Path) -> None:
    path = written(tmp_path, line(1000, 46, 47), "", line(512, 46))
    assert read_trace(path) == (Prompt((46, 47), 1000), Prompt((46,), 512))


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["{"], r"line 1 is no request \(.+\); expected an object with \"input_length\" and \"hash_ids\""),
        ([line(512, 1), "[]"], "line 2 is no request"),
        (['{"input_length": 512}'], "line 1 is no request .*hash_ids"),
        ([line(512, "a")], "line 1 is no request"),
        (
            [line(513, 1)],
            "line 1 has 1 hash_ids for 513 tokens; expected one, at least 0, for each 512 tokens",
        ),
        ([line(512, -1)], "line 1 has 1 hash_ids for 512 tokens"),
        ([line(0)], "line 1 has 0 hash_ids for 0 tokens"),
        ([""], "has no requests; name a file of Mooncake's format"),
    ],
)
def test_file_that_is_no_trace_is_an_error(tmp_path: Path, lines: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=f"^--trace .*{says}"):
        read_trace(written(tmp_path, *lines))


def test_unreadable_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: No such file or directory; name a file"):
        read_trace(tmp_path / "nowhere")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="binary, line 1 is no request"):
        read_trace(tmp_path / "binary")


def prompt(blocks: list[int], last: int = RECORDED_BLOCK) -> Prompt:
    return Prompt(tuple(blocks), (len(blocks) - 1) * RECORDED_BLOCK + last)


def test_first_conversations_of_a_trace_are_kept_in_order() -> None:
    recorded = [
        prompt([0, 1, 2], 256),
        prompt([0, 9]),  # goes on nowhere
        prompt([0, 5, 6]),  # a conversation that begins later
        prompt([0, 1, *range(10, 20)]),  # too long
        prompt([0]),  # a block alone
        prompt([0, 5, 6, 7]),
        prompt([0, 1, 2, 3], 1),
        prompt([0, 1, 30, 31, 32, 33]),  # shares less than half of itself
        prompt([0, 1, 2, 3, 4]),
    ]
    found = select_conversations("a trace", recorded, 64, 400, 3)
    assert found.prompts == (Prompt((0, 1, 2), 160), Prompt((0, 1, 2, 3), 193), Prompt((0, 1, 2, 3, 4), 320))
    assert (found.of, found.block_tokens, found.name) == (9, 64, "a trace"), "of those that were recorded"
    more = select_conversations("a trace", recorded, 64, 400, 4)
    assert [one.blocks[1] for one in more.prompts] == [1, 5, 5, 1]
    with pytest.raises(ConfigError, match=r"has 5 requests in conversations, of no more than 400 tokens"):
        select_conversations("a trace", recorded, 64, 400, 6)


def test_equal_blocks_are_equal_tokens_and_another_salt_gives_others() -> None:
    workload = Workload("", 64, (Prompt((5, 6), 100), Prompt((5, 7), 128)))
    one, two = workload.token_ids(4096, 1)
    assert (len(one), len(two)) == (100, 128)
    assert one[:64] == two[:64]
    assert one[64:] != two[64:100]
    assert max(one + two) < 4096
    assert next(workload.token_ids(4096, 2))[:64] != one[:64]
    assert list(workload.token_ids(4096, 1)) == [one, two]


def test_repeated_share_counts_blocks_in_prefixes_seen_before() -> None:
    workload = Workload("", 64, (prompt([1, 2]), prompt([1, 2, 3, 4]), prompt([9, 2])))
    assert (workload.repeated, workload.distinct_blocks) == (2 / 8, 5)


def test_drawn_conversations_grow_and_share_their_beginnings() -> None:
    workload = draw_workload(64, 2048, 60)
    assert workload == draw_workload(64, 2048, 60), "a seed is a workload"
    assert workload != draw_workload(64, 2048, 60, seed=2)
    assert len(workload.prompts) == 60
    assert max(one.tokens for one in workload.prompts) <= 2048
    assert all(0 < len(one.blocks) * 64 - one.tokens + 64 <= 128 for one in workload.prompts)
    blocks = [one.blocks for one in workload.prompts]
    turns = sum(any(later[: len(one)] == one for later in blocks[n + 1 :]) for n, one in enumerate(blocks))
    assert turns > 20, "conversations that go on"
    assert 1 < len({one[0] for one in blocks}) <= 3, "system prompts"
    assert 0.6 < workload.repeated < 0.95


def test_prompts_that_could_not_hold_a_turn_are_refused() -> None:
    assert draw_workload(64, 1280, 4).prompts
    with pytest.raises(ConfigError, match="--longest 1279 is less than 1280, 20 blocks of 64: raise it"):
        draw_workload(64, 1279, 4)
