"""The chunks of a request that an engine stores in its tiers.

The choice is that of the serving code: `planning.retention` for windows and snapshots, and the rule of
`connector.tiers.storing` for KV that has left the attention window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvferry.geometry import GroupKind
from kvferry.geometry.canonical.length import content_alignment
from kvferry.planning.retention import keeps_chunk, keeps_snapshot, last_prefix_ends
from kvferry.planning.select import first_attended
from kvferry.replay.content import RequestKeys
from kvferry.replay.model import ServedModel
from kvferry.replay.tiers import SimulatedTiers


@dataclass(frozen=True, slots=True)
class ComputedPrompt:
    """A prompt that an engine has computed, and where it began.

    Attributes:
        tokens: length of the prompt in tokens.
        found: number of tokens at its start that the engine had or loaded.
        shared: position up to which the engine had the attention blocks, but not all other blocks, of another
            prompt; 0 if there is none.
    """

    tokens: int
    found: int
    shared: int


def snapshots_of(model: ServedModel, prompt: ComputedPrompt) -> list[int]:
    """Return the positions at which the engine takes and retains snapshots; none without recurrent state."""
    if model.state is None:
        return []
    start = min(prompt.found, prompt.tokens - 1)
    return list(model.form.steps.positions(prompt.tokens, start, prompt.shared))


def store_chunks(
    model: ServedModel,
    tiers: SimulatedTiers,
    keys: RequestKeys,
    prompt: ComputedPrompt,
    snapshots: Sequence[int],
) -> None:
    """Store the chunks of a request that its engine has computed, and mark its prompt as used.

    Args:
        model: model and settings of the engine.
        tiers: tiers of the engine. Mutated.
        keys: keys of the request's chunks.
        prompt: the request's prompt.
        snapshots: positions at which the engine has retained snapshots.
    """
    size, every = model.chunk_tokens, model.form.snapshot_tokens
    block = model.block_tokens if model.state is not None else 0
    ends = last_prefix_ends(prompt.tokens, size, block)
    for group, one in enumerate(model.groups):
        whole = keys.whole[group]
        if one.kind is GroupKind.STATE:
            numbers = [at // size - 1 for at in snapshots if keeps_snapshot(at, size, every, ends)]
            tiers.store([whole[number] for number in numbers], group, [False] * len(numbers))
            continue
        storable = _storable_chunks(model, group, len(whole), prompt.found)
        kept = (
            [n for n in storable if keeps_chunk(one, n, size, every, ends)]
            if one.attention_span
            else storable
        )
        unchanged = (prompt.found + 1) // size
        tiers.store([whole[number] for number in kept], group, [number < unchanged for number in kept])
        if model.state is None and prompt.tokens % size:
            tiers.store([keys.tail(prompt.tokens)[group]], group, [prompt.tokens <= prompt.found + 1])
    tiers.mark_used(list(_in_order(model, keys, prompt.tokens)))


def _storable_chunks(model: ServedModel, group: int, chunks: int, found: int) -> Sequence[int]:
    """Return the chunks of an attention group whose KV is in the engine's blocks, ascending.

    Of the first `found` tokens, a group with an attention window has only the last window.

    Args:
        model: model and settings of the engine.
        group: index of the group.
        chunks: number of whole chunks of the request.
        found: number of tokens at the start of the prompt that the engine had or loaded.
    """
    one, size = model.groups[group], model.chunk_tokens
    if not (one.attention_span and found):
        return range(chunks)
    block = model.block_groups[group].block_tokens
    looked = max(int(first_attended(one.kind, one.attention_span, found)), 0) // block * block
    alignment = content_alignment(one.kind, one.attention_span, size)
    storable = []
    for number in range(chunks):
        low = number * size
        needed = int(first_attended(one.kind, one.attention_span, low + size - 1)) // alignment * alignment
        if max(low, looked) <= max(low, needed):
            storable.append(number)
    return storable


def _in_order(model: ServedModel, keys: RequestKeys, prompt: int) -> Iterator[bytes]:
    """Yield the keys of all chunks of a request in all groups, in the order of `PromptChunks.all_keys`."""
    size = model.chunk_tokens
    rows: list[tuple[bytes, ...]] = list(zip(*keys.whole, strict=True))
    if prompt % size and model.state is None:
        rows.insert(prompt // size, tuple(keys.tail(prompt)))
    for row in rows:
        yield from row
