"""Positions at which kvferry has an engine take snapshots, besides those that the engine takes by itself.

A *snapshot* is the recurrent state at one position. An engine takes one at the end of each prompt. Another
prompt that shares only a beginning, such as a system prompt, cannot continue from there. So snapshots are
also taken

- at a first position and at its doubles. Whatever prefix two prompts share, one of these positions lies in
  its second half. A prompt has only as many of them as it can be halved before it is shorter than the first.
- where the attention KV ends that the tiers have of a prompt, because another prompt shares the tokens before
  this position (as Marconi admits states, https://arxiv.org/abs/2411.19379). From the third prompt on, all of
  a shared prefix can be loaded.

Each position costs an additional step of the engine and the bytes of a snapshot.
"""

from __future__ import annotations

from math import lcm

from kvferry.geometry import GroupKind
from kvferry.geometry.canonical import CanonicalForm

# By default, the first snapshot lies at least this many tokens after the start.
FIRST_SNAPSHOT_TOKENS = 1024

# A snapshot weighs at most this many times as much as the attention KV before the default first position.
_WEIGHT = 4


def first_snapshot(requested: int | None, interval: int, state_bytes: int, token_bytes: float) -> int:
    """Return the first position in tokens, rounded up to a multiple of `interval`; 0 for no positions.

    >>> first_snapshot(None, 272, 39_518_208, 24_576), first_snapshot(None, 2080, 169_869_312, 8_192)
    (1088, 6240)
    >>> first_snapshot(500, 128, 1, 1), first_snapshot(0, 128, 1, 1)
    (512, 0)

    Args:
        requested: requested position in tokens; 0 for no positions, None for the default.
        interval: snapshots lie at ends of blocks and are stored at ends of chunks: multiples of this many
            tokens.
        state_bytes: size of a snapshot in bytes.
        token_bytes: bytes of attention KV per token; 0 for a model without attention.
    """
    if requested is None:
        requested = FIRST_SNAPSHOT_TOKENS
        if token_bytes:
            requested = max(requested, round(state_bytes / token_bytes / _WEIGHT))
    return -(-requested // interval) * interval


def snapshot_interval_of(block_tokens: int, snapshot_tokens: int) -> int:
    """Return the number of tokens of which every position of `snapshot_positions` is a multiple.

    Args:
        block_tokens: number of tokens per block of the engine; the least common multiple if groups differ.
        snapshot_tokens: distance in tokens between the positions at which snapshots are stored.
    """
    return lcm(block_tokens, snapshot_tokens)


def bytes_of_snapshots(canonical: CanonicalForm) -> tuple[int, float]:
    """Return (bytes of a snapshot, bytes of attention KV per token), as tiers store them."""
    state = [group.chunk_bytes for group in canonical.groups if group.kind is GroupKind.STATE]
    total = sum(group.chunk_bytes for group in canonical.groups)
    return sum(state), (total - sum(state)) / canonical.chunk_tokens


def snapshot_positions(prompt: int, start: int, shared: int, first: int, interval: int) -> tuple[int, ...]:
    """Return the positions of a prompt at which an engine should take snapshots, in ascending order.

    >>> snapshot_positions(20_000, 0, 0, 1088, 272), snapshot_positions(20_000, 4352, 12_000, 1088, 272)
    ((1088, 2176, 4352, 8704, 17408), (8704, 11968, 17408))

    Args:
        start: position in tokens at which the engine begins to compute.
        shared: length in tokens of the longest prefix whose attention KV the tiers have.
        first: first position, from `first_snapshot`.
    """
    if not first:
        return ()
    # Whatever prefix two prompts share, one of the doubles lies in its second half.
    doubles = (first << n for n in range(max(prompt // first, 1).bit_length()))
    found = {*doubles, shared // interval * interval}
    # Up to `first` tokens after the start, little is computed again.
    return tuple(sorted(at for at in found if start + first <= at < prompt))
