"""The number of tokens per chunk, and its constraints.

A snapshot can be stored only at the end of a chunk. Chunks must consist of whole blocks of sliding windows.
"""

from __future__ import annotations

from math import lcm

from kvferry.errors import ConfigError
from kvferry.geometry.rank import GroupKind, GroupPattern

# The default, before it is adjusted to the snapshot interval and to the block size of windows.
CHUNK_TOKENS = 256

# Alignment in tokens of valid content in chunks of short windows: a multiple of the usual block sizes of
# sliding-window groups. A change requires another `form.FORMAT`.
WINDOW_ALIGNMENT_TOKENS = 128


def chunk_length(asked: int | None, interval: int, block: int = 1) -> int:
    """Return the number of tokens per chunk: the configured number, or a default if there is none.

    >>> chunk_length(None, 1), chunk_length(None, 1056), chunk_length(64, 1056)
    (256, 176, 64)
    >>> chunk_length(None, 1, 48), chunk_length(None, 256, 128), chunk_length(None, 544, 544)
    (240, 256, 544)

    Args:
        asked: configured number of tokens per chunk, which is returned unchanged; None for the default.
        interval: least number of tokens between snapshots, from `snapshot_interval`; 1 without snapshots.
        block: number of tokens per block of the sliding-window groups; the least common multiple if the
            groups differ; 1 without such groups.
    """
    if asked:
        return asked
    # A chunk ends at a block's end, and a snapshot at a chunk's end.
    fits = [n for n in range(block, CHUNK_TOKENS + 1, block) if interval == 1 or interval % n == 0]
    return max(fits, default=block if interval == 1 else lcm(interval, block) if interval % block else block)


def content_alignment(group: GroupPattern, chunk_tokens: int) -> int:
    """Return the alignment, in tokens, of the position at which valid content begins in a stored chunk.

    To find where the valid content begins, take the first position to which the token after the chunk
    attends, and round it down to a multiple of this alignment.

    >>> from kvferry.geometry import Attention
    >>> short, long = Attention(GroupKind.SLIDING, 128), Attention(GroupKind.SLIDING, 1024)
    >>> content_alignment(short, 256), content_alignment(long, 256)
    (128, 256)
    """
    # The engine may have freed KV outside of a short window when the chunk was stored. A window of at least a
    # chunk's length reaches back to the chunk's first token.
    whole = not group.attention_span or (
        group.kind is GroupKind.SLIDING and group.attention_span >= chunk_tokens
    )
    return chunk_tokens if whole else WINDOW_ALIGNMENT_TOKENS


def check_prompt_length(chunk_tokens: int, interval: int, longest: int) -> None:
    """Check that a prompt of the maximum length has a prefix that can be loaded.

    Args:
        longest: length of the longest prompt in tokens (``max_model_len``).

    Raises:
        ConfigError: it has none. The message names a setting that works.
    """
    if (first := first_prefix(chunk_tokens, interval)) > longest:
        snapshots = f" and snapshots every {interval}, of which the first at a chunk's end is at {first}"
        raise ConfigError(
            f"tiers: chunks of {chunk_tokens} tokens{snapshots if interval > 1 else ''}, but max_model_len "
            f"is {longest}: no chunk could ever be loaded; {_suggest_chunk_tokens(interval, longest)}"
        )


def late_prefix(chunk_tokens: int, interval: int) -> str:
    """Return a sentence if chunks and snapshots end together only after several of both; empty otherwise.

    >>> late_prefix(176, 1056), late_prefix(256, 1056).partition(",")[0]
    ('', 'chunks of 256 tokens and snapshots every 1056 tokens first end together at 8448 tokens')
    """
    first = first_prefix(chunk_tokens, interval)
    if first == max(chunk_tokens, interval):
        return ""
    return (
        f"chunks of {chunk_tokens} tokens and snapshots every {interval} tokens first end together at "
        f"{first} tokens, so nothing of a shorter prompt is loaded; leave chunk_tokens out, or set it to a "
        f"divisor of {interval}, such as {divisor(interval, CHUNK_TOKENS)}"
    )


def check_windows(chunk_tokens: int, block: int) -> None:
    """Check that a chunk consists of whole blocks of every sliding-window group.

    Args:
        block: number of tokens per block of these groups, as for `chunk_length`.

    Raises:
        ConfigError: chunks end inside blocks. The message names a setting that works.
    """
    # A load would fill only a part of its last block, and other prompts could not share that block.
    if chunk_tokens % block:
        raise ConfigError(
            f"tiers: chunks of {chunk_tokens} tokens end inside this engine's blocks of {block} tokens for "
            f"sliding windows; set chunk_tokens to {-(-chunk_tokens // block) * block}"
        )


def snapshot_interval(*blocks: int) -> int:
    """Return the least number of tokens between positions at which every state group can have a snapshot.

    >>> snapshot_interval(), snapshot_interval(128, 128), snapshot_interval(128, 192)
    (1, 128, 384)

    Args:
        blocks: number of tokens per block of each state group.
    """
    return lcm(*blocks)


def first_prefix(chunk_tokens: int, interval: int) -> int:
    """Return the length in tokens of the shortest prefix of a prompt that can be loaded.

    >>> first_prefix(256, 1), first_prefix(176, 1056), first_prefix(256, 1056)
    (256, 1056, 8448)
    """
    return lcm(chunk_tokens, interval)


def divisor(interval: int, limit: int) -> int:
    """Return the largest divisor of `interval` that is at most `limit`; `limit` for 1, without snapshots.

    >>> divisor(1, 256), divisor(1056, 256), divisor(128, 256)
    (256, 176, 128)
    """
    if interval == 1:
        return limit
    return max(n for n in range(1, limit + 1) if interval % n == 0)


def _suggest_chunk_tokens(interval: int, longest: int) -> str:
    if interval > longest:
        return f"a prompt never reaches its first snapshot; raise max_model_len above {interval}"
    if interval == 1:
        return f"set chunk_tokens to {longest} or less"
    return f"set chunk_tokens to a divisor of {interval}, {divisor(interval, CHUNK_TOKENS)} for instance"
