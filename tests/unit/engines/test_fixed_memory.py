"""An engine whose KV cache may leave its memory is refused in words."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvferry.common.errors import ConfigError
from kvferry.engines.vllm.compat.process import check_fixed_memory

ON = "max_split_size_mb:64, expandable_segments:True"
VARIABLES = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"]


def engine(device="cuda", **model):
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=device), model_config=SimpleNamespace(**model)
    )


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize("value", [ON, "expandable_segments:true", "expandable_segments : 1"])
def test_expandable_segments_are_refused_by_the_variable_that_asks_for_them(name, value):
    with pytest.raises(ConfigError, match=f"^{name} has expandable_segments:True"):
        check_fixed_memory(engine(), transfers=True, environment={name: value})


@pytest.mark.parametrize(
    ("of", "transfers", "environment"),
    [
        (engine(), True, {}),
        (engine(), True, {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}),
        (engine(), True, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_CUDA_ALLOC_CONF": ON}),
        (engine(), False, {"PYTORCH_ALLOC_CONF": ON}),
        (engine("cpu"), True, {"PYTORCH_ALLOC_CONF": ON}),
        (engine(enable_cumem_allocator=True), True, {"PYTORCH_ALLOC_CONF": ON}),
    ],
    ids=["unset", "off", "overruled", "tiers alone", "cpu", "cumem"],
)
def test_memory_that_stays_is_taken(of, transfers, environment):
    check_fixed_memory(of, transfers=transfers, environment=environment)
