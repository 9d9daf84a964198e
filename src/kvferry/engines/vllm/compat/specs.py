"""Needs of a continuation from each KV cache group, by the class of vLLM's spec.

Specs are looked up by exact class: a subclass keeps something else, or keeps it elsewhere, and is refused
until somebody has read it. A test compares `KINDS` and `REFUSED` with the specs of the installed vLLM.

- `FullAttentionSpec`, `MLAAttentionSpec`: every token. With ``tokens_per_state`` above 1 (DeepSeek V4) a
  state stands for several tokens: a block of `block_size` tokens holds so many fewer states, and the block
  table still counts tokens.
- `RSWASpec`: every token of a prompt. Generated tokens see less than they would as part of a prompt, so no
  later prompt may find them (`names_prompts_only`).
- `SlidingWindowSpec`, `SlidingWindowMLASpec`: the last window. DeepSeek V4's compressor keeps tokens that it
  has not compressed yet in the latter.
- `ChunkedLocalAttentionSpec`: the current chunk.
- `MambaSpec`: one snapshot.
- `CircularBufferSpec`: one block per request, overwritten in place, with the raw keys of tokens that are not
  compressed yet. It is right at one position only, as a snapshot is.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    HiSparseHotSpec,
    HiSparseResidentSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvferry.errors import ConfigError
from kvferry.geometry import GroupKind

KINDS: dict[type[KVCacheSpec], GroupKind] = {
    FullAttentionSpec: GroupKind.FULL,
    RSWASpec: GroupKind.FULL,
    MLAAttentionSpec: GroupKind.MLA,
    SlidingWindowSpec: GroupKind.SLIDING,
    SlidingWindowMLASpec: GroupKind.SLIDING,
    ChunkedLocalAttentionSpec: GroupKind.CHUNKED,
    MambaSpec: GroupKind.STATE,
    CircularBufferSpec: GroupKind.STATE,
}
"""Specs that move, and the kind of a group of each."""

_HISPARSE = (
    "HiSparse keeps the cache in a pool of its own in host memory, which kvferry cannot read; serve without "
    "HiSparse"
)
_WITHOUT = "serve this model without a KV connector"
REFUSED: dict[type[KVCacheSpec], str] = {
    CrossAttentionSpec: (
        f"it holds what an encoder made of audio or images, which no prompt of token ids names; {_WITHOUT}"
    ),
    EncoderOnlyAttentionSpec: f"an encoder keeps nothing for later tokens; {_WITHOUT}",
    HiddenStateCacheSpec: (
        "it holds hidden states, not KV; leave out the speculative method extract_hidden_states, or serve "
        "without kvferry"
    ),
    SinkFullAttentionSpec: (
        "vLLM 0.32 writes its sinks into blocks that it also gives to requests, so a load could overwrite "
        f"them; {_WITHOUT}"
    ),
    HiSparseHotSpec: _HISPARSE,
    HiSparseResidentSpec: _HISPARSE,
}
"""Specs that do not move, with the reason and the way out."""


def layer_specs(spec: KVCacheSpec) -> dict[str, Any]:
    """Return a group's specs by layer name; if all layers share one spec, its key is ``""``."""
    return dict(spec.kv_cache_specs) if isinstance(spec, UniformTypeKVCacheSpecs) else {"": spec}


def spec_of_layer(spec: KVCacheSpec, name: str) -> Any:
    """Return the layer's own spec; a group's may wrap one per layer."""
    found = layer_specs(spec)
    return found.get("", None) or found[name]


def kind_of(spec: KVCacheSpec) -> GroupKind:
    """Return the kind of a group.

    Raises:
        ConfigError: kvferry cannot move it; says why, and what to do.
    """
    kinds = {_kind_of_layer(one) for one in layer_specs(spec).values()}
    if kinds == {GroupKind.FULL, GroupKind.MLA}:
        return GroupKind.FULL
    if len(kinds) > 1 or len({_attention_span_of_layer(one) for one in layer_specs(spec).values()}) > 1:
        names = ", ".join(sorted({type(one).__name__ for one in layer_specs(spec).values()}))
        raise ConfigError(f"one KV cache group holds layers that are continued differently ({names})")
    return kinds.pop()


