"""What of a prompt is kept, against prefixes counted by hand."""

from __future__ import annotations

from kvferry.geometry import GroupKind
from kvferry.planning.retention import chunks_to_store, keeps_snapshot, last_prefix_ends, needed_chunks
from kvferry.tools.models.store import LayerCache

FULL = LayerCache(GroupKind.FULL, 0, ())
WINDOW = LayerCache(GroupKind.SLIDING, 100, ())
ATTENTION_CHUNK = LayerCache(GroupKind.CHUNKED, 128, ())


def kept(group, every, prompt, chunk_tokens=32, block_tokens=0):
    ends = last_prefix_ends(prompt, chunk_tokens, block_tokens)
    return list(chunks_to_store(group, range(prompt // chunk_tokens), chunk_tokens, every, ends))


def test_everything_is_kept_where_every_chunk_ends_a_prefix():
    assert kept(WINDOW, 32, 320) == list(range(10))


def test_full_attention_is_kept_whatever_is_thinned():
    assert kept(FULL, 256, 320) == list(range(10))


def test_a_window_is_kept_before_every_multiple_and_before_the_end():
    # Token 255 sees from 156 on, chunk 4; token 319 from 220 on, chunk 6.
    assert kept(WINDOW, 256, 320) == [4, 5, 6, 7, 8, 9]
    assert kept(WINDOW, 256, 600) == [4, 5, 6, 7, 12, 13, 14, 15, 16, 17]


def test_an_attention_chunk_is_kept_from_its_beginning():
    # Token 255 sees from 128 on; token 415 from 384 on.
    assert kept(ATTENTION_CHUNK, 256, 416) == [4, 5, 6, 7, 12]


def test_window_beside_state_is_kept_before_the_last_snapshot():
    # Blocks of 64: the last snapshot of 380 tokens is at 320, not at 352 or 380; token 319 sees from 220 on.
    assert kept(WINDOW, 256, 380, block_tokens=64) == [4, 5, 6, 7, 8, 9]
    assert kept(WINDOW, 256, 380) == [4, 5, 6, 7, 8, 9, 10]


def test_the_last_snapshot_is_kept_where_chunks_are_shorter_than_blocks():
    # 2,000 tokens in blocks of 128: the last snapshot is at 1,920, the last whole chunk of 64 ends at 1,984.
    ends = last_prefix_ends(2000, 64, 128)
    left = (512, 1024, 1536, 1920)
    assert [tokens for tokens in left if keeps_snapshot(tokens, 64, 1024, ends)] == [1024, 1920]


def test_a_prompt_of_whole_blocks_keeps_its_last_two():
    # One for the same prompt again, whose last token is computed, one for a longer prompt.
    ends = last_prefix_ends(512, 64, 128)
    assert [tokens for tokens in (256, 384, 512) if keeps_snapshot(tokens, 64, 4096, ends)] == [384, 512]


def test_a_snapshot_inside_a_chunk_is_not_kept():
    assert not keeps_snapshot(384, 256, 256, last_prefix_ends(500, 256, 128))


def test_a_window_before_a_likely_end_is_needed_and_no_other():
    # Token 319 sees from 220 on, chunk 6; token 99 from 0 on.
    assert needed_chunks([FULL, WINDOW], 32, [320, 100, 0]) == (None, {0, 1, 2, 3, 6, 7, 8, 9})


def test_windows_at_regular_distances_are_needed_whatever_is_likely():
    # 8 windows of 4 chunks are 1024 tokens. Token 1023 sees from 924 on, token 2047 from 1948 on.
    regular = {28, 29, 30, 31, 60, 61, 62, 63}
    assert needed_chunks([FULL, WINDOW], 32, [2080]) == (None, regular | {64})
    short = LayerCache(GroupKind.SLIDING, 20, ())
    longest_decides = needed_chunks([FULL, WINDOW, short], 32, [2080])
    assert longest_decides == (None, regular | {64}, {31, 63, 64})


def test_an_attention_chunk_is_needed_from_its_beginning():
    assert needed_chunks([ATTENTION_CHUNK, FULL], 32, [330]) == ({8, 9, 10}, None)


def test_no_chunk_is_cold_beside_state_or_without_full_attention():
    state = LayerCache(GroupKind.STATE, 0, ())
    assert needed_chunks([FULL, WINDOW, state], 32, [320]) == (None, None, None)
    assert needed_chunks([WINDOW], 32, [320]) == (None,)
    assert needed_chunks([FULL], 32, [320]) == (None,)
