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

from dataclasses import replace
from typing import Any

from vllm.config import VllmConfig
from vllm.utils.torch_utils import resolve_kv_cache_dtype_string
from vllm.v1 import kv_cache_interface
from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_cache_spec
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

from kvferry.common.errors import ConfigError
from kvferry.geometry import NOT_INTERLEAVED, GroupKind, Interleave

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
}
"""KV cache specs that kvferry cannot move, with the reason and what the user can do."""
# Only vLLM 0.31 has this spec.
if (_KPOOL := getattr(kv_cache_interface, "KpoolTailSpec", None)) is not None:
    REFUSED[_KPOOL] = (
        "it is a ring of one block, which vLLM 0.31 describes as a sliding window; "
        "install vLLM 0.32 or newer, or serve this model without a KV connector"
    )


def scheduled_groups(vllm_config: Any, kv_cache_config: Any) -> list[Any]:
    """Return the KV cache groups, with the block sizes by which vLLM's scheduler counts tokens.

    With decode context parallelism, a block covers as many times the tokens that a rank holds of it as ranks
    share them.
    """
    ranks = vllm_config.parallel_config.decode_context_parallel_size
    return [
        replace(group, kv_cache_spec=resolve_dcp_kv_cache_spec(group.kv_cache_spec, ranks))
        for group in kv_cache_config.kv_cache_groups
    ]


def interleave_of(vllm_config: Any, spec: Any, dcp_rank: int) -> Interleave:
    """Return which tokens of a block a rank holds of a layer with this spec."""
    parallel = vllm_config.parallel_config
    ranks = int(parallel.decode_context_parallel_size)
    if ranks == 1 or not spec.dcp_sharded:
        return NOT_INTERLEAVED
    if is_ring(spec):
        raise ConfigError(
            f"decode context parallelism (DCP) of {ranks} ranks with {type(spec).__name__}: which tokens a "
            "rank keeps of a ring is not known; set --decode-context-parallel-size to 1"
        )
    return Interleave(dcp_rank, ranks, int(parallel.cp_kv_cache_interleave_size))


def layer_specs(spec: KVCacheSpec) -> dict[str, Any]:
    """Return the spec of each layer in a KV cache group, by name; only ``""`` if all are equal."""
    return dict(spec.kv_cache_specs) if isinstance(spec, UniformTypeKVCacheSpecs) else {"": spec}


def spec_of_layer(spec: KVCacheSpec, name: str) -> Any:
    """Return the spec of one layer in a KV cache group."""
    found = layer_specs(spec)
    return found.get("", None) or found[name]


def kind_of(spec: KVCacheSpec) -> GroupKind:
    """Return the kind of a KV cache group. Raise ConfigError if kvferry cannot move it."""
    kinds = {_kind_of_layer(one) for one in layer_specs(spec).values()}
    # Both need every token.
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
    """Return the length of a group's attention window or attention chunk, in tokens; 0 without one."""
    return max(_attention_span_of_layer(one) for one in layer_specs(spec).values())


def _attention_span_of_layer(spec: Any) -> int:
    if isinstance(spec, SlidingWindowSpec):
        # vLLM may retain some tokens before the window.
        return int(spec.sliding_window) + int(spec.extra_retained_tokens)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return int(spec.attention_chunk_size)
    return 0


def state_block_tokens(spec: KVCacheSpec) -> int:
    """Return the number of tokens that each block of a group with recurrent layers covers; 0 if none."""
    first = next(iter(layer_specs(spec).values()))
    # With prefix caching, each block in a block table covers a fixed range of tokens, and holds the state
    # after one of them. Without it, the first block always holds the current state, and others are scratch
    # space for speculative decoding.
    if not isinstance(first, MambaSpec) or first.mamba_cache_mode == "none":
        return 0
    return int(first.block_size)


