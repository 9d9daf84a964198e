"""Which chunks of a prompt are of use to somebody, so that they are kept.

Of full attention all are: every prefix needs them. Windows and snapshots of recurrent state are of use only
where a prefix ends; with `every` more than a chunk, prefixes are offered at its multiples and at the end of
the prompt, and what is kept is what these need.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import lcm

from kvferry.planning.coverage import GroupPattern
from kvferry.planning.select import first_attended


def last_prefix_ends(prompt: int, chunk_tokens: int, block_tokens: int) -> tuple[int, int]:
    """The ends of the longest prefixes of a prompt: for it alone, and for longer prompts that begin with it.

    >>> last_prefix_ends(2000, 256, 0), last_prefix_ends(2000, 64, 128), last_prefix_ends(1920, 64, 128)
    ((1792, 2000), (1920, 1920), (1792, 1920))
    >>> last_prefix_ends(40, 8, 4)   # a snapshot at 36 would be inside a chunk
    (32, 40)

    Args:
        prompt: tokens of the prompt.
        chunk_tokens: tokens of a chunk.
        block_tokens: of the groups with recurrent state, whose last snapshots are at ends of blocks; 0
            without such groups: then what is no whole chunk at the end is kept as well.
    """
    if not block_tokens:
        return prompt // chunk_tokens * chunk_tokens, prompt
    apart = lcm(chunk_tokens, block_tokens)
    return (prompt - 1) // apart * apart, prompt // apart * apart


def keeps_chunk(group: GroupPattern, number: int, chunk_tokens: int, every: int, ends: Iterable[int]) -> bool:
    """Whether a chunk of attention is kept.

    Chunks of 256 tokens of a window of 1,024, wanted every 4,096: the last four before each multiple.

    >>> from kvferry.geometry import GroupKind
    >>> from kvferry.geometry.store import LayerCache
    >>> window = LayerCache(GroupKind.SLIDING, 1024, ())
    >>> [n for n in range(40) if keeps_chunk(window, n, 256, 4096, last_prefix_ends(10240, 256, 0))]
    [12, 13, 14, 15, 28, 29, 30, 31, 36, 37, 38, 39]

    Args:
        group: whose chunk; not a state.
        number: of the chunk.
        chunk_tokens: tokens of a chunk.
        every: distance of positions at which windows are kept, a multiple of `chunk_tokens`.
        ends: other ends of prefixes, `last_prefix_ends`.
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
    """Whether a snapshot that the engine leaves after `tokens` tokens is kept; arguments as of `keeps_chunk`.

    >>> ends = last_prefix_ends(1400, 128, 128)
    >>> [keeps_snapshot(tokens, 128, 1024, ends) for tokens in (64, 512, 1024, 1280)]
    [False, False, True, True]
    """
    return tokens % chunk_tokens == 0 and (tokens % every == 0 or tokens in ends)
