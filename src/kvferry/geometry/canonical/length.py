"""The number of tokens of a chunk. Recurrent-state snapshots lie at its end, blocks of windows within it."""

from __future__ import annotations

from math import lcm

from kvferry.errors import ConfigError
from kvferry.geometry.rank import GroupKind

CHUNK_TOKENS = 256
"""Default tokens of a chunk; fewer if snapshots would otherwise not lie at its end."""

# A multiple of the usual block sizes of windows.
WINDOW_ALIGNMENT_TOKENS = 128
"""Alignment of content in chunks of short windows. A change needs another `form.FORMAT`."""


def chunk_length(asked: int | None, interval: int, block: int = 1) -> int:
    """Return the tokens of a chunk.

    >>> chunk_length(None, 1), chunk_length(None, 1056), chunk_length(64, 1056)
    (256, 176, 64)
    >>> chunk_length(None, 1, 48), chunk_length(None, 256, 128), chunk_length(None, 544, 544)
    (240, 256, 544)

    Args:
        asked: the configured tokens; None for the largest number up to `CHUNK_TOKENS` that divides `interval`
            and is a multiple of `block`, or the least multiple beyond.
        interval: least number of tokens between snapshots, from `snapshot_interval`.
        block: tokens of a block of a window, as in `check_windows`.
    """
    if asked:
        return asked
    fits = [n for n in range(block, CHUNK_TOKENS + 1, block) if interval == 1 or interval % n == 0]
    return max(fits, default=block if interval == 1 else lcm(interval, block) if interval % block else block)


def content_alignment(kind: GroupKind, attention_span: int, chunk_tokens: int) -> int:
    """Return the alignment of a chunk's content, in tokens.

    The writer may have freed tokens that the window no longer covers; the chunk has zeros for them. Valid
    content begins at the last multiple of this alignment, at or before the first token that the chunk's end
    sees.

    >>> content_alignment(GroupKind.SLIDING, 128, 256), content_alignment(GroupKind.SLIDING, 1024, 256)
    (128, 256)

    Args:
        kind, attention_span: kind and span of the group.
        chunk_tokens: tokens of a chunk.
    """
    whole = not attention_span or (kind is GroupKind.SLIDING and attention_span >= chunk_tokens)
    return chunk_tokens if whole else WINDOW_ALIGNMENT_TOKENS


def check_prompt_length(chunk_tokens: int, interval: int, longest: int) -> None:
    """Check that a prompt of `longest` tokens (``max_model_len``) has a chunk that can be loaded.

    Raises:
        ConfigError: there is no such chunk. The message names a setting that works.
    """
    if (first := first_prefix(chunk_tokens, interval)) > longest:
        snapshots = f" and snapshots every {interval}, of which the first at a chunk's end is at {first}"
        raise ConfigError(
            f"tiers: chunks of {chunk_tokens} tokens{snapshots if interval > 1 else ''}, but max_model_len "
            f"is {longest}: no chunk could ever be loaded; {_instead(interval, longest)}"
        )


def check_windows(chunk_tokens: int, block: int) -> None:
    """Check that loads fill whole blocks of windows. A second prompt cannot use a partly filled block.

    Args:
        chunk_tokens: tokens of a chunk.
        block: tokens of a block of a window, or the common multiple if they differ; 1 without windows.

    Raises:
        ConfigError: chunks end inside blocks. The message names a setting that works.
    """
    if chunk_tokens % block:
        raise ConfigError(
            f"tiers: chunks of {chunk_tokens} tokens end inside this engine's blocks of {block} tokens for "
            f"sliding windows; set chunk_tokens to {-(-chunk_tokens // block) * block}"
        )


def snapshot_interval(*blocks: int) -> int:
    """Return the tokens between positions at which all state groups may have a snapshot; 1 without any.

    >>> snapshot_interval(), snapshot_interval(128, 128), snapshot_interval(128, 192)
    (1, 128, 384)

    Args:
        blocks: tokens of a block of each state group.
    """
    return lcm(*blocks)


def first_prefix(chunk_tokens: int, interval: int) -> int:
    """Return the tokens of the shortest prefix of whole chunks from which all groups can continue.

    >>> first_prefix(256, 1), first_prefix(176, 1056), first_prefix(256, 1056)
    (256, 1056, 8448)
    """
    return lcm(chunk_tokens, interval)


def divisor(interval: int, limit: int) -> int:
    """Return the largest number of tokens up to `limit` that divides the snapshot `interval`.

    >>> divisor(1, 256), divisor(1056, 256), divisor(128, 256)
    (256, 176, 128)
    """
    if interval == 1:
        return limit
    return max(n for n in range(1, limit + 1) if interval % n == 0)


def _instead(interval: int, longest: int) -> str:
    if interval > longest:
        return f"a prompt never reaches its first snapshot; raise max_model_len above {interval}"
    if interval == 1:
        return f"set chunk_tokens to {longest} or less"
    return f"set chunk_tokens to a divisor of {interval}, {divisor(interval, CHUNK_TOKENS)} for instance"
