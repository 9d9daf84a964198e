"""The KV cache of a model per layer, independent of any engine.

A `StoredField` is the same in every engine that serves the model: its name, its element, its heads and its
other axes. A `LayerCache` is the cache of one layer, and a `ModelCache` has all layers of a model. `layout`
turns a `ModelCache` and the settings of an engine (parallel sizes, block size, memory layout) into the
geometry of its ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from kvferry.errors import GeometryError
from kvferry.geometry.rank import GroupKind


@dataclass(frozen=True, slots=True)
class StoredField:
    """One field of a layer, over all ranks.

    Attributes:
        name: name in every engine: ``kv``, ``k``, ``v``, ``latent``, ``ssm``, ``conv.x``, ...
        item_bytes: bytes of one element.
        heads: elements of the axis that tensor parallelism shards (KV heads, state heads, channels);
            0 if every rank keeps all of it.
        inner: (name, count) of the other axes, the last one fastest, without the token axis.
    """

    name: str
    item_bytes: int
    heads: int
    inner: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if self.item_bytes < 1 or self.heads < 0 or any(count < 1 for _, count in self.inner):
            raise GeometryError(
                f"field {self.name!r}: elements of {self.item_bytes} bytes, {self.heads} heads, {self.inner}"
            )

    @property
    def head_bytes(self) -> int:
        """Bytes of one head, for one token or for a snapshot."""
        return self.item_bytes * prod(count for _, count in self.inner)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The cache of one layer.

    Attributes:
        kind: kind of the layer. Layers that agree in kind, attention span and fields are one group.
        attention_span: window in tokens for SLIDING, chunk in tokens for CHUNKED, 0 otherwise.
        fields: fields of a token, or of a snapshot for STATE.
        block_tokens: tokens of a block if the model determines them; 0 if the engine does.
        state_tokens: tokens per stored entry. If it is above 1, pages move whole.
    """

    kind: GroupKind
    attention_span: int
    fields: tuple[StoredField, ...]
    block_tokens: int = 0
    state_tokens: int = 1

    def __post_init__(self) -> None:
        if self.state_tokens < 1 or self.block_tokens % self.state_tokens:
            raise GeometryError(
                f"blocks of {self.block_tokens} tokens; expected a multiple of {self.state_tokens}, the "
                "tokens of an entry"
            )

    @property
    def whole_bytes(self) -> int:
        """Bytes over all heads of one entry (`state_tokens` tokens), or of a snapshot."""
        return sum(field.head_bytes * max(field.heads, 1) for field in self.fields)

    def bytes_of(self, tokens: int) -> int:
        """Return the bytes over all heads of `tokens` tokens, rounded up; of the snapshot for STATE."""
        if self.kind is GroupKind.STATE:
            return self.whole_bytes
        return -(-self.whole_bytes * tokens // self.state_tokens)


@dataclass(frozen=True, slots=True)
class ModelCache:
    """The KV cache of a model.

    Attributes:
        name: display name of the model.
        layers: caches in the order of the model's layers; layers that keep nothing have none.
        query_heads: number of query heads, which tensor parallelism shares out evenly; 0 if unknown.
    """

    name: str
    layers: tuple[LayerCache, ...]
    query_heads: int = 0
