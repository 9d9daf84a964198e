"""The KV cache of one rank in one allocation, with the tensor views that an engine works on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from kvferry.common.errors import GeometryError
from kvferry.geometry import Field, Group, GroupKind, Layer, PageMap, RankGeometry
from kvferry.memory import guard, region_over
from kvferry.tools.models.layout import EngineShape, lay_out_rank
from kvferry.tools.models.store import ModelCache

# Default dtype of a recurrent field, by the size of its elements in bytes.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, eq=False)
class OwnedCache:
    """The KV cache of one rank in a buffer that `allocate` has created."""

    # Memory of the cache, uint8 of shape (bytes,), initially zero. Views keep it allocated.
    buffer: torch.Tensor
    geometry: RankGeometry  # addresses and layout, for planning; its only region is the buffer
    # Addresses and strides, one map per KV cache group in the order of `geometry.groups`.
    maps: tuple[PageMap, ...]

    def views(self, dtype: torch.dtype = torch.uint8, *, guarded: bool = True) -> dict[str, torch.Tensor]:
        """Return a view of every attention layer by name, with axes ``(blocks, heads, tokens, content)``.

        If a block consists of several kernel blocks, the first axis counts kernel blocks. The content axis
        holds all fields side by side, so the dtype is uint8 if their elements differ in size.

        Args:
            guarded: True for views that raise SilentCopy where torch would silently copy.
        """
        found = {}
        for where, group, slot, layer in self._layers():
            if group.kind is GroupKind.STATE:
                continue
            sizes = sorted({field.item_bytes for field in layer.page.fields})
            if dtype.itemsize > 1 and sizes != [dtype.itemsize]:
                raise GeometryError(
                    f"layer {layer.name!r} keeps elements of {sizes} bytes, {dtype} has {dtype.itemsize}; "
                    "view it as torch.uint8"
                )
            pages = self.buffer.as_strided(
                where.counts[1:], where.strides[1:], where.page(slot, 0) - where.address
            ).view(dtype)
            found[layer.name] = guard(pages) if guarded else pages
        return found

    def states(
        self, dtypes: Mapping[str, torch.dtype] | None = None, *, guarded: bool = True
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Return a view of every field of every recurrent layer, by layer and field name.

        The axes are ``(blocks, heads, *inner)``, with one head if a field has no head axis. A field without
        an entry in `dtypes` is viewed as integers.
        """
        found = {}
        for _, group, _, layer in self._layers():
            if group.kind is GroupKind.STATE:
                states = {}
                for field in layer.page.fields:
                    elements = self._elements(layer, field, (dtypes or {}).get(field.name))
                    states[field.name] = guard(elements) if guarded else elements
                found[layer.name] = states
        return found

    def _layers(self) -> Iterator[tuple[PageMap, Group, int, Layer]]:
        for where, group in zip(self.maps, self.geometry.groups, strict=True):
            for slot, layer in enumerate(group.layers):
                yield where, group, slot, layer

    def _elements(self, layer: Layer, field: Field, dtype: torch.dtype | None) -> torch.Tensor:
        dtype = dtype or _BITS.get(field.item_bytes)
        if dtype is None or dtype.itemsize != field.item_bytes:
            raise GeometryError(
                f"layer {layer.name!r}, field {field.name!r}: elements of {field.item_bytes} bytes, "
                f"but {dtype} has {dtype.itemsize if dtype else 'no size'}"
            )
        loops = [loop for axis in field.axes for loop in axis.loops]
        if field.axis("head") is None:
            loops.insert(0, (1, field.item_bytes))
        counts, strides = zip((self.geometry.num_blocks, layer.block_stride), *loops, strict=True)
        offset = layer.address - self.geometry.regions[0].address + field.offset
        size = field.item_bytes
        return self.buffer.view(dtype).as_strided(counts, [s // size for s in strides], offset // size)


def allocate(model: ModelCache, engine: EngineShape, rank: int, device: torch.device | str) -> OwnedCache:
    """Allocate the KV cache of one rank, filled with zeros.

    Args:
        rank: index of the worker: pipeline rank times the tensor-parallel size, plus tensor-parallel rank.

    Raises:
        GeometryError: an engine with these settings cannot serve this model. The message gives the reason.
    """
    # Laid out twice: the size is known only from a layout, and the addresses only from the buffer.
    size = lay_out_rank(model, engine, rank, 0).geometry.regions[0].length
    buffer = torch.zeros(size, dtype=torch.uint8, device=device)
    placed = lay_out_rank(model, engine, rank, buffer.data_ptr())
    geometry = replace(placed.geometry, regions=(region_over(buffer),))
    geometry.check()
    return OwnedCache(buffer, geometry, placed.maps)
