"""What kvferry's connector knows of the pages of each layer: fields, or bytes that move whole.

A layer's attention backend decides it. Where no backend is requested, it is one that vLLM 0.32 chooses on a
CUDA machine for this cache and element type. Some models bring layers of their own, whatever is requested.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from kvferry.common.errors import ConfigError
from kvferry.geometry import (
    NOT_INTERLEAVED,
    GroupKind,
    PageFormat,
    PageMap,
    RankGeometry,
    whole_page,
)
from kvferry.tools.models import ModelReading, per_layer
from kvferry.tools.models.config import FLOATS
from kvferry.tools.models.layout import lay_out, lay_out_rank, layer_name
from kvferry.tools.models.store import LayerCache
from kvferry.tools.plan.side import EngineSide, shape

_NOT_RUN = "not run"
_INDEXER = "indexer"
# Backend of the indexers of MLA models. It belongs to no attention layer, so the table does not list it.
LATENT_INDEXER = "DEEPSEEK_V32_INDEXER"
_COMPRESSED, _BLOCK_SPARSE = "FLASHMLA_SPARSE_DSV4", "MINIMAX_M3_SPARSE"
_LATENT, _SPARSE_LATENT = ("FLASHMLA", "FLASHINFER_MLA"), ("FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE")
_KV, _UNEQUAL_KV = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"), ("FLASH_ATTN_DIFFKV",)


class _Row(NamedTuple):
    backend: str
    dtypes: str
    layouts: str
    moves_as: str
    shown_by: str


@dataclass(frozen=True, slots=True)
class BackendPages:
    """How the pages of an attention backend move, by KV cache dtype and layout; whole without `fields`."""

    backend: str
    fields: tuple[str, ...] = ()
    why_whole: str = ""


def pages_of(backend: str, dtype: str, layout: str) -> BackendPages:
    """Return how the pages of an attention backend move.

    >>> pages_of("FLASH_ATTN", "fp8", "BHLNC").fields
    ('k', 'v')
    >>> pages_of("CPU_MLA", "auto", "BLHNC").why_whole
    'nothing is proved of them in layout BLHNC'

    Raises:
        ConfigError: the backend does not support the element type or the layout.
    """
    rows = [row for row in _table() if row.backend == backend]
    if not rows:
        return BackendPages(backend, why_whole="kvferry does not know this backend")
    fitting = [row for row in rows if not row.dtypes or _takes(row, dtype)]
    if not fitting:
        known = ", ".join(dict.fromkeys(one for row in rows for one in row.dtypes.split()))
        raise ConfigError(f"{backend} does not take KV cache dtype {dtype}; choose one of {known}")
    row = next((row for row in fitting if row.layouts in ("", "any") or layout in row.layouts.split()), None)
    if row is None:
        known = ", ".join(dict.fromkeys(one for row in fitting for one in row.layouts.split()))
        raise ConfigError(f"{backend} does not take layout {layout} with {dtype}; choose one of {known}")
    # Without a proof, pages move whole. Some backends can be proved only on a machine that has them.
    if row.moves_as == _NOT_RUN:
        return BackendPages(backend, why_whole=f"they are proved only where it runs: {row.shown_by}")
    fields = tuple(re.findall(r"`([^`]+)`", row.moves_as))
    return BackendPages(
        backend, fields, why_whole="" if fields else f"nothing is proved of them in layout {layout}"
    )


def _takes(row: _Row, dtype: str) -> bool:
    return ("auto" if dtype in FLOATS else dtype) in row.dtypes.split()


@cache
def _table() -> tuple[_Row, ...]:
    lines = (files("kvferry.tools.plan") / "backends.csv").read_text().splitlines()
    return tuple(_Row(*row) for row in csv.reader(lines[1:]))


def layer_pages(reading: ModelReading, side: EngineSide) -> tuple[BackendPages | None, ...]:
    """Return how the pages of each cache of a model move, in the order of `ModelCache.layers`.

    The entry of a recurrent state is None.
    """
    compressed = any(layer.state_tokens > 1 for layer in reading.cache.layers)
    found = list[BackendPages | None]()
    for caches in per_layer(reading):
        for layer in caches:
            # The layer's weight loaders prove the fields of recurrent state, not its backend.
            if layer.kind is GroupKind.STATE:
                found.append(None)
            elif layer.state_tokens > 1:
                why = f"a state stands for {layer.state_tokens} tokens"
                found.append(BackendPages(_COMPRESSED, why_whole=why))
            elif compressed:
                found.append(pages_of(_COMPRESSED, "auto", ""))
            else:
                found.append(_of_attention(layer, caches, reading.cache_dtype, side))
    return tuple(found)


def notes_of(pages: tuple[BackendPages | None, ...]) -> Iterator[str]:
    """Yield a sentence for each backend whose pages move whole."""
    for one in dict.fromkeys(pages):
        if one is not None and one.why_whole:
            yield (
                f"pages of {one.backend} move whole, between engines with equal blocks, layout and ranks: "
                f"{one.why_whole}"
            )


def _of_attention(
    cache: LayerCache, layer: tuple[LayerCache, ...], dtype: str, side: EngineSide
) -> BackendPages:
    """Return how the pages of one cache of an attention layer move. `layer` has all caches of the layer."""
    indexed = any(_holds(one, _INDEXER) for one in layer)
    latent = any(_holds(one, "latent") for one in layer)
    if indexed and not latent:
        return pages_of(_BLOCK_SPARSE, dtype, side.layout)
    if _holds(cache, _INDEXER):
        return BackendPages(LATENT_INDEXER, (_INDEXER,))
    if side.backend is not None:
        return _requested(side.backend, cache, dtype, side.layout)
    # The backends that vLLM prefers, the best first. One is made for K and V of different widths.
    usual: tuple[str, ...] = _SPARSE_LATENT if indexed else _LATENT
    if not latent:
        widths = {field.head_bytes for field in cache.fields if field.name in ("k", "v")}
        usual = _UNEQUAL_KV if len(widths) > 1 else _KV
    known = {row.backend for row in _table() if _takes(row, dtype)}
    chosen = next((name for name in usual if name in known), None)
    if chosen is None:
        return BackendPages(usual[0], why_whole=f"no backend is known that takes KV cache dtype {dtype}")
    return pages_of(chosen, dtype, side.layout)


def _requested(backend: str, cache: LayerCache, dtype: str, layout: str) -> BackendPages:
    found = pages_of(backend, dtype, layout)
    kept = "latent" if _holds(cache, "latent") else "k and v"
    if found.fields and ("latent" in found.fields) != (kept == "latent"):
        raise ConfigError(
            f"{backend} keeps {' and '.join(found.fields)}, but this model keeps {kept}; choose another "
            "backend"
        )
    return found


def _holds(cache: LayerCache, name: str) -> bool:
    return any(field.name == name for field in cache.fields)


def lay_out_engine(reading: ModelReading, side: EngineSide, num_blocks: int) -> tuple[RankGeometry, ...]:
    """Return the geometry of every rank of an engine."""
    engine = shape(reading, side, num_blocks)
    each = zip(layer_pages(reading, side), reading.cache.layers, strict=True)
    changed = {
        layer_name(number): (pages, cache)
        for number, (pages, cache) in enumerate(each)
        if pages is not None and (pages.why_whole or _renamed(pages))
    }
    ranks = lay_out(reading.cache, engine)
    if not changed:
        return ranks
    found = []
    for number, rank in enumerate(ranks):
        maps = lay_out_rank(reading.cache, engine, number, rank.regions[0].address).maps
        groups = []
        for group, where in zip(rank.groups, maps, strict=True):
            layers = [
                replace(one, page=_page(one.page, where, rank, *changed[one.name]))
                if one.name in changed
                else one
                for one in group.layers
            ]
            groups.append(replace(group, layers=tuple(layers)))
        found.append(replace(rank, groups=tuple(groups)))
    return tuple(found)


def _renamed(pages: BackendPages) -> dict[str, str]:
    """Return the fields whose name says that the backend stores another element type, by their usual name."""
    return {name.partition(" in ")[0]: name for name in pages.fields if " in " in name}


def _page(
    page: PageFormat, where: PageMap, rank: RankGeometry, pages: BackendPages, cache: LayerCache
) -> PageFormat:
    if not pages.why_whole:
        names = _renamed(pages)
        fields = tuple(replace(field, name=names.get(field.name, field.name)) for field in page.fields)
        return replace(page, fields=fields)
    shard, ranks = rank.tp_rank, rank.tp_size
    kept = " ".join(f"{field.name}:{field.item_bytes}" for field in cache.fields)
    if not any(field.heads for field in cache.fields):
        # Ranks have copies, unless they divide the tokens.
        shard, ranks = page.interleave.rank, page.interleave.ranks
    if page.interleave != NOT_INTERLEAVED:
        kept += f" of {page.interleave.size} tokens in turn"
    return whole_page(
        f"{pages.backend} {kept}",
        page.block_tokens,
        (where.kernels, *where.counts[2:]),
        where.strides[1:],
        item_bytes=1,
        rank=shard,
        ranks=ranks,
    )
