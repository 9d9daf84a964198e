"""The look-up of a prompt in simulated tiers: how much of it they hold, and which chunks a load needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, takewhile
from typing import NamedTuple

import numpy as np

from kvferry.planning.coverage import (
    NO_TIER,
    ChunkedPrompt,
    Coverage,
    TierNumbers,
    chunks_to_load,
    coverage,
)
from kvferry.planning.select import windows_survive_load
from kvferry.tools.replay.content import RequestKeys
from kvferry.tools.replay.model import ServedModel
from kvferry.tools.replay.tier import SimulatedTier


class Wanted(NamedTuple):
    """The chunks that a load needs, in the order of the prompt: their keys, groups, and fastest tiers."""

    keys: Sequence[bytes] = ()
    groups: Sequence[int] = ()
    tiers: Sequence[int] = ()


class Found(NamedTuple):
    """What tiers hold of a prompt.

    Attributes:
        tokens: length in tokens of the longest prefix that can be loaded, at least that of the engine's own
            prefix.
        attention_tokens: length in tokens of the longest prefix for which all full-attention chunks are held.
        group_tokens: length in tokens of the longest prefix that each group alone could use.
        tier_tokens: number of tokens that each tier provides in a load of the longest prefix.
        wanted: chunks of this load.
    """

    tokens: int
    attention_tokens: int
    group_tokens: tuple[int, ...]
    tier_tokens: tuple[int, ...]
    wanted: Wanted


def look_up(
    model: ServedModel, tiers: Sequence[SimulatedTier], prompt: int, keys: RequestKeys, local: int
) -> Found | None:
    """Look a prompt up in the tiers of an engine.

    Args:
        tiers: the fastest first.
        prompt: length of the prompt in tokens.
        local: number of tokens at the start of the prompt that the engine itself has.

    Returns:
        None if the prompt has no chunk, or no tier holds the first one.
    """
    size = keys.chunk_tokens
    # As in `connector.tiers.source`: which prompts may be loaded to their end, and which have a tail.
    in_full = model.has_only_attention or windows_survive_load(model.block_groups, prompt)
    tokens = prompt if in_full else prompt - 1
    if not (in_full and model.state is None):
        tokens -= tokens % size
    if not tokens:
        return None
    if model.has_one_row:
        return _leading_chunks(tiers, keys.row(tokens), tokens, size, local)
    # Most prompts of a trace are new, and their first chunk tells it without a look-up of the others.
    if model.attention and local < size:
        first = keys.first(model.attention[0], tokens)
        if not any(first in tier.held for tier in tiers):
            return None
    rows = keys.rows(tokens)
    covered = coverage(model.groups, ChunkedPrompt(tokens, size, prompt, local), _tier_numbers(tiers, rows))
    return _found(model, covered, rows, len(tiers))


def _leading_chunks(
    tiers: Sequence[SimulatedTier], row: Sequence[bytes], tokens: int, size: int, local: int
) -> Found | None:
    """Return what `look_up` returns for a model with one group, which attends to all tokens."""
    # Such a model needs all chunks from the first one, so the leading chunks that are held are the result of
    # `coverage`. Its arrays would make the replay of such a model take 1.5 to 3 times as long.
    first = local // size
    held: Sequence[bytes] = list(takewhile(tiers[0].held.__contains__, islice(row, first, None)))
    numbers = [0] * len(held)
    if len(tiers) > 1 and first + len(held) < len(row):
        more = list(takewhile(NO_TIER.__ne__, _fastest(tiers, islice(row, first + len(held), None))))
        numbers += more
        held = row[first : first + len(numbers)]
    if not (held or first):
        return None
    provided = [0] * len(tiers)
    end = min((first + len(held)) * size, tokens)
    if end <= local:
        return Found(local, local, (local,), tuple(provided), Wanted())
    for tier in range(1, len(tiers)):
        provided[tier] = numbers.count(tier) * size
    provided[0] = len(held) * size - sum(provided)
    provided[numbers[0]] -= local - first * size
    provided[numbers[-1]] -= (first + len(held)) * size - end
    return Found(end, end, (end,), tuple(provided), Wanted(held, [0] * len(held), numbers))


def _found(model: ServedModel, covered: Coverage, rows: Sequence[Sequence[bytes]], tiers: int) -> Found:
    """Return what a look-up has found, from the usable prefixes and the keys of the chunks of each group."""
    end, slowest = covered.longest()
    local, chunks, tokens = covered.chunked.local_tokens, list[tuple[int, int, int]](), [0] * tiers
    if end > local:
        for group, of in enumerate(chunks_to_load(model.groups, covered.chunked, end)):
            numbers = covered.tier_numbers[group, of].tolist()
            chunks += zip(of.tolist(), [group] * len(numbers), numbers, strict=True)
        if len(rows) > 1:
            chunks.sort()
        tokens[0] = end - local
        if slowest:
            sums = covered.tokens_by_tier(model.widest, local, end).tolist()
            tokens[: len(sums)] = sums
    wanted = Wanted(
        [rows[group][chunk] for chunk, group, _ in chunks],
        [group for _, group, _ in chunks],
        [tier for _, _, tier in chunks],
    )
    return Found(end, covered.full_attention_tokens, covered.per_group, tuple(tokens), wanted)


def _tier_numbers(tiers: Sequence[SimulatedTier], rows: Iterable[Sequence[bytes]]) -> TierNumbers:
    """Return the number of the fastest tier that holds each chunk, int64 of shape (groups, chunks)."""
    table = list(rows)
    flat = list(chain.from_iterable(table))
    numbers = np.full(len(flat), NO_TIER, np.int64)
    for number in reversed(range(len(tiers))):
        held = tiers[number].held
        numbers[np.frombuffer(bytes([key in held for key in flat]), np.bool_)] = number
    return numbers.reshape(len(table), -1)


def _fastest(tiers: Iterable[SimulatedTier], keys: Iterable[bytes]) -> Iterator[int]:
    """Yield the number of the fastest tier that holds each chunk."""
    held = [tier.held for tier in tiers]
    for key in keys:
        yield next((number for number, each in enumerate(held) if key in each), NO_TIER)
