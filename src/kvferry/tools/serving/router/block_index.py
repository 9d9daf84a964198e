"""Which engines have which blocks of tokens in host memory, and the longest prefix of a prompt among them.

Engines publish their blocks under hashes that depend on their block size, hash algorithm and release of vLLM,
and with some algorithms on a random seed. So the index gives each block a *name* of its own, a digest of the
name of the block before, the block's tokens and what else the engine hashes with them:

    event: engine's hash, its parent's, tokens ──→ name ──→ engines that have the block
    prompt: tokens ──→ name, name, name …  ──→ the engines that have all blocks up to there

Only host memory counts, because no engine can read another one's KV cache without a ticket. Of a model with
several KV cache groups, one that attends to all tokens stands for all. So the index may promise too much for
a hybrid model, and then a reader finds less.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, count, repeat
from typing import Annotated, Any, TypeAlias

import msgspec
import xxhash

from kvferry.tiers import HOST

MOST_BLOCKS = 1 << 20
"""Maximum number of blocks of all engines together: a shared block counts once for each engine."""

_MEDIUM = "CPU"
_PREFIX_KINDS = frozenset(("full_attention", "mla_attention", "sink_full_attention"))

_Token: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Hash: TypeAlias = int | bytes


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """vLLM's event that an engine has blocks, with the fields that matter here."""

    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None
    token_ids: list[_Token]
    block_size: Annotated[int, msgspec.Meta(gt=0)]
    medium: str | None
    extra_keys: list[list[Any] | None] | None = None  # what the engine hashes with the tokens of each block
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    ownership: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    """vLLM's event that an engine has blocks no more."""

    block_hashes: list[_Hash]
    medium: str | None
    group_idx: int | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """vLLM's event that an engine's own prefix cache is empty. It says nothing of host memory."""


BlockEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class HostBlocks:
    """The blocks in the host memory of one engine. Only its `BlockIndex` changes it.

    Attributes:
        bit: its bit among the holders of a block.
        names: names of its blocks, by the low 64 bits of the engine's hash; the oldest first.
        group: index of the KV cache group that stands for all; None before the first block.
        block_tokens: number of tokens of its blocks; 0 before the first one.
    """

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.names: dict[int, int] = {}
        self.group: int | None = None
        self.block_tokens = 0


