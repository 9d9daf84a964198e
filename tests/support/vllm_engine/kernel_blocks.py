"""Kernels for CPUs that take blocks of one size only, as many for GPUs do.

vLLM makes each larger block of its block tables of several such kernel blocks. Its kernels are not replaced:
those for attention take every multiple of 32 tokens, those for MLA take 16.
"""

from __future__ import annotations

from typing import Any


def declare(tokens: int) -> None:
    """Let kernels take blocks of so many tokens, in this process, before an engine is made in it."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(lambda kv_cache_spec=None: [tokens])
    keep_block_size()
    _zero_whole_blocks(tokens)


def keep_block_size() -> None:
    """Let an engine with MLA have the blocks that it was asked for; vLLM would make them the kernel's."""
    from vllm.platforms.cpu import CpuPlatform

    theirs = CpuPlatform.check_and_update_config

    def check(config: Any) -> None:
        cache = config.cache_config
        block, asked = cache.block_size, cache.user_specified_block_size
        theirs(config)
        if asked:
            cache.block_size = block

    CpuPlatform.check_and_update_config = staticmethod(check)


def _zero_whole_blocks(tokens: int) -> None:
    """Zero all kernel blocks of a new block, as on a GPU.

    vLLM's runner for CPUs takes the numbers of blocks for those of kernel blocks.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    theirs = CPUModelRunner._zero_block_ids

    def zero(self: Any, block_ids: list[int]) -> None:
        specs = [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]
        (block,) = {spec.block_size for spec in specs if isinstance(spec, FullAttentionSpec)}
        count = block // tokens
        theirs(self, [block_id * count + number for block_id in block_ids for number in range(count)])

    CPUModelRunner._zero_block_ids = zero
