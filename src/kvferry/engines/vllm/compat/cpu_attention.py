"""One attention step over bfloat16, as vLLM computes it on this machine's CPU.

    python -m kvferry.engines.vllm.compat.cpu_attention

vLLM chooses instructions by the processor's flags. In some virtual machines a flag promises instructions
(AMX) that end a process with SIGILL. Only a process that computes finds that out.
"""

from __future__ import annotations

_BLOCKS, _BLOCK_TOKENS, _HEADS, _HEAD_DIM = 2, 32, 1, 64


def compute_attention() -> str:
    """Write and read a KV cache of one block with vLLM's operations; return the name of the instructions.

    A processor that lacks the instructions ends the process.
    """
    import torch  # noqa: PLC0415 - slow
    from vllm import _custom_ops as ops  # noqa: PLC0415 - the same
    from vllm.platforms import current_platform  # noqa: PLC0415 - the same
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415 - the same

    current_platform.import_kernels()
    isa = str(_get_attn_isa(torch.bfloat16, _BLOCK_TOKENS, _HEAD_DIM))
    values = torch.ones((_BLOCK_TOKENS, _HEADS, _HEAD_DIM), dtype=torch.bfloat16)
    cache = torch.zeros((_BLOCKS, _HEADS, 2 * _BLOCK_TOKENS, _HEAD_DIM), dtype=torch.bfloat16)
    keys, contents = cache.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(values, values, keys, contents, torch.arange(_BLOCK_TOKENS), isa)
    starts = torch.tensor([0, _BLOCK_TOKENS], dtype=torch.int32)
    lengths = torch.tensor([_BLOCK_TOKENS], dtype=torch.int32)
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1,
        num_heads=_HEADS,
        num_kv_heads=_HEADS,
        head_dim=_HEAD_DIM,
        seq_lens=lengths,
        dtype=torch.bfloat16,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=True,
    )
    ops.cpu_attention_with_kv_cache(
        query=values,
        key_cache=keys,
        value_cache=contents,
        output=torch.empty_like(values),
        query_start_loc=starts,
        seq_lens=lengths,
        scale=1.0,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=torch.zeros((1, 1), dtype=torch.int32),
        softcap=0.0,
        scheduler_metadata=plan,
        s_aux=None,
    )
    return isa


if __name__ == "__main__":
    compute_attention()
