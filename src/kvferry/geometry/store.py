"""What a model keeps per layer, before any engine decides where.

A `StoredField` field is the same whoever serves the model: its name, its element, its heads and the rest of
its axes. A `LayerCache` is all that one layer keeps, a `ModelCache` is the layers of a model. `layout`
turns one of these and the decisions of an engine (parallel sizes, block size, memory layout) into its
ranks' geometry.
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
        name: what every engine calls it: ``kv``, ``k``, ``v``, ``latent``, ``ssm``, ``conv.x``, ...
        item_bytes: bytes of one element.
        heads: elements of the axis that tensor parallelism shards (KV heads, state heads, channels);
            0 if every rank keeps all of it.
        inner: (name, count) of the other axes, the last one fastest. A token axis is added by kinds that
            have one.
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
        """Bytes of one head, of one token where there are tokens."""
        return self.item_bytes * prod(count for _, count in self.inner)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer keeps.

    Attributes:
        kind: what a continuation needs of it. Layers that agree in kind, attention span and fields are one
            group.
        attention_span: window in tokens for SLIDING, chunk in tokens for CHUNKED, 0 otherwise.
        fields: per token, or per snapshot for STATE.
        block_tokens: tokens of a block, where the model decides it; 0: the engine does.
        state_tokens: tokens that one stored entry stands for; such pages move whole.
    """

    kind: GroupKind
    attention_span: int
    fields: tuple[StoredField, ...]
    block_tokens: int = 0
    state_tokens: int = 1

    def __post_init__(self) -> None:
        if self.state_tokens < 1 or self.block_tokens % self.state_tokens:
            raise GeometryError(
                f"blocks of {self.block_tokens} tokens with an entry per {self.state_tokens} tokens"
            )

    @property
    def whole_bytes(self) -> int:
        """Bytes over all heads: of one entry (a token unless `state_tokens` says otherwise) or snapshot."""
        return sum(field.head_bytes * max(field.heads, 1) for field in self.fields)

    def bytes_of(self, tokens: int) -> int:
        """Bytes over all heads of so many tokens, rounded up; of the snapshot for STATE."""
        if self.kind is GroupKind.STATE:
            return self.whole_bytes
        return -(-self.whole_bytes * tokens // self.state_tokens)


@dataclass(frozen=True, slots=True)
class ModelCache:
    """What a model keeps.

    Attributes:
        name: for people.
        layers: in the model's order, only those that keep anything.
        query_heads: heads of queries, which tensor parallelism shares out evenly; 0: not known.
    """

    name: str
    layers: tuple[LayerCache, ...]
    query_heads: int = 0
