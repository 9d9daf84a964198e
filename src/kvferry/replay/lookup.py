"""The look-up of a prompt in simulated tiers: how much of it they hold, and which chunks a load needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from kvferry.replay.content import RequestKeys
from kvferry.replay.model import ServedModel
from kvferry.replay.tier import SimulatedTier


class Wanted(NamedTuple):
    """A chunk that a load needs.

    Attributes:
        key: key of the chunk.
        group: index of its KV cache group.
        tier: number of the fastest tier that holds it.
    """

    key: bytes
    group: int
    tier: int


class Found(NamedTuple):
    """What tiers hold of a prompt.

    Attributes:
        tokens: length in tokens of the longest prefix that can be loaded. If no chunk extends the prefix that
            the engine itself has, this is the length of that prefix.
        attention_tokens: length in tokens of the longest prefix for which all full-attention chunks are held.
        group_tokens: for each KV cache group, length in tokens of the longest prefix that the group alone
            could use.
        tier_tokens: number of tokens that each tier provides in a load of the longest prefix.
        wanted: chunks of this load, in the order of the prompt.
    """

    tokens: int
    attention_tokens: int
    group_tokens: tuple[int, ...]
    tier_tokens: tuple[int, ...]
    wanted: list[Wanted]


def look_up(
    model: ServedModel, tiers: Sequence[SimulatedTier], prompt: int, keys: RequestKeys, local: int
) -> Found | None:
    """Look a prompt up in the tiers of an engine.

    Args:
        model: model whose KV the tiers hold.
        tiers: the tiers, the fastest first.
        prompt: length of the prompt in tokens.
        keys: keys of the request's chunks.
        local: number of tokens at the start of the prompt that the engine itself has.

    Returns:
        None if the prompt has no chunk, or no tier holds the first one.
    """
    size, in_full = (
        keys.chunk_tokens,
        model.has_only_attention or windows_survive_load(model.block_groups, prompt),
    )
    tokens = prompt if in_full else prompt - 1
    if not (in_full and model.state is None):
        tokens -= tokens % size
    if not tokens:
        return None
    rows = keys.rows(tokens)
    if model.attention and local < size and not _is_held(rows[model.attention[0]][0], tiers):
        return None
    chunked = ChunkedPrompt(tokens, size, prompt, local)
    if len(rows) == 1 and model.attention:
        return _leading_chunks(tiers, chunked, rows[0])
    covered = coverage(model.groups, chunked, _tier_numbers(tiers, rows))
    return _found(model, covered, rows, len(tiers))


def _leading_chunks(tiers: Sequence[SimulatedTier], chunked: ChunkedPrompt, row: Sequence[bytes]) -> Found:
    """Return what `coverage` finds for a model with one KV cache group, which attends to all tokens.

    Such a model needs all chunks from the first one, so no arrays are needed to find the last one.

    Args:
        tiers: the tiers, the fastest first.
        chunked: the prompt, divided into chunks.
        row: keys of the chunks.
    """
    local, size = chunked.local_tokens, chunked.chunk_tokens
    first, held = local // size, [tier.held for tier in tiers]
    numbers = list(takewhile(NO_TIER.__ne__, _fastest(held, islice(row, first, None))))
    wanted = [Wanted(key, 0, number) for key, number in zip(islice(row, first, None), numbers, strict=False)]
    end = min((first + len(wanted)) * size, chunked.tokens)
    tokens = [0] * len(tiers)
    if end <= local:
        return Found(local, local, (local,), tuple(tokens), [])
    for one in wanted:
        tokens[one.tier] += size
    tokens[wanted[0].tier] -= local - first * size
    tokens[wanted[-1].tier] -= (first + len(wanted)) * size - end
    return Found(end, end, (end,), tuple(tokens), wanted)


def _found(model: ServedModel, covered: Coverage, rows: Sequence[Sequence[bytes]], tiers: int) -> Found:
    """Return what a look-up has found.

    Args:
        model: model whose KV the tiers hold.
        covered: usable prefixes of the prompt.
        rows: keys of the chunks, one row per group.
        tiers: number of tiers.
    """
    end, slowest = covered.longest()
    local, wanted, tokens = covered.chunked.local_tokens, list[tuple[int, int, int]](), [0] * tiers
    if end > local:
        for group, of in enumerate(chunks_to_load(model.groups, covered.chunked, end)):
            numbers = covered.tier_numbers[group, of].tolist()
            wanted += zip(of.tolist(), [group] * len(numbers), numbers, strict=True)
        if len(rows) > 1:
            wanted.sort()
        tokens[0] = end - local
        if slowest:
            sums = covered.tokens_by_tier(model.widest, local, end).tolist()
            tokens[: len(sums)] = sums
    named = [Wanted(rows[group][chunk], group, tier) for chunk, group, tier in wanted]
    return Found(end, covered.full_attention_tokens, covered.per_group, tuple(tokens), named)


def _tier_numbers(tiers: Sequence[SimulatedTier], rows: Iterable[Sequence[bytes]]) -> TierNumbers:
    """Return the number of the fastest tier that holds each chunk, int64 of shape (groups, chunks)."""
    table = list(rows)
    flat = list(chain.from_iterable(table))
    numbers = np.full(len(flat), NO_TIER, np.int64)
    for number in reversed(range(len(tiers))):
        held = tiers[number].held
        numbers[np.frombuffer(bytes([key in held for key in flat]), np.bool_)] = number
    return numbers.reshape(len(table), -1)


def _fastest(held: Sequence[Mapping[bytes, int]], keys: Iterable[bytes]) -> Iterator[int]:
    """Yield the number of the fastest tier that holds each chunk."""
    host, others = held[0], list(enumerate(held))[1:]
    for key in keys:
        if key in host:
            yield 0
        else:
            for number, each in others:
                if key in each:
                    yield number
                    break
            else:
                yield NO_TIER


def _is_held(key: bytes, tiers: Iterable[SimulatedTier]) -> bool:
    return any(key in tier.held for tier in tiers)