def _kind_of_layer(spec: KVCacheSpec) -> GroupKind:
    name = type(spec).__name__
    if (why := REFUSED.get(type(spec))) is not None:
        raise ConfigError(f"kvferry cannot move {name}: {why}")
    if (kind := KINDS.get(type(spec))) is None:
        raise ConfigError(f"kvferry does not know the KV cache spec {name}; {_WITHOUT}")
    if getattr(spec, "non_causal", False):
        raise ConfigError(
            f"kvferry cannot move {name} of layers that are not causal: what a prefix holds depends on the "
            f"tokens after it; {_WITHOUT}"
        )
    if getattr(spec, "bounded_replay", False):
        raise ConfigError(
            f"kvferry cannot move {name} with bounded replay: a local prefix hit lacks the window; start the "
            "engine with --no-swa-bounded-replay"
        )
    return kind


def attention_span_of(spec: KVCacheSpec) -> int:
    """Return the window or chunk in tokens; 0 for other kinds."""
    return max(_attention_span_of_layer(one) for one in layer_specs(spec).values())


def _attention_span_of_layer(spec: Any) -> int:
    if isinstance(spec, SlidingWindowSpec):
        return int(spec.sliding_window) + int(spec.extra_retained_tokens)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return int(spec.attention_chunk_size)
    return 0


def state_block_tokens(spec: KVCacheSpec) -> int:
    """Return the tokens per entry of a state group's block table; 0 if its first entry is the only state.

    Without prefix caching the table is one running state (and speculative scratch behind it). With prefix
    caching, entries stand for positions, and the state after a token is kept in the block of that token. A
    ring is the only block of its table. Return 0 for other kinds, too.
    """
    first = next(iter(layer_specs(spec).values()))
    if not isinstance(first, MambaSpec) or first.mamba_cache_mode == "none":
        return 0
    return int(first.block_size)


def snapshot_tokens(spec: KVCacheSpec) -> int | None:
    """Return the smallest distance between a state group's snapshots, in tokens.

    0 if the group keeps no snapshots, None for other kinds. In `align` mode snapshots lie at ends of blocks,
    where a step ended, and are announced step by step. Other modes announce none, and neither does a ring.
    """
    first = next(iter(layer_specs(spec).values()))
    if kind_of(spec) is not GroupKind.STATE:
        return None
    if isinstance(first, CircularBufferSpec):
        return 0
    return int(first.block_size) if first.mamba_cache_mode == "align" else 0


def is_recurrent(spec: KVCacheSpec) -> bool:
    """Return True if a layer keeps a Mamba state."""
    return isinstance(spec, MambaSpec)


def is_replicated(spec: Any) -> bool:
    """Return True if all tensor-parallel ranks hold the same of a layer.

    That is so for a latent, and for a layer whose spec has one shard.
    """
    return isinstance(spec, (MLAAttentionSpec, SlidingWindowMLASpec)) or spec.max_tp_shards == 1


def is_ring(spec: KVCacheSpec) -> bool:
    """Return True if a layer's state is one block per request that it overwrites in place, not Mamba's."""
    return isinstance(spec, CircularBufferSpec)


def has_rings(kv_cache_config: Any) -> bool:
    """Return True if some layers keep a ring per request."""
    return _any_layer(kv_cache_config, CircularBufferSpec)


def names_prompts_only(kv_cache_config: Any) -> bool:
    """Return True if generated tokens have other content than they would have as part of a prompt."""
    return _any_layer(kv_cache_config, RSWASpec)


def _any_layer(kv_cache_config: Any, of: type[KVCacheSpec]) -> bool:
    return any(
        isinstance(spec, of)
        for group in kv_cache_config.kv_cache_groups
        for spec in layer_specs(group.kv_cache_spec).values()
    )
