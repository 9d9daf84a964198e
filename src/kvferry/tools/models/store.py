"""The KV cache of a model per layer, independent of any engine."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from kvferry.common.errors import GeometryError
from kvferry.geometry import GroupKind


@dataclass(frozen=True, slots=True)
class StoredField:
    """One cached tensor of a layer, over all ranks: ``k``, ``v``, ``latent``, ``ssm``, ``conv.x``, ...

    Attributes:
        heads: length of the axis that tensor parallelism shards; 0 if every rank holds the whole field.
        inner: (name, count) of the other axes except the token axis, innermost last.
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
        """Bytes of one head of the field, per token; for recurrent state, per snapshot."""
        return self.item_bytes * prod(count for _, count in self.inner)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The KV cache of one layer: its fields per token, or per snapshot.

    Attributes:
        block_tokens: 0 if the engine determines it.
        state_tokens: number of tokens that share one stored entry.
    """

    kind: GroupKind
    attention_span: int
    fields: tuple[StoredField, ...]
    block_tokens: int = 0
    # Pages of shared entries are copied whole, so both engines of a transfer need the same block size.
    state_tokens: int = 1

    def __post_init__(self) -> None:
        if self.state_tokens < 1 or self.block_tokens % self.state_tokens:
            raise GeometryError(
                f"blocks of {self.block_tokens} tokens; expected a multiple of {self.state_tokens}, the "
                "tokens of an entry"
            )

    @property
    def whole_bytes(self) -> int:
        return sum(field.head_bytes * max(field.heads, 1) for field in self.fields)

    def bytes_of(self, tokens: int) -> int:
        """Return the bytes that the layer stores for `tokens` tokens, over all heads; or for a snapshot."""
        if self.kind is GroupKind.STATE:
            return self.whole_bytes
        return -(-self.whole_bytes * tokens // self.state_tokens)


@dataclass(frozen=True, slots=True)
class ModelCache:
    """The caches of a model's layers, in order. `query_heads` is a multiple of the TP size; 0 if unknown."""

    name: str
    layers: tuple[LayerCache, ...]
    query_heads: int = 0
