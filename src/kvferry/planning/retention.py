"""Retention: the chunks of a prompt that are worth storing.

Every prefix needs all earlier chunks of full attention, so all are stored. A window or a snapshot of
recurrent state serves only a prefix that ends there. With `every` larger than a chunk, prefixes end at its
multiples and at the end of the prompt, and only the chunks that these prefixes need are stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import lcm

from kvferry.planning.coverage import GroupPattern
from kvferry.planning.select import first_attended


def last_prefix_ends(prompt: int, chunk_tokens: int, block_tokens: int) -> tuple[int, int]:
    """Return the longest prefix that serves the same prompt, and the longest for prompts that extend it.

    >>> last_prefix_ends(2000, 256, 0), last_prefix_ends(2000, 64, 128), last_prefix_ends(1920, 64, 128)
    ((1792, 2000), (1920, 1920), (1792, 1920))
    >>> last_prefix_ends(40, 8, 4)   # a snapshot at 36 would be inside a chunk
    (32, 40)

    Args:
        prompt: tokens of the prompt.
        chunk_tokens: tokens of a chunk.
        block_tokens: block size of the groups with recurrent state, which leave snapshots at ends of
            blocks. 0 without such groups; then the tail is stored as well.
    """
    if not block_tokens:
        return prompt // chunk_tokens * chunk_tokens, prompt
    interval = lcm(chunk_tokens, block_tokens)
    return (prompt - 1) // interval * interval, prompt // interval * interval


def keeps_chunk(group: GroupPattern, number: int, chunk_tokens: int, every: int, ends: Iterable[int]) -> bool:
    """Return whether to store a chunk of an attention group.

    Chunks of 256 tokens of a window of 1,024, wanted every 4,096: the last four before each multiple.

    >>> from kvferry.geometry import GroupKind
    >>> from kvferry.geometry.store import LayerCache
    >>> window = LayerCache(GroupKind.SLIDING, 1024, ())
    >>> [n for n in range(40) if keeps_chunk(window, n, 256, 4096, last_prefix_ends(10240, 256, 0))]
    [12, 13, 14, 15, 28, 29, 30, 31, 36, 37, 38, 39]

    Args:
        group: attention pattern of the group; not a state group.
        number: number of the chunk.
        chunk_tokens: tokens of a chunk.
        every: tokens between the prefix ends at which windows are stored, a multiple of `chunk_tokens`.
        ends: further prefix ends, from `last_prefix_ends`.
    """
    if every == chunk_tokens or not group.attention_span:
        return True
    first = number * chunk_tokens
    offered = ((first // every + 1) * every, *ends)
    return any(
        first < end and first_attended(group.kind, group.attention_span, end - 1) < first + chunk_tokens
        for end in offered
    )


def keeps_snapshot(tokens: int, chunk_tokens: int, every: int, ends: Iterable[int]) -> bool:
    """Return whether to store the snapshot after `tokens` tokens. Other arguments: see `keeps_chunk`.

    >>> ends = last_prefix_ends(1400, 128, 128)
    >>> [keeps_snapshot(tokens, 128, 1024, ends) for tokens in (64, 512, 1024, 1280)]
    [False, False, True, True]
    """
    return tokens % chunk_tokens == 0 and (tokens % every == 0 or tokens in ends)
