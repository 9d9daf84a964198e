"""How long chunks are, and which configurations could never load one."""

from __future__ import annotations

import pytest

from kvferry.common.errors import ConfigError
from kvferry.geometry.canonical.derive import (
    check_blocks,
    check_prompt_length,
    chunk_length,
    divisor,
    snapshot_interval,
)


@pytest.mark.parametrize(("interval", "tokens"), [(1, 256), (128, 128), (544, 136), (2096, 131), (5760, 240)])
def test_a_chunk_ends_where_a_snapshot_may_be(interval, tokens):
    assert chunk_length(None, interval) == tokens


def test_a_block_of_a_large_prime_leaves_short_chunks():
    # 16 times 263: no other divisor up to 256.
    assert divisor(16 * 263, 256) == 16


def test_groups_of_different_blocks_share_their_common_boundaries():
    assert chunk_length(None, snapshot_interval(48, 64)) == 192


@pytest.mark.parametrize(
    ("chunk", "interval", "longest", "said"),
    [
        (256, 1, 255, "chunks of 256 tokens, but max_model_len is 255: .*; set chunk_tokens to 255 or less"),
        (256, 1056, 8000, "at a chunk's end is at 8448, .*; set chunk_tokens to a divisor of 1056, 176 for"),
        (176, 1056, 1000, "a prompt never reaches its first snapshot; raise max_model_len above 1056"),
    ],
)
def test_chunks_too_long_for_any_prompt_are_refused_with_a_fix(chunk, interval, longest, said):
    with pytest.raises(ConfigError, match=said):
        check_prompt_length(chunk, interval, longest)


@pytest.mark.parametrize(
    ("chunk", "interval", "longest"), [(256, 1, 256), (256, 1056, 8448), (176, 1056, 1056)]
)
def test_chunks_that_fit_into_prompts_are_accepted(chunk, interval, longest):
    check_prompt_length(chunk, interval, longest)


def test_no_block_of_a_window_is_cut() -> None:
    for interval in (1, 128, 544, 1024, 300):
        for block in (1, 16, 48, 512, 544):
            tokens = chunk_length(None, interval, block)
            check_blocks(tokens, block)
            assert (
                interval == 1
                or interval % tokens == 0
                or not any(interval % n == 0 for n in range(block, interval + 1, block))
            )
    with pytest.raises(ConfigError, match="set chunk_tokens to 128"):
        check_blocks(64, 128)
