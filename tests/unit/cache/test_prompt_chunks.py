"""The chunks of a prompt, against sets of tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvferry.cache.chunk_cache import PromptChunk
from kvferry.cache.prompt_chunks import ChunkBeginnings, PromptChunks
from kvferry.geometry import GroupKind
from kvferry.geometry.canonical import CanonicalGroup
from kvferry.keys.chunk import ChunkKeys
from kvferry.keys.tenant import NOBODY, key_of_chunk
from kvferry.planning.coverage import NO_TIER
from kvferry.planning.select import LoadSpan
from kvferry.tiers.index import tags_of
from support.examples import examples

FULL, STATE = CanonicalGroup(GroupKind.FULL, 0, ()), CanonicalGroup(GroupKind.STATE, 0, ())


def windowed(kind, attention_span):
    return CanonicalGroup(kind, attention_span, ())


GROUPS = st.lists(
    st.just(FULL)
    | st.just(STATE)
    | st.builds(windowed, st.sampled_from([GroupKind.SLIDING, GroupKind.CHUNKED]), st.integers(1, 20)),
    min_size=1,
    max_size=3,
    unique_by=lambda group: group.label,
)


def key_of(tokens, chunk, group, end):
    """Independent of what was asked before: of a fresh request of so many tokens."""
    return key_of_chunk(ChunkKeys(chunk, tokens[:end]).at(end), NOBODY, group)


def usable(groups, tokens, chunk, local_tokens, stored, end):
    """Whether a prefix of `end` tokens can be continued from, token by token."""
    following = min(end, len(tokens) - 1)
    for number, group in enumerate(groups):
        needed = range(local_tokens, end)
        if group.kind is GroupKind.STATE:
            needed = range(end - 1, end)
            if end > len(tokens) - 1:
                return False
        elif group.kind is GroupKind.SLIDING:
            needed = [t for t in needed if t > following - group.attention_span]
        elif group.kind is GroupKind.CHUNKED:
            needed = [t for t in needed if t // group.attention_span == following // group.attention_span]
        for first in {t // chunk * chunk for t in needed}:
            if key_of(tokens, chunk, number, min(first + chunk, end)) not in stored:
                return False
    return True


def in_host(keys):
    """What says that chunks of these keys are in host memory, and others nowhere."""
    here = tags_of(list(keys))
    return lambda tags: np.where(np.isin(tags, here), 0, NO_TIER)


@pytest.mark.parametrize(("groups", "ends"), [([FULL, STATE], [4, 8, 12]), ([FULL], [4, 8, 10, 12])])
def test_every_chunk_of_a_prompt_and_what_was_added_to_it_from_the_first_on(groups, ends):
    tokens = list(range(15))  # 10 of them the prompt
    chunks = PromptChunks(groups, ChunkKeys(4, tokens))
    expected = [key_of(tokens, 4, group, end) for end in ends for group in range(len(groups))]
    assert chunks.all_keys(10) == expected


@examples(100)
@given(data=st.data(), groups=GROUPS, chunk=st.integers(1, 6), length=st.integers(1, 30))
def test_chunk_lookup_equals_a_search_token_by_token(data, groups, chunk, length):
    tokens = data.draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))
    ends = [end for end in range(1, length + 1) if end % chunk == 0 or end == length]
    gone = data.draw(st.sets(st.tuples(st.integers(0, len(groups) - 1), st.sampled_from(ends)), max_size=4))
    local_tokens = data.draw(st.integers(0, length))
    stored = {
        key_of(tokens, chunk, group, end)
        for group in range(len(groups))
        for end in ends
        if (group, end) not in gone
    }
    begun = data.draw(st.integers(0, length))
    keys = ChunkKeys(chunk, tokens[:begun])
    chunks = PromptChunks(groups, keys)
    if begun:
        chunks.look_up(begun, 0, in_host(()))
    keys.extend(tokens[begun:])
    found = chunks.look_up(length, local_tokens, in_host(stored))

    tails = all(group.kind is not GroupKind.STATE for group in groups)
    ends = [end for end in ends if end % chunk == 0 or tails]
    best = max(
        (
            end
            for end in ends
            if end > local_tokens and usable(groups, tokens, chunk, local_tokens, stored, end)
        ),
        default=local_tokens,
    )
    assert found.tokens == best
    wanted_chunks = list(chunks.wanted_chunks(found, LoadSpan(local_tokens, best, length)))
    assert [want.number for want in wanted_chunks] == sorted(want.number for want in wanted_chunks)
    for want in wanted_chunks:
        end = min((want.number + 1) * chunk, best)
        assert want.key == key_of(tokens, chunk, want.group, end)
        assert want.key in stored
        state = groups[want.group].kind is GroupKind.STATE
        assert want.tokens == (0 if state else end - want.number * chunk)
    fewer = stored.difference
    for want in wanted_chunks:
        assert not usable(groups, tokens, chunk, local_tokens, fewer([want.key]), best), (
            "nothing is wanted in vain"
        )
    assert best == local_tokens or usable(
        groups, tokens, chunk, local_tokens, {want.key for want in wanted_chunks}, best
    )


def test_a_prefix_whose_beginning_comes_from_elsewhere_takes_the_chunks_after_it():
    window = windowed(GroupKind.SLIDING, 6)
    tokens, groups = list(range(40)), [FULL, window, STATE]
    chunks = PromptChunks(groups, ChunkKeys(8, tokens))
    every = {chunks.key(group, number) for group in range(3) for number in range(5)}
    gone = {chunks.key(0, 0), chunks.key(0, 1), chunks.key(1, 0), chunks.key(2, 4)}
    found = chunks.look_up(40, 0, in_host(every - gone))
    assert (found.tokens, found.full_attention_tokens) == (0, 0)
    assert found.tokens_after_head(20) == 32
    wanted_chunks = [
        (w.group, w.number, w.tokens) for w in chunks.wanted_chunks(found, LoadSpan(0, 32, 40, (20, 32)))
    ]
    assert wanted_chunks == [(0, 2, 8), (0, 3, 8), (1, 3, 8), (2, 3, 0)]
    assert found.tokens_after_head(12) == 0, "a chunk that is gone is needed then"


def test_windows_are_used_that_likely_prefixes_need_and_generated_ones_are_cold_that_none_needs():
    groups, tokens = [FULL, windowed(GroupKind.SLIDING, 6)], list(range(60))  # 27 of them the prompt
    chunks = PromptChunks(groups, ChunkKeys(4, tokens))
    shared = [chunks.key(group, number) for group, number in ((0, 0), (0, 1), (0, 2), (1, 0))]
    assert chunks.look_up(27, 0, in_host(shared)).tokens == 4
    assert chunks.shared_tokens == 12
    used, cold = chunks.keys_by_need(27, [24, 27, 60])
    # Token 11 sees from 6 on, chunk 1; tokens 23 and 26 from chunk 4 on; token 59 from 54 on, chunk 13.
    numbers = {1, 2, 4, 5, 6, 13, 14}
    expected = [chunks.key(group, n) for n in range(15) for group in (0, 1) if group == 0 or n in numbers]
    tails = [chunks.tail(group, 27) for group in (0, 1)]
    assert [key for key in used if key not in tails] == expected
    assert used.index(tails[0]) == used.index(chunks.key(0, 6)) - 2
    assert cold == [chunks.key(1, n) for n in range(7, 13)]


def test_snapshots_are_used_where_the_request_continued_and_took_some_itself():
    chunks = PromptChunks([FULL, STATE], ChunkKeys(8, list(range(40))))
    used, cold = chunks.keys_by_need(33, [16, 32], {0, 16, 30, 32})
    assert used == [chunks.key(group, n) for n in range(5) for group in (0, 1) if not group or n in (1, 3)]
    assert not cold


def test_the_beginning_of_a_prefix_takes_chunks_of_what_sees_everything_alone():
    window = windowed(GroupKind.SLIDING, 6)
    tokens, groups = list(range(40)), [FULL, window, STATE]
    chunks = PromptChunks(groups, ChunkKeys(8, tokens))
    there = {chunks.key(0, number) for number in (0, 1, 2, 4)}
    found = chunks.look_up(40, 8, in_host(there))
    assert (found.tokens, found.full_attention_tokens) == (8, 24)
    wanted_chunks = [
        (w.group, w.number, w.tokens) for w in chunks.wanted_chunks(found, LoadSpan(8, 39, 40, (8, 20)))
    ]
    assert wanted_chunks == [(0, 1, 8), (0, 2, 8)]


def test_groups_of_one_prompt_have_keys_of_their_own_and_a_tail_is_no_chunk():
    chunks = PromptChunks([FULL, windowed(GroupKind.SLIDING, 4)], ChunkKeys(4, range(8)))
    every = [chunks.key(group, number) for group in (0, 1) for number in (0, 1)]
    every += [chunks.tail(group, tokens) for group in (0, 1) for tokens in (3, 5, 6)]
    assert len(set(every)) == len(every)
    assert chunks.tail(1, 8) == chunks.key(1, 1), "on a boundary they are the same"


def test_chunks_of_a_request_that_grows_are_those_of_one_that_was_long_from_the_start():
    grown = PromptChunks([FULL], ChunkKeys(4, range(3)))
    for tokens in range(3, 20):
        grown.keys.extend([tokens])
        whole = PromptChunks([FULL], ChunkKeys(4, range(tokens + 1)))
        for number in range((tokens + 1) // 4):
            assert grown.key(0, number) == whole.key(0, number)


def test_a_prompt_shorter_than_a_chunk_is_found_by_its_tail_only():
    chunks = PromptChunks([FULL], ChunkKeys(8, range(3)))
    found = chunks.look_up(3, 0, in_host([chunks.tail(0, 3)]))
    assert (found.tier_numbers.tolist(), found.tokens) == ([[0]], 3)
    with_state = PromptChunks([FULL, STATE], ChunkKeys(8, range(3)))
    assert with_state.look_up(3, 0, in_host([with_state.tail(0, 3)])).tokens == 0


def test_a_longer_chunk_stands_in_for_the_tail_that_it_begins_with():
    tokens = [*range(8), 8, 9, 20, 21, 22]
    beginnings = ChunkBeginnings(2)
    chunks = PromptChunks([FULL], ChunkKeys(8, tokens), beginnings)
    gone, here = (key_of([*range(10), *rest], 8, 0, 16) for rest in (range(30, 36), range(40, 46)))
    both = [key_of(tokens, 8, 0, 10)]
    for key in (gone, here):
        beginnings.add(PromptChunk(0, 1, key, 8), both)
    assert chunks.look_up(13, 0, in_host([here])).tokens == 0, "the chunk before is missing"
    found = chunks.look_up(13, 0, in_host([chunks.key(0, 0), here]))
    assert (found.tokens, found.chunked.prompt) == (10, 13)
    wanted = [(w.key, w.number, w.tokens) for w in chunks.wanted_chunks(found, LoadSpan(0, 10, 13))]
    assert wanted == [(chunks.key(0, 0), 0, 8), (here, 1, 8)]
    assert chunks.look_up(13, 10, in_host([chunks.key(0, 0), here])).tokens == 10, "the engine has them"
