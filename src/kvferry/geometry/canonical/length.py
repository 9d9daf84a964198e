"""How many tokens a chunk has, so that snapshots of recurrent state can lie at its end."""

from __future__ import annotations

from math import lcm

from kvferry.errors import ConfigError

CHUNK_TOKENS = 256
"""Of a chunk, where nothing else is set; less where snapshots would not lie at its end."""


def chunk_length(asked: int | None, apart: int) -> int:
    """Tokens of a chunk.

    >>> chunk_length(None, 1), chunk_length(None, 1056), chunk_length(64, 1056)
    (256, 176, 64)

    Args:
        asked: what is configured; None for the most up to `CHUNK_TOKENS` that divides `apart`.
        apart: tokens between snapshots at the closest, see `snapshots_apart`.
    """
    return asked or divisor(apart, CHUNK_TOKENS)


def check_reach(chunk_tokens: int, apart: int, longest: int) -> None:
    """See that a prompt of `longest` tokens (``max_model_len``) has a chunk that can be loaded.

    Raises:
        ConfigError: it has none; says what to set instead.
    """
    if (first := first_prefix(chunk_tokens, apart)) > longest:
        snapshots = f" and snapshots every {apart}, of which the first at a chunk's end is at {first}"
        raise ConfigError(
            f"tiers: chunks of {chunk_tokens} tokens{snapshots if apart > 1 else ''}, but max_model_len is "
            f"{longest}: no chunk could ever be loaded; {_instead(apart, longest)}"
        )


def snapshots_apart(*blocks: int) -> int:
    """Tokens between positions at which every state group may have a snapshot; 1 without such groups.

    >>> snapshots_apart(), snapshots_apart(128, 128), snapshots_apart(128, 192)
    (1, 128, 384)

    Args:
        blocks: tokens of a block of each state group.
    """
    return lcm(*blocks)


def first_prefix(chunk_tokens: int, apart: int) -> int:
    """Tokens of the shortest prefix of whole chunks from which all groups can continue.

    >>> first_prefix(256, 1), first_prefix(176, 1056), first_prefix(256, 1056)
    (256, 1056, 8448)
    """
    return lcm(chunk_tokens, apart)


def divisor(apart: int, most: int) -> int:
    """The largest number of tokens up to `most` that ends where snapshots may be, `apart` tokens apart.

    >>> divisor(1, 256), divisor(1056, 256), divisor(128, 256)
    (256, 176, 128)
    """
    if apart == 1:
        return most
    return max(n for n in range(1, most + 1) if apart % n == 0)


def _instead(apart: int, longest: int) -> str:
    if apart > longest:
        return f"a prompt never reaches its first snapshot; raise max_model_len above {apart}"
    if apart == 1:
        return f"set chunk_tokens to {longest} or less"
    return f"set chunk_tokens to a divisor of {apart}, {divisor(apart, CHUNK_TOKENS)} for instance"
