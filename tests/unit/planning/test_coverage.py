"""Coverage against a token-by-token oracle, and the cases that people meet."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import assume, event, example, given, strategies as st

from kvferry.common.errors import TransferError
from kvferry.geometry import GroupKind
from kvferry.planning.coverage import (
    NO_TIER,
    ChunkedPrompt,
    MissingChunk,
    chunks_to_load,
    find_coverage,
    longest_prefixes,
    longest_usable_prefix,
    widest_group,
)
from kvferry.planning.select import LoadSpan, needed_tokens
from kvferry.tools.models.store import LayerCache
from support.examples import examples

FULL, SLIDING, CHUNKED, MLA, STATE = (
    GroupKind.FULL, GroupKind.SLIDING, GroupKind.CHUNKED, GroupKind.MLA, GroupKind.STATE
)  # fmt: skip


def group(kind: GroupKind, attention_span: int = 0) -> LayerCache:
    return LayerCache(kind, attention_span, ())


@dataclass(frozen=True)
class Case:
    groups: list[LayerCache]
    chunked: ChunkedPrompt
    tier_numbers: np.ndarray

    @property
    def available(self) -> np.ndarray:
        return self.tier_numbers < NO_TIER

    def without(self, place: int) -> Case:
        """What is left without a place and slower ones."""
        return replace(self, tier_numbers=np.where(self.tier_numbers < place, self.tier_numbers, NO_TIER))

    @property
    def coverage(self) -> Told:
        return told(self.groups, self.chunked, self.tier_numbers)


@dataclass(frozen=True)
class Told:
    """What there is to tell of a coverage."""

    tokens: int
    per_group: tuple[int, ...]
    nearest_unusable_prefix: int | None
    missing: tuple[MissingChunk, ...]


def told(groups: list[LayerCache], chunked: ChunkedPrompt, tier_numbers: np.ndarray) -> Told:
    found = find_coverage(groups, chunked, tier_numbers)
    return Told(found.tokens, found.per_group, found.nearest_unusable_prefix, found.missing)


@st.composite
def cases(draw):
    kinds = draw(st.lists(st.sampled_from((FULL, SLIDING, CHUNKED, MLA, STATE)), min_size=1, max_size=4))
    windows = st.integers(1, 30)
    groups = [group(kind, draw(windows) if kind in (SLIDING, CHUNKED) else 0) for kind in kinds]
    tokens = draw(st.integers(0, 50))
    prompt = tokens + draw(st.sampled_from((0, 0, 1, 1, 2, 9)))
    local_tokens, first = (draw(st.sampled_from((0, 0, draw(st.integers(0, prompt))))) for _ in range(2))
    chunked = ChunkedPrompt(tokens, draw(st.integers(1, 9)), prompt, local_tokens, first)
    rows = [draw(row(chunked.chunks)) for _ in groups]
    return Case(groups, chunked, np.array(rows, np.int64).reshape(len(groups), chunked.chunks))


@st.composite
def row(draw, chunks):
    """All, all but a few, few, or any: usable prefixes are rare where everything is a coin's toss."""
    some = draw(st.sets(st.integers(0, max(chunks - 1, 0)), max_size=3))
    how = draw(st.sampled_from(("all", "all but", "only", "any")))
    from_where = draw(st.lists(st.integers(0, 3), min_size=chunks, max_size=chunks))
    if how == "any":
        here = draw(st.lists(st.booleans(), min_size=chunks, max_size=chunks))
    else:
        here = [how == "all" or (number in some) == (how == "only") for number in range(chunks)]
    return [place if yes else NO_TIER for place, yes in zip(from_where, here, strict=True)]


