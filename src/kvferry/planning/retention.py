"""Retention: the chunks of a prompt that are worth storing, and the positions of additional snapshots.

Chunks of full attention are always stored, because every prefix needs all of them. Chunks of a window and
snapshots are useful only to prefixes that end near them. Later prompts are expected to load prefixes that end
at multiples of the setting `every` and at the end of the prompt, so only what these need is stored. Stored
window chunks that no likely prefix needs are *cold*: they are evicted before all others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import lcm

from kvferry.geometry import GroupKind, GroupPattern
from kvferry.geometry.canonical import CanonicalForm
from kvferry.planning.select import attends_to_all, first_attended

# An engine stores at most this many chunks with one order to its ranks.
MAX_CHUNKS_PER_ORDER = 16

# Distance, in windows, of positions whose windows are never cold. The first prompt that shares a prefix with
# another can continue from there.
_REGULAR_WINDOWS = 8

# By default, the first snapshot lies at least this many tokens after the start.
FIRST_SNAPSHOT_TOKENS = 1024

# A snapshot weighs at most this many times as much as the attention KV before the default first position.
_WEIGHT = 4


def last_prefix_ends(prompt: int, chunk_tokens: int, block_tokens: int) -> tuple[int, int]:
    """Return the tokens of the longest prefixes that the same prompt, and its continuations, can load.

    `block_tokens` are those of the groups with recurrent state; 0 without such groups.
    """
    if not block_tokens:
        # The incomplete last chunk is stored too.
        return prompt // chunk_tokens * chunk_tokens, prompt
    # Snapshots lie at ends of blocks and are stored at ends of chunks. The same prompt can load none after
    # its last token, because the engine always computes that token again.
    interval = lcm(chunk_tokens, block_tokens)
    return (prompt - 1) // interval * interval, prompt // interval * interval


def chunks_to_store(
    group: GroupPattern, numbers: range, chunk_tokens: int, every: int, ends: Iterable[int]
) -> Sequence[int]:
    """Return the chunks of an attention group, by their indices in a prompt, that are worth storing.

    Four chunks of 256 tokens hold a window of 1,024 tokens before each multiple of 4,096 tokens and the end:

    >>> from kvferry.geometry import GroupKind
    >>> from kvferry.tools.models.store import LayerCache
    >>> window = LayerCache(GroupKind.SLIDING, 1024, ())
    >>> chunks_to_store(window, range(40), 256, 4096, last_prefix_ends(10240, 256, 0))
    [12, 13, 14, 15, 28, 29, 30, 31, 36, 37, 38, 39]

    `numbers` are the candidates. Expected prefixes end at multiples of `every` tokens, itself a multiple of
    `chunk_tokens`, and at `ends`.
    """
    if every == chunk_tokens or not group.attention_span or not numbers:
        return numbers
    # The next multiple of `every` after a chunk is the first one whose window can reach back to it.
    first, last = ((number * chunk_tokens // every + 1) * every for number in (numbers[0], numbers[-1]))
    kept: set[int] = set()
    for end in (*ends, *range(first, last + 1, every)):
        kept.update(_window(group, chunk_tokens, end))
    return [number for number in numbers if number in kept]


def keeps_snapshot(tokens: int, chunk_tokens: int, every: int, ends: Iterable[int]) -> bool:
    """Return True if a chunk and an expected prefix both end where the snapshot was taken.

    >>> ends = last_prefix_ends(1400, 128, 128)  # (1280, 1280)
    >>> [keeps_snapshot(tokens, 128, 1024, ends) for tokens in (64, 512, 1024, 1280)]
    [False, False, True, True]
    """
    return tokens % chunk_tokens == 0 and (tokens % every == 0 or tokens in ends)


def needed_chunks(
    groups: Sequence[GroupPattern], chunk_tokens: int, ends: Iterable[int]
) -> tuple[Collection[int] | None, ...]:
    """Return the indices of the chunks that are not cold, per group; None if no chunk of the group is cold.

    In this example, prefixes of 5,120 and 5,200 tokens are likely, and the one of 8 windows, 4,096 tokens:

    >>> from kvferry.tools.models.store import LayerCache
    >>> full, window = LayerCache(GroupKind.FULL, 0, ()), LayerCache(GroupKind.SLIDING, 512, ())
    >>> found = needed_chunks([full, window], 256, [5120, 5200])
    >>> found[0], sorted(found[1])
    (None, [14, 15, 18, 19, 20])

    The longest of `ends` is the longest prefix that the request has stored.
    """
    kinds = [group.kind for group in groups]
    # With recurrent state, the snapshots decide where a prefix can end. Without full attention, chunks in the
    # tiers do not tell which prefixes are shared.
    if GroupKind.STATE in kinds or not any(map(attends_to_all, kinds)):
        return (None,) * len(groups)
    ends = set(ends)
    longest = max(-(-group.attention_span // chunk_tokens) * chunk_tokens for group in groups)
    if longest:
        distance = _REGULAR_WINDOWS * longest
        ends.update(range(distance, max(ends) + 1, distance))
    found: list[set[int] | None] = []
    for group in groups:
        needed = set[int]()
        for end in ends if group.attention_span else ():
            needed.update(_window(group, chunk_tokens, end))
        found.append(needed if group.attention_span else None)
    return tuple(found)


def _window(group: GroupPattern, chunk_tokens: int, end: int) -> range:
    # The engine may compute the last token of the prefix again, so the window is the one of that token.
    first = max(first_attended(group, end - 1), 0)
    return range(first // chunk_tokens, -(-end // chunk_tokens))


def first_snapshot(requested: int | None, interval: int, state_bytes: int, token_bytes: float) -> int:
    """Return the first position in tokens, rounded up to a multiple of `interval`; 0 for no positions.

    >>> first_snapshot(None, 272, 39_518_208, 24_576), first_snapshot(None, 2080, 169_869_312, 8_192)
    (1088, 6240)
    >>> first_snapshot(500, 128, 1, 1), first_snapshot(0, 128, 1, 1)
    (512, 0)

    Args:
        requested: 0 for no positions, None for the default.
        interval: snapshots lie at ends of blocks and are stored at ends of chunks: at multiples of this.
        state_bytes, token_bytes: bytes of a snapshot, and of attention KV per token.
    """
    if requested is None:
        requested = FIRST_SNAPSHOT_TOKENS
        if token_bytes:
            requested = max(requested, round(state_bytes / token_bytes / _WEIGHT))
    return -(-requested // interval) * interval


def snapshot_interval_of(block_tokens: int, snapshot_tokens: int) -> int:
    """Return the number of tokens of which every position of `snapshot_positions` is a multiple."""
    return lcm(block_tokens, snapshot_tokens)


def bytes_of_snapshots(canonical: CanonicalForm) -> tuple[int, float]:
    """Return (bytes of a snapshot, bytes of attention KV per token), as tiers store them."""
    state = [group.chunk_bytes for group in canonical.groups if group.kind is GroupKind.STATE]
    total = sum(group.chunk_bytes for group in canonical.groups)
    return sum(state), (total - sum(state)) / canonical.chunk_tokens


def snapshot_positions(prompt: int, start: int, shared: int, first: int, interval: int) -> tuple[int, ...]:
    """Return the positions of a prompt at which an engine should take snapshots, in ascending order.

    They are for prompts that share only the beginning. A prompt's end always has a snapshot. `start` is where
    the engine begins to compute, `shared` the tokens of the longest prefix whose attention KV the tiers have.

    >>> snapshot_positions(20_000, 0, 0, 1088, 272), snapshot_positions(20_000, 4352, 12_000, 1088, 272)
    ((1088, 2176, 4352, 8704, 17408), (8704, 11968, 17408))
    """
    if not first or start + first >= prompt:
        return ()
    # Whatever prefix two prompts share, one of the doubles lies in its second half.
    doubles = (first << n for n in range(max(prompt // first, 1).bit_length()))
    found = {*doubles, shared // interval * interval}
    # Up to `first` tokens after the start, little is computed again.
    return tuple(sorted(at for at in found if start + first <= at < prompt))