def snapshot_tokens(spec: KVCacheSpec) -> int | None:
    """Return the minimum number of tokens between two snapshots of a group with recurrent layers.

    None for groups without recurrent layers, 0 if vLLM does not tell the connector about snapshots.
    """
    first = next(iter(layer_specs(spec).values()))
    if kind_of(spec) is not GroupKind.STATE:
        return None
    if isinstance(first, CircularBufferSpec):
        return 0
    # In this mode, vLLM takes a snapshot if a step ends at the end of a block, and tells the connector.
    return int(first.block_size) if first.mamba_cache_mode == "align" else 0


def is_recurrent(spec: KVCacheSpec) -> bool:
    """Return True if a layer with this spec keeps recurrent state (Mamba, for example)."""
    return isinstance(spec, MambaSpec)


def cache_dtype(vllm_config: VllmConfig) -> str:
    """Return the name of the KV cache's element type (``bfloat16``, ``fp8_e4m3``, ...); never ``auto``."""
    model = vllm_config.model_config
    named: str = resolve_kv_cache_dtype_string(str(vllm_config.cache_config.cache_dtype), model)
    # Both names stand for another one, so engines that differ only in the name would not exchange KV.
    resolved = {"auto": str(model.dtype).removeprefix("torch."), "fp8": "fp8_e4m3"}
    return resolved.get(named, named)


def state_dtypes(kv_cache_config: Any) -> str:
    """Return the dtypes of the recurrent layers' states as one text; empty without recurrent layers.

    The dtypes of a layer's states are separated by commas, and different kinds of layers by `` | ``.
    """
    groups = kv_cache_config.kv_cache_groups
    layers = [layer for group in groups for layer in layer_specs(group.kv_cache_spec).values()]
    found = {tuple(layer.dtypes) for layer in layers if is_recurrent(layer)}
    return " | ".join(sorted(", ".join(str(one).removeprefix("torch.") for one in each) for each in found))


def is_replicated(spec: Any) -> bool:
    """Return True if all tensor-parallel ranks hold the same data of a layer with this spec."""
    # The latent vectors of MLA, and layers that say so.
    return isinstance(spec, (MLAAttentionSpec, SlidingWindowMLASpec)) or spec.max_tp_shards == 1


def is_ring(spec: KVCacheSpec) -> bool:
    """Return True if a layer with this spec keeps a ring: one block per request, overwritten in place."""
    return isinstance(spec, CircularBufferSpec)


def has_rings(kv_cache_config: Any) -> bool:
    """Return True if any layer of the engine keeps a ring."""
    return _any_layer(kv_cache_config, CircularBufferSpec)


def reuses_prompts_only(kv_cache_config: Any) -> bool:
    """Return True if only the KV of prompts may be stored and offered, not that of generated tokens."""
    # In such a layer, a generated token attends to fewer tokens than a prompt token at its position, so their
    # KV differs.
    return _any_layer(kv_cache_config, RSWASpec)


def writes_before_hooks(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Return True if a step may write to blocks before it calls the connector's `handle_preemptions`."""
    # The first model runner calls the hook before it writes.
    if not vllm_config.use_v2_model_runner:
        return False
    # The second one first zeroes new blocks, if the cache has recurrent state or several precisions. It then
    # copies a block for each prefix hit that ends inside one, which needs blocks that are larger than the
    # unit of prefixes (`GPUModelRunner.update_requests`).
    sizes = {group.kv_cache_spec.block_size for group in scheduled_groups(vllm_config, kv_cache_config)}
    one_size = len(sizes) == 1 and vllm_config.cache_config.prefix_match_unit in (None, *sizes)
    return bool(kv_cache_config.needs_kv_cache_zeroing) or not one_size


def _any_layer(kv_cache_config: Any, of: type[KVCacheSpec]) -> bool:
    return any(
        isinstance(spec, of)
        for group in kv_cache_config.kv_cache_groups
        for spec in layer_specs(group.kv_cache_spec).values()
    )
