"""vLLM's attention backends that engines of tests have: those for CPUs, or TRITON_ATTN and TRITON_MLA.

The latter are for GPUs. They declare layouts and kernel blocks themselves. Their kernels run by Triton's
interpreter, as those of vLLM's second model runner do.
"""

from __future__ import annotations

import os
from typing import Any

VARIABLE = "KVFERRY_TEST_BACKEND"
TRITON = os.environ.get(VARIABLE) == "triton"
"""Engines of tests compute attention by Triton's kernels."""


def declare() -> None:
    """In an engine's process: let vLLM's platform for CPUs choose Triton's backends."""
    if not TRITON:
        return
    import torch
    from vllm import _custom_ops
    from vllm.platforms.cpu import CpuPlatform
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.registry import AttentionBackendEnum as Backend

    from support.backends import emulated
    from support.vllm_engine import kernel_blocks

    def choose(cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: Any = None) -> str:
        return (Backend.TRITON_MLA if attn_selector_config.use_mla else Backend.TRITON_ATTN).get_path()

    def latents(*args: Any, kv_cache_dtype: str, scale: Any) -> None:
        emulated.concat_and_cache_mla(*args, kv_cache_dtype, scale)

    CpuPlatform.get_attn_backend_cls = classmethod(choose)
    # Kernels ask for the GPU's; 9.0 has FP8.
    CpuPlatform.get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    # TRITON_MLA writes latents by CUDA's operation; that for CPUs does not follow the strides.
    _custom_ops.concat_and_cache_mla = latents
    kernel_blocks.keep_block_size()
    _multiply_bfloat16()
    _combine_ranks()


def _combine_ranks() -> None:
    """Let Triton's interpreter run the kernel that combines what ranks with context parallelism computed."""
    import inspect

    from triton.runtime.interpreter import InterpretedFunction
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.v1.attention.ops.dcp import CPTritonContext

    def constants(self: Any) -> list[str]:
        found = inspect.signature(self.fn).parameters.values()
        return [one.name for one in found if "constexpr" in str(one.annotation)]

    def launch(self: Any, kernel: Any, grid: Any, *args: Any, **more: Any) -> None:
        kernel[grid](*args, **more)  # there is no compiled one to keep

    def reduce_scatter(self: Any, tensor: Any, dim: int = -1) -> Any:
        """Gloo has no such operation: each rank takes its part of the sums."""
        return (
            self.all_reduce(tensor.contiguous()).chunk(self.world_size, dim)[self.rank_in_group].contiguous()
        )

    InterpretedFunction.constexprs = property(constants)
    CPTritonContext.call_kernel = launch
    CpuCommunicator.reduce_scatter = reduce_scatter


def _multiply_bfloat16() -> None:
    """Let Triton's interpreter multiply matrices of bfloat16; it takes their codes for integers."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    theirs = InterpreterBuilder.create_dot

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (self.cast_impl(one, tl.float32) if one.dtype == tl.bfloat16 else one for one in (a, b))
        return theirs(self, a, b, *rest)

    InterpreterBuilder.create_dot = dot


def check(engine: Any) -> None:
    """Assert that an engine has the backend, and that nothing has changed what this declares."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.attention.backend import AttentionBackend

    if engine.llm_engine.vllm_config.parallel_config.tensor_parallel_size > 1:
        return  # its layers are in the workers, which are copies of this process
    layers = get_layers_from_vllm_config(engine.llm_engine.vllm_config, AttentionLayerBase)
    found = {layer.get_attn_backend() for layer in layers.values()}
    triton = {backend for backend in found if backend.get_name() in ("TRITON_ATTN", "TRITON_MLA")}
    others = {backend for backend in found - triton if not backend.is_ssm()}
    assert bool(triton) == TRITON, found
    assert not triton or not others, found
    for backend in triton:
        declared = backend.supported_kv_cache_layouts.__func__
        assert declared is AttentionBackend.supported_kv_cache_layouts.__func__, backend
        assert [size.base for size in backend.get_supported_kernel_block_sizes()] == [16], backend
