"""KV cache specs: the earlier tokens that a continuation needs from each KV cache group.

Specs are looked up by their exact class. A subclass keeps other data, or keeps it elsewhere, so kvferry
refuses it until somebody has read it. A test compares `KINDS` and `REFUSED` with the specs of the installed
vLLM.

- `FullAttentionSpec`, `MLAAttentionSpec`: every token. With ``tokens_per_state`` above 1 (DeepSeek V4), a
  state stands for several tokens. A block of `block_size` tokens then holds that many times fewer states, and
  the block table still counts tokens.
- `RSWASpec`: every token of a prompt. Generated tokens attend to fewer tokens than they would as part of a
  prompt, so no later prompt may reuse their KV (`reuses_prompts_only`).
- `SlidingWindowSpec`, `SlidingWindowMLASpec`: the last window. DeepSeek V4's compressor uses the latter for
  tokens that it has not compressed yet.
- `ChunkedLocalAttentionSpec`: the current chunk of the attention mask.
- `MambaSpec`: one snapshot, which is the recurrent state at one position.
- `CircularBufferSpec`: one block per request, overwritten in place, with the raw keys of tokens that are not
  compressed yet. Like a snapshot, it is valid at one position only.
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

from kvferry.engines.vllm.compat.kpool import refused_kpool
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
"""KV cache specs that kvferry can move, and the kind of group that each describes."""

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
        "vLLM writes its sinks into blocks that it also gives to requests, so a load could overwrite "
        f"them; {_WITHOUT}"
    ),
    HiSparseHotSpec: _HISPARSE,
    HiSparseResidentSpec: _HISPARSE,
    **refused_kpool(),
}
"""KV cache specs that kvferry cannot move, with the reason and what the user can do."""


def layer_specs(spec: KVCacheSpec) -> dict[str, Any]:
    """Return the KV cache spec of each layer in a KV cache group, by layer name.

    If all layers have the same spec, the result has a single entry with the key ``""``.

    Args:
        spec: spec of the group.
    """
    return dict(spec.kv_cache_specs) if isinstance(spec, UniformTypeKVCacheSpecs) else {"": spec}


def spec_of_layer(spec: KVCacheSpec, name: str) -> Any:
    """Return the KV cache spec of one layer in a KV cache group.

    Args:
        spec: spec of the group. It applies to all layers, or contains one spec per layer.
        name: name of the layer.
    """
    found = layer_specs(spec)
    return found.get("", None) or found[name]


def kind_of(spec: KVCacheSpec) -> GroupKind:
    """Return the kind of a KV cache group, such as full attention, sliding window or recurrent state.

    The kind determines which earlier tokens are needed to compute the next token.

    Args:
        spec: spec of the group.

    Raises:
        ConfigError: kvferry cannot move the group. The message says why and what to do.
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
    """Return the length of a group's attention window or attention chunk, in tokens; 0 without one.

    If the layers of the group have different lengths, the result is the maximum. vLLM may retain some tokens
    before a window (`extra_retained_tokens`); they are added to the window's length.

    Args:
        spec: spec of the group.
    """
    return max(_attention_span_of_layer(one) for one in layer_specs(spec).values())


def _attention_span_of_layer(spec: Any) -> int:
    if isinstance(spec, SlidingWindowSpec):
        return int(spec.sliding_window) + int(spec.extra_retained_tokens)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return int(spec.attention_chunk_size)
    return 0


def state_block_tokens(spec: KVCacheSpec) -> int:
    """Return the number of tokens that each block of a group with recurrent layers covers.

    With prefix caching, each block in a request's block table covers a fixed range of tokens, and holds the
    recurrent state after one of these tokens. Without prefix caching, the first block always holds the
    current state. Any other blocks are scratch space for speculative decoding.

    Returns:
        Number of tokens. 0 without prefix caching, for groups without recurrent layers, and for rings (one
        block per request, overwritten in place).
    """
    first = next(iter(layer_specs(spec).values()))
    if not isinstance(first, MambaSpec) or first.mamba_cache_mode == "none":
        return 0
    return int(first.block_size)


def snapshot_tokens(spec: KVCacheSpec) -> int | None:
    """Return the minimum number of tokens between two snapshots of a group with recurrent layers.

    A snapshot is the recurrent state at one position. In the Mamba cache mode `align`, vLLM takes a snapshot
    if a step ends at the end of a block, and tells the connector about it.

    Returns:
        Number of tokens; None for groups without recurrent layers. 0 if vLLM does not tell the connector
        about snapshots: in other cache modes, and for rings (one block per request, overwritten in place).
    """
    first = next(iter(layer_specs(spec).values()))
    if kind_of(spec) is not GroupKind.STATE:
        return None
    if isinstance(first, CircularBufferSpec):
        return 0
    return int(first.block_size) if first.mamba_cache_mode == "align" else 0


def is_recurrent(spec: KVCacheSpec) -> bool:
    """Return True if a layer with this KV cache spec keeps recurrent state (Mamba, for example)."""
    return isinstance(spec, MambaSpec)


def is_replicated(spec: Any) -> bool:
    """Return True if all tensor-parallel ranks hold the same data of a layer with this KV cache spec.

    This is the case for the latent vectors of MLA, and for layers whose spec sets ``max_tp_shards`` to 1.
    """
    return isinstance(spec, (MLAAttentionSpec, SlidingWindowMLASpec)) or spec.max_tp_shards == 1


def is_ring(spec: KVCacheSpec) -> bool:
    """Return True if a layer with this spec keeps a ring: one block per request, overwritten in place."""
    return isinstance(spec, CircularBufferSpec)


def has_rings(kv_cache_config: Any) -> bool:
    """Return True if any layer of the engine keeps a ring: one block per request, overwritten in place."""
    return _any_layer(kv_cache_config, CircularBufferSpec)


def reuses_prompts_only(kv_cache_config: Any) -> bool:
    """Return True if only the KV of prompts may be stored and offered, not the KV of generated tokens.

    This is the case if the engine has layers in which a generated token attends to fewer earlier tokens than
    a prompt token at the same position (`RSWASpec`). The KV of the two tokens then differs.
    """
    return _any_layer(kv_cache_config, RSWASpec)


def writes_before_hooks(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Return whether a step may write to blocks before it calls the connector's `handle_preemptions`.

    The second model runner first zeroes new blocks, if the cache has recurrent state or several precisions.
    It then copies a block for each prefix hit that ends inside one, which needs blocks that are larger than
    the unit of prefixes (``GPUModelRunner.update_requests``). The first model runner calls the hook before.

    Args:
        vllm_config, kv_cache_config: vLLM's configurations of the engine and of its KV cache.
    """
    if not vllm_config.use_v2_model_runner:
        return False
    sizes = {group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups}
    one_size = len(sizes) == 1 and vllm_config.cache_config.prefix_match_unit in (None, *sizes)
    return bool(kv_cache_config.needs_kv_cache_zeroing) or not one_size


def _any_layer(kv_cache_config: Any, of: type[KVCacheSpec]) -> bool:
    return any(
        isinstance(spec, of)
        for group in kv_cache_config.kv_cache_groups
        for spec in layer_specs(group.kv_cache_spec).values()
    )
