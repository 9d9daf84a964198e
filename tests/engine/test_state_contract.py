"""What is taken for granted of vLLM's state layers, also of those that no engine runs on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry.engines.vllm.state import (
    FORMATS,
    Rank,
    StateFormat,
    fields_of,
    find_mismatch,
    gated_delta,
    linear,
    mamba1,
    mamba2,
    short_conv,
)

pytestmark = pytest.mark.engine

ranks = pytest.mark.parametrize("size", [1, 2, 4, 8])


def of_mamba2(groups: int) -> Any:
    return SimpleNamespace(
        num_heads=16, head_dim=4, ssm_state_size=32, conv_kernel_size=4, norm=SimpleNamespace(n_groups=groups)
    )


def of_gated_delta_net() -> Any:
    return SimpleNamespace(num_k_heads=8, num_v_heads=16, head_k_dim=6, head_v_dim=5, conv_kernel_size=4)


def of_kimi_delta() -> Any:
    return SimpleNamespace(num_heads=8, head_dim=6, conv_size=4)


def shapes(state: StateFormat, size: int, drafts: int = 0) -> tuple[tuple[int, ...], ...]:
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    return state.shapes(size, state.window + drafts, is_conv_state_dim_first())


@ranks
def test_shapes_are_those_that_vllm_computes(size: int) -> None:
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Theirs

    layer = SimpleNamespace(intermediate_size=64, ssm_state_size=16, conv_kernel_size=4)
    assert shapes(mamba1(layer), size) == Theirs.mamba1_state_shape(size, 64, 16, 4)
    for groups in (1, 8):
        theirs = Theirs.mamba2_state_shape(size, 64, groups, 16, 4, 32, 4, num_spec=2)
        assert shapes(mamba2(of_mamba2(groups)), size, 2) == theirs
    theirs = Theirs.gated_delta_net_state_shape(size, 8, 16, 6, 5, 4, num_spec=2)
    assert shapes(gated_delta(of_gated_delta_net()), size, 2) == theirs
    theirs = Theirs.kda_state_shape(size, 8, 6, conv_kernel_size=4, num_spec=2)
    assert shapes(gated_delta(of_kimi_delta()), size, 2) == theirs
    layer = SimpleNamespace(num_heads=8, head_dim=4)
    assert shapes(linear(layer), size) == Theirs.linear_attention_state_shape(8, size, 4)
    layer = SimpleNamespace(conv_dim=64, L_cache=3)
    assert shapes(short_conv(layer), size, 2) == Theirs.short_conv_state_shape(size, 64, 3, num_spec=2)


def test_every_mamba_type_of_vllm_has_a_format() -> None:
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

    assert set(FORMATS) == {kind.name for kind in MambaAttentionBackendEnum} - {"CUSTOM"}


@ranks
@pytest.mark.parametrize("groups", [1, 8])
def test_the_loader_of_mamba2_confirms_its_fields(size: int, groups: int) -> None:
    from vllm.model_executor.layers.mamba.mamba_mixer2 import mamba_v2_sharded_weight_loader

    state = mamba2(of_mamba2(groups))
    counted = groups if groups % size == 0 else size
    of_groups = (counted * 32, (counted - groups) * 32, groups == 1)
    for rank in range(size):
        loader = mamba_v2_sharded_weight_loader([(64, 0, False), of_groups, of_groups], size, rank)
        assert confirmed(state, loader, rank, size)
        if size > 1:
            assert not confirmed(state, loader, (rank + 1) % size, size)


@ranks
def test_the_loaders_of_delta_nets_confirm_their_fields(size: int) -> None:
    from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import _make_fused_conv1d_weight_loader
    from vllm.model_executor.layers.mamba.mamba_mixer2 import mamba_v2_sharded_weight_loader

    for rank in range(size):
        qwen = mamba_v2_sharded_weight_loader([(48, 0, False), (48, 0, False), (80, 0, False)], size, rank)
        kimi = _make_fused_conv1d_weight_loader([48, 48, 48], size, rank)
        assert confirmed(gated_delta(of_gated_delta_net()), qwen, rank, size)
        assert confirmed(gated_delta(of_kimi_delta()), kimi, rank, size)
        if size > 1:
            assert not confirmed(gated_delta(of_kimi_delta()), kimi, (rank + 1) % size, size)


def confirmed(state: StateFormat, loader: Any, rank: int, size: int) -> bool:
    """Whether a convolution's weight with this loader confirms the fields of that rank."""
    held = sum(segment.channels_per_rank(size) for segment in state.segments)
    weight = torch.nn.Parameter(torch.zeros(held, 1, state.window + 1), requires_grad=False)
    weight.weight_loader = loader
    heads = state.recurrent[0][1]
    slopes = torch.arange(heads)
    share = slice(rank * heads // size, (rank + 1) * heads // size)
    layer = SimpleNamespace(conv1d=SimpleNamespace(weight=weight), slope_rate=slopes, tp_slope=slopes[share])
    return not find_mismatch(
        layer, state, fields_of(state, state.window, [4, 4], Rank(rank, size, channels_first=False))
    )