def seen(group: LayerCache, chunked: ChunkedPrompt, end: int) -> list[int]:
    """Tokens before `end` that the next computed token attends to and the engine lacks, one by one."""
    computed = end if end < chunked.prompt else chunked.prompt - 1
    return [
        token
        for token in range(min(chunked.local_tokens, end), end)
        if (group.kind in (FULL, MLA) and token >= chunked.first)
        or (group.kind is SLIDING and computed - token < group.attention_span)
        or (group.kind is CHUNKED and computed // group.attention_span == token // group.attention_span)
    ]


def wanted(group: LayerCache, chunked: ChunkedPrompt, end: int) -> set[int]:
    """Chunks that a prefix up to `end` takes of one group."""
    if end <= max(chunked.local_tokens, chunked.first):
        return set()
    if group.kind is STATE:
        return {(end - 1) // chunked.chunk_tokens}
    return {token // chunked.chunk_tokens for token in seen(group, chunked, end)}


def ends_of(case: Case) -> list[int]:
    """All boundaries that may be used and are beyond what the engine has."""
    stateful = any(group.kind is STATE for group in case.groups)
    ends = {min(end, case.chunked.tokens) for end in range(1, case.chunked.tokens + 9)
            if not end % case.chunked.chunk_tokens}  # fmt: skip
    return sorted(
        end
        for end in ends
        if end > max(case.chunked.local_tokens, case.chunked.first)
        and not (stateful and end == case.chunked.prompt)
    )


def loaded(case: Case, end: int) -> tuple[np.ndarray, ...]:
    return chunks_to_load(case.groups, case.chunked, end, (min(case.chunked.first, end), end))


def lacking(case: Case, end: int) -> dict[int, int]:
    """Groups that cannot continue at `end`, and the first chunk that each lacks."""
    found = {}
    for number, group in enumerate(case.groups):
        if gone := [chunk for chunk in wanted(group, case.chunked, end) if not case.available[number, chunk]]:
            found[number] = min(gone)
    return found


def oracle(case: Case) -> Told:
    ends = ends_of(case)
    usable = [end for end in ends if not lacking(case, end)]
    tokens = max(usable, default=case.chunked.local_tokens)
    alone = tuple(
        max((end for end in ends if number not in lacking(case, end)), default=case.chunked.local_tokens)
        for number in range(len(case.groups))
    )
    beyond = [end for end in ends if end > tokens]
    if not beyond:
        return Told(tokens, alone, None, ())
    better = min(beyond, key=lambda end: (len(lacking(case, end)), end))
    missing = sorted(lacking(case, better).items())
    return Told(tokens, alone, better, tuple(MissingChunk(*each) for each in missing))


@examples(150)
@given(cases())
def test_coverage_equals_a_search_token_by_token(case: Case):
    found = case.coverage
    assert found == oracle(case)
    event("something to gain" if found.tokens > case.chunked.local_tokens else "nothing to gain")
    event(f"{len(found.missing)} groups fail at the next")
    if found.tokens % case.chunked.chunk_tokens and found.tokens > case.chunked.local_tokens:
        event("a tail is used")


@examples(150)
@given(cases(), st.integers(1, 4))
def test_longest_prefix_without_slow_tiers_uses_the_faster_ones_only(case: Case, place: int):
    found = find_coverage(case.groups, case.chunked, case.tier_numbers)
    left = case.without(place)
    tokens, slowest = found.longest(place)
    assert tokens == oracle(left).tokens
    taken = [row[chunks] for row, chunks in zip(case.tier_numbers, loaded(case, tokens), strict=True)]
    assert slowest == max((int(one.max()) for one in taken if len(one)), default=0)
    event(f"{slowest} of {place}")


@examples(300)
@given(cases())
@example(Case([group(FULL)], ChunkedPrompt(9, 4, 11, 10), np.zeros((1, 3), np.int64)))  # all is there already
def test_prefixes_found_without_arrays_equal_a_search_token_by_token(case: Case):
    case = replace(case, chunked=replace(case.chunked, first=0))
    held = [bytes(row) for row in case.available.astype(np.uint8)]
    found = longest_prefixes(case.groups, case.chunked, held)
    expected = oracle(case)
    assert (found.tokens, found.group_tokens) == (expected.tokens, expected.per_group)
    assert (
        found.attention_tokens
        == find_coverage(case.groups, case.chunked, case.tier_numbers).full_attention_tokens
    )
    event("something to gain" if found.tokens > case.chunked.local_tokens else "nothing to gain")
    event(f"groups agree: {len({*found.group_tokens}) == 1}")


@examples(60)
@given(cases(), st.integers(0, 60))
def test_tokens_after_a_head_from_elsewhere_equal_a_search_token_by_token(case: Case, first: int):
    found = find_coverage(case.groups, case.chunked, case.tier_numbers).tokens_after_head(first)
    assert found == oracle(replace(case, chunked=replace(case.chunked, first=first))).tokens
    event("farther" if found > case.coverage.tokens else "no farther")


@examples(60)
@given(cases())
def test_full_attention_tokens_are_the_shortest_prefix_of_those_groups(case: Case):
    each = [tokens for group, tokens in zip(case.groups, oracle(case).per_group, strict=True)
            if group.kind in (FULL, MLA)]  # fmt: skip
    found = find_coverage(case.groups, case.chunked, case.tier_numbers).full_attention_tokens
    assert found == min(each, default=case.chunked.local_tokens)


@examples(60)
@given(cases())
def test_loaded_chunks_are_available_and_seen_by_the_next_token(case: Case):
    found = case.coverage
    for number, chunks in enumerate(loaded(case, found.tokens)):
        assert case.available[number, chunks].all()
    for end in ends_of(case):
        loads = loaded(case, end)
        assert [set(chunks.tolist()) for chunks in loads] == [
            wanted(group, case.chunked, end) for group in case.groups
        ]
        assert all((np.diff(chunks) == 1).all() and chunks.dtype == np.int64 for chunks in loads)


@examples(60)
@given(cases())
def test_loaded_chunks_hold_the_tokens_that_a_handover_moves(case: Case):
    for end in ends_of(case):
        span = LoadSpan(case.chunked.local_tokens, end, case.chunked.prompt, (case.chunked.first, end))
        for group, chunks in zip(case.groups, loaded(case, end), strict=True):
            if group.kind is not STATE:
                low, high = needed_tokens(group, span)
                size = case.chunked.chunk_tokens
                assert chunks.tolist() == (list(range(low // size, -(-high // size))) if low < high else [])


@examples(60)
@given(cases())
def test_more_available_chunks_never_shorten_the_prefix(case: Case):
    found = case.coverage.tokens
    for number in range(len(case.groups)):
        more = case.tier_numbers.copy()
        more[number] = 0
        assert find_coverage(case.groups, case.chunked, more).tokens >= found


def prefix(groups, chunked: ChunkedPrompt, *rows: str) -> Told:
    """Rows: a letter per chunk, ``x`` at hand and ``.`` not."""
    return told(
        groups, chunked, np.array([[0 if letter == "x" else NO_TIER for letter in row] for row in rows])
    )


PROMPT = ChunkedPrompt(tokens=64, chunk_tokens=16, prompt=100)


@pytest.mark.parametrize(
    ("kind", "attention_span", "row", "tokens"),
    [
        (FULL, 0, "xxxx", 64), (FULL, 0, "xx.x", 32), (FULL, 0, ".xxx", 0), (MLA, 0, "xxx.", 48),
        (SLIDING, 17, "...x", 64), (SLIDING, 18, "...x", 0), (SLIDING, 18, "..xx", 64),
        (SLIDING, 17, "xx..", 32), (SLIDING, 99, "xxxx", 64), (SLIDING, 99, ".xxx", 0),
        (SLIDING, 1, "....", 64),
        (CHUNKED, 32, "....", 64), (CHUNKED, 40, ".xx.", 48), (CHUNKED, 40, "..x.", 48),
        (CHUNKED, 40, ".x..", 0),
        (CHUNKED, 48, "...x", 64), (CHUNKED, 99, "xxx.", 48), (CHUNKED, 24, ".x..", 48),
        (CHUNKED, 24, "...x", 64),
        (STATE, 0, "...x", 64), (STATE, 0, "x.x.", 48), (STATE, 0, "....", 0),
    ],
)  # fmt: skip
def test_each_kind_continues_from_what_its_next_token_sees(kind, attention_span, row, tokens):
    assert prefix([group(kind, attention_span)], PROMPT, row).tokens == tokens


def test_prefix_ends_at_a_boundary_that_all_groups_can_continue():
    """States at 32 and 64, the window at 48 and 64 only: two holes that a minimum would not see."""
    found = prefix([group(STATE), group(SLIDING, 17)], PROMPT, ".x.x", "..x.")
    assert (found.tokens, found.per_group) == (0, (64, 48))
    assert prefix([group(STATE), group(SLIDING, 17)], PROMPT, ".x.x", "..xx").tokens == 64


@pytest.mark.parametrize(
    ("local_tokens", "row", "tokens"),
    [
        (16, ".xxx", 64),
        (17, ".xxx", 64),
        (17, "..xx", 17),
        (31, "..xx", 31),
        (32, "..xx", 64),
        (70, "....", 70),
    ],
)
def test_local_tokens_need_no_chunks(local_tokens, row, tokens):
    assert prefix([group(FULL)], ChunkedPrompt(64, 16, 100, local_tokens), row).tokens == tokens


def test_a_snapshot_is_needed_at_the_boundary_whatever_the_engine_has():
    chunked = ChunkedPrompt(64, 16, 100, local_tokens=32)
    assert prefix([group(FULL), group(STATE)], chunked, "..xx", "xx..").tokens == 32
    assert prefix([group(FULL), group(STATE)], chunked, "..xx", "..x.").tokens == 48
    assert [chunks.tolist() for chunks in chunks_to_load([group(FULL), group(STATE)], chunked, 64)] == [
        [2, 3],
        [3],
    ]


def test_attention_may_be_loaded_to_the_end_of_the_prompt_a_state_may_not():
    chunked = ChunkedPrompt(tokens=64, chunk_tokens=16, prompt=64)
    assert prefix([group(FULL)], chunked, "xxxx").tokens == 64
    found = prefix([group(FULL), group(STATE)], chunked, "xxxx", "xxxx")
    assert (found.tokens, found.nearest_unusable_prefix, found.missing) == (48, None, ())
    assert longest_usable_prefix([group(FULL)], 64) == 64
    assert longest_usable_prefix([group(FULL), group(STATE)], 64) == 63
    with pytest.raises(TransferError, match="a prefix of 64 tokens ends on no boundary"):
        chunks_to_load([group(STATE)], chunked, 64)


def test_window_of_the_last_prompt_token_decides_at_the_end_of_the_prompt():
    """Window 17: token 64 sees 48 to 64, token 63, computed again, sees 47 to 63."""
    longer, whole = ChunkedPrompt(64, 16, 65), ChunkedPrompt(64, 16, 64)
    assert prefix([group(SLIDING, 17)], longer, "...x").tokens == 64
    assert prefix([group(SLIDING, 17)], whole, "...x").tokens == 0
    assert prefix([group(SLIDING, 17)], whole, "..xx").tokens == 64


def test_a_state_one_token_before_the_end_is_a_tail():
    chunked = ChunkedPrompt(tokens=63, chunk_tokens=16, prompt=64)
    assert prefix([group(FULL), group(STATE)], chunked, "xxxx", "...x").tokens == 63
    assert prefix([group(FULL), group(STATE)], chunked, "xxxx", "..x.").tokens == 48
    assert prefix([group(FULL), group(STATE)], chunked, "xxx.", "..xx").tokens == 48


@pytest.mark.parametrize("groups", [[group(FULL)], [group(STATE)], [group(SLIDING, 4), group(STATE)]])
def test_a_prompt_of_one_token_or_none_has_no_prefix_for_a_state(groups):
    stateful = groups[-1].kind is STATE
    for prompt in (0, 1):
        chunked = ChunkedPrompt(prompt, 16, prompt)
        found = find_coverage(groups, chunked, np.zeros((len(groups), chunked.chunks), np.int64))
        assert found.tokens == (0 if stateful else prompt)
        assert longest_usable_prefix(groups, prompt) == found.tokens


def test_missing_chunks_name_the_groups_that_limit_the_prefix():
    groups = [group(FULL), group(SLIDING, 17), group(STATE)]
    assert prefix(groups, PROMPT, "xxxx", "xxxx", ".x..").missing == (MissingChunk(2, 2),)
    assert prefix(groups, PROMPT, "x.xx", "xxxx", "xxxx").missing == (MissingChunk(0, 1),)
    found = prefix(groups, PROMPT, "xxxx", "x.x.", "x..x")
    assert (found.tokens, found.nearest_unusable_prefix, found.missing) == (16, 48, (MissingChunk(2, 2),))
    assert prefix(groups, PROMPT, "....", "....", "....").missing == (
        MissingChunk(0, 0),
        MissingChunk(1, 0),
        MissingChunk(2, 0),
    )
    assert prefix(groups, PROMPT, "xxxx", "xxxx", "xxxx").missing == ()


def test_missing_chunk_is_the_first_that_a_group_lacks():
    found = prefix([group(FULL), group(STATE)], PROMPT, "x..x", "...x")
    assert found == Told(0, (16, 64), 16, (MissingChunk(1, 0),))
    found = prefix([group(SLIDING, 40), group(STATE)], PROMPT, "xx.x", "...x")
    assert found == Told(0, (32, 64), 16, (MissingChunk(1, 0),))
    found = prefix([group(SLIDING, 40)], ChunkedPrompt(64, 16, 100, 40), "xx..")
    assert found.missing == (MissingChunk(0, 2),)


@pytest.mark.parametrize(
    "tier_numbers",
    [
        np.zeros((1, 3), np.int64),
        np.zeros((2, 4), np.int64),
        np.zeros(4, np.int64),
        np.ones((1, 4), np.bool_),
    ],
)
def test_tier_numbers_of_another_shape_are_an_error(tier_numbers):
    with pytest.raises(TransferError, match=r"tier numbers are .* not int64 of \(1, 4\)"):
        find_coverage([group(FULL)], PROMPT, tier_numbers)


def test_a_model_without_groups_is_an_error():
    with pytest.raises(TransferError, match="groups of the model"):
        find_coverage([], PROMPT, np.zeros((0, 4), np.int64))


@pytest.mark.parametrize("made", [(5, 0, 5), (6, 4, 5), (-1, 4, 5), (5, 4, 5, -1), (5, 4, 5, 0, -1)])
def test_impossible_chunked_prompt_is_an_error(made):
    with pytest.raises(TransferError, match=f"{made[0]} of 5 tokens"):
        ChunkedPrompt(*made)


@pytest.mark.parametrize("tokens", [8, 65, 80, 63])
def test_prefix_that_ends_on_no_boundary_is_an_error(tokens):
    with pytest.raises(TransferError, match=f"a prefix of {tokens} tokens ends on no boundary"):
        chunks_to_load([group(FULL)], PROMPT, tokens)


@examples(60)
@given(cases(), st.data())
def test_head_of_a_prefix_loads_full_attention_chunks_only(case: Case, data: st.DataObject):
    """Wherever it ends: another source has what follows, and all that the others need."""
    end = data.draw(st.integers(1, max(case.chunked.prompt, 1)))
    last = data.draw(st.integers(0, min(end - 1, case.chunked.tokens)))
    stateful = any(group.kind is STATE for group in case.groups)
    if end <= case.chunked.local_tokens or (stateful and last == case.chunked.prompt):
        return
    chunks = chunks_to_load(case.groups, case.chunked, end, (case.chunked.first, last))
    begin, size = max(case.chunked.local_tokens, case.chunked.first), case.chunked.chunk_tokens
    for group, found in zip(case.groups, chunks, strict=True):
        attends_to_all = group.kind in (FULL, MLA)
        assert set(found.tolist()) == (
            {token // size for token in range(begin, last)} if attends_to_all else set()
        )


def test_prefix_within_local_tokens_loads_no_chunks():
    for tokens in (0, 8, 17):
        loads = chunks_to_load([group(FULL), group(STATE)], ChunkedPrompt(64, 16, 100, 17), tokens)
        assert [chunks.tolist() for chunks in loads] == [[], []]


@examples(150)
@given(case=cases(), data=st.data())
def test_each_token_of_a_range_comes_from_the_tier_of_its_chunk(case: Case, data: st.DataObject):
    assume(case.chunked.tokens)
    first = data.draw(st.integers(0, case.chunked.tokens - 1))
    last = data.draw(st.integers(first + 1, case.chunked.tokens))
    found = find_coverage(case.groups, case.chunked, case.tier_numbers)
    for number, row in enumerate(case.tier_numbers.tolist()):
        tiers = [row[token // case.chunked.chunk_tokens] for token in range(first, last)]
        # A chunk that no tier has is not needed, for example before a window.
        expected = Counter(0 if tier == NO_TIER else tier for tier in tiers)
        assert dict(enumerate(found.tokens_by_tier(number, first, last).tolist())) == {
            tier: expected[tier] for tier in range(max(expected) + 1)
        }


def test_the_widest_group_attends_to_all_tokens_or_has_the_longest_window():
    window, wide = group(SLIDING, 64), group(SLIDING, 1024)
    assert widest_group([group(STATE), window, group(FULL)]) == 2
    assert widest_group([window, wide, group(STATE)]) == 1
    assert widest_group([group(STATE)]) == 0