class BlockIndex:
    """The blocks of all engines, by name.

    If there are too many, the oldest block of the engine with the most is dropped, unless a prompt has had it
    lately.
    """

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._engines: list[HostBlocks] = []
        self._holders: dict[int, int] = {}  # bits of the engines that have a block, by its name
        self._used: set[int] = set()  # names that a prompt has had since the block was last the oldest
        self._size = 0

    def __len__(self) -> int:
        """Number of blocks, each once for each engine that has it."""
        return self._size

    def add_engine(self) -> HostBlocks:
        taken = {one.bit for one in self._engines}
        engine = HostBlocks(next(bit for bit in (1 << at for at in count()) if bit not in taken))
        self._engines.append(engine)
        return engine

    def remove_engine(self, engine: HostBlocks) -> None:
        self.clear(engine)
        self._engines.remove(engine)

    def clear(self, engine: HostBlocks) -> None:
        """Forget all blocks of an engine."""
        for name in engine.names.values():
            self._release(name, engine)
        engine.names.clear()

    def apply(self, engine: HostBlocks, event: BlockEvent) -> None:
        """Record what an engine has published."""
        if isinstance(event, AllBlocksCleared) or event.medium != _MEDIUM or event.ownership != HOST:
            return
        if isinstance(event, BlockRemoved):
            if event.group_idx == engine.group:
                for key in map(_short, event.block_hashes):
                    if (name := engine.names.pop(key, None)) is not None:
                        self._release(name, engine)
        elif event.kv_cache_spec_kind in _PREFIX_KINDS:
            self._store(engine, event)

    def longest(self, tokens: Sequence[int], model: str | None, salt: str | None) -> dict[HostBlocks, int]:
        """Return the tokens of the longest prefix of a prompt that each engine has, for those with any.

        Args:
            model: model that the request names, which may be a LoRA adapter.
            salt: ``cache_salt`` of the request.
        """
        found: dict[HostBlocks, int] = {}
        for size in {one.block_tokens for one in self._engines if one.names}:
            for adapter in (model, None):
                names = _names(0, tokens, size, _extra_keys(adapter, salt))
                those = [one for one in self._engines if one.block_tokens == size]
                found |= {one: held * size for one, held in self._held(names, those).items()}
        return found

    def _held(self, names: Iterator[int], engines: Sequence[HostBlocks]) -> dict[HostBlocks, int]:
        """Return how many of the first blocks each engine has, for those with any."""
        found: dict[HostBlocks, int] = {}
        left = [*engines]
        for at, name in enumerate(names):
            holders = self._holders.get(name, 0)
            left = [one for one in left if one.bit & holders]
            if not left:
                break
            self._used.add(name)
            found |= dict.fromkeys(left, at + 1)
        return found

    def _store(self, engine: HostBlocks, event: BlockStored) -> None:
        if engine.group is None:
            engine.group, engine.block_tokens = event.group_idx, event.block_size
        keys = event.extra_keys or [None] * len(event.block_hashes)
        if (
            (event.group_idx, event.block_size) != (engine.group, engine.block_tokens)
            or len(event.token_ids) != event.block_size * len(event.block_hashes)
            or len(keys) != len(event.block_hashes)
        ):
            return
        parent = event.parent_block_hash
        before = 0 if parent is None else engine.names.get(_short(parent))
        if before is None:
            return  # it begins in the middle of a prompt whose beginning is not known
        names = _names(before, event.token_ids, event.block_size, map(_encoded, keys))
        for key, name in zip(map(_short, event.block_hashes), names, strict=True):
            if key not in engine.names:
                engine.names[key] = name
                self._holders[name] = self._holders.get(name, 0) | engine.bit
                self._size += 1
        while self._size > self._most_blocks:
            self._drop_oldest(max(self._engines, key=lambda one: len(one.names)))

    def _drop_oldest(self, engine: HostBlocks) -> None:
        key, name = next(iter(engine.names.items()))
        del engine.names[key]
        if name in self._used:
            self._used.discard(name)
            engine.names[key] = name  # as the newest
        else:
            self._release(name, engine)

    def _release(self, name: int, engine: HostBlocks) -> None:
        self._size -= 1
        if left := self._holders[name] & ~engine.bit:
            self._holders[name] = left
        else:
            del self._holders[name]
            self._used.discard(name)


def _short(block_hash: _Hash) -> int:
    # Engines publish whole hashes, or these 64 bits (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES).
    return block_hash if isinstance(block_hash, int) else int.from_bytes(block_hash[-8:], "big")


def _encoded(keys: Sequence[Any] | None) -> bytes:
    return msgspec.msgpack.encode(keys) if keys else b""


def _extra_keys(adapter: str | None, salt: str | None) -> Iterator[bytes]:
    """Yield what an engine hashes with the tokens of each block of a prompt, as `_encoded` does."""
    own = [] if adapter is None else [adapter]
    # The salt is part of the first block only, on which all others depend.
    return chain([_encoded(own if salt is None else [*own, salt])], repeat(_encoded(own)))


def _names(before: int, tokens: Sequence[int], block_tokens: int, extra: Iterator[bytes]) -> Iterator[int]:
    """Yield the names of whole blocks that follow the block of name `before`; 0 for the first ones."""
    data, step = array("I", tokens).tobytes(), 4 * block_tokens
    for end, more in zip(range(step, len(data) + 1, step), extra, strict=False):
        before = xxhash.xxh3_64_intdigest(before.to_bytes(8, "little") + data[end - step : end] + more)
        yield before
