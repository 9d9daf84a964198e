"""Reasons why the tiers have no usable prefix of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.cache.chunk_cache import ChunkCache
from kvferry.cache.prompt_chunks import PromptChunks
from kvferry.connector.decisions import MissReason, SourceMiss
from kvferry.planning.coverage import Coverage
from kvferry.tiers.host.counters import HostMissReason
from kvferry.tiers.names import TIERS
from kvferry.units import counted

_REMEMBERED = {HostMissReason.EVICTED: MissReason.EVICTED, HostMissReason.FILLING: MissReason.STORING}


def miss_of(chunks: PromptChunks, found: Coverage, labels: Sequence[str], cache: ChunkCache) -> SourceMiss:
    """Return the reason why the tiers cannot extend the prefix of a prompt that the engine already has.

    EVICTED: all missing chunks (`found.missing`) were evicted recently. STORING: all of them are being copied
    to host memory. SHORT_PROMPT: the prompt is not longer than a chunk. LOCAL: no KV cache group can use a
    longer prefix than the engine has. OTHER_NAMESPACE: a tier has chunks of a model of the same name, but in
    another namespace only. NOT_STORED: none of these.

    Args:
        chunks: chunk keys of the request.
        found: result of the look-up of the request's chunks in the tiers.
        labels: label (number and kind) of each KV cache group in the storage format.
        cache: host memory and slower tiers, which were searched.
    """
    chunked, lacking = found.chunked, found.missing
    short = SourceMiss(
        TIERS,
        MissReason.SHORT_PROMPT,
        detail=f"{counted(chunked.prompt, 'token')}, chunks of {chunked.chunk_tokens}",
    )
    here = SourceMiss(
        TIERS,
        MissReason.LOCAL,
        detail=f"{chunked.local_tokens} of {counted(chunked.prompt, 'token')} here, no tier has more",
    )
    if not lacking:
        return short if chunked.prompt <= chunked.chunk_tokens else here
    whys = {cache.miss_reason(chunks.key_of(chunked, one.group, one.chunk)) for one in lacking}
    group = labels[lacking[0].group] if len(lacking) == 1 else "several"
    detail = ", ".join(f"chunk {one.chunk} of group {labels[one.group]}" for one in lacking)
    if len(whys) == 1 and (miss := _REMEMBERED.get(next(iter(whys)))) is not None:
        return SourceMiss(TIERS, miss, group, detail)
    if chunked.prompt < chunked.chunk_tokens:
        return short
    if 0 < chunked.local_tokens >= max(found.per_group):
        return here
    if same_name_namespace := cache.same_name_namespace:
        detail = f"there is nothing of this model, but of one of its name: namespace {same_name_namespace}"
        return SourceMiss(TIERS, MissReason.OTHER_NAMESPACE, detail=detail)
    return SourceMiss(TIERS, MissReason.NOT_STORED, group, detail)
