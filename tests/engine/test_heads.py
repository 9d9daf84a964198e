"""Which KV heads a rank holds, by vLLM's own layers of one rank of several: no engine runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry.tools.serving.tiny import tiny_checkpoint

pytestmark = pytest.mark.engine


@contextmanager
def rank_of(monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int, model: Path) -> Iterator[Any]:
    """vLLM makes layers of that rank; its configuration."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(str(model), dtype="float32", tensor_parallel_size=ranks, max_model_len=256)
    config = args.create_engine_config()
    group = SimpleNamespace(world_size=ranks, rank_in_group=rank)
    monkeypatch.setattr(parallel_state, "_TP", group)
    with set_current_vllm_config(config):
        yield config


def attention_of(config: Any) -> dict[str, tuple[Any, Any]]:
    """A windowed layer of Gemma 4 and one that sees everything, with their specs."""
    from vllm.model_executor.models.gemma4 import Gemma4Attention

    text = config.model_config.hf_text_config
    made = {}
    for number, (heads, head_dim) in {0: (2, 32), 3: (1, 64)}.items():
        name = f"model.layers.{number}.self_attn"
        module = Gemma4Attention(text, 128, 4, heads, head_dim, 256, config.cache_config, prefix=name)
        made[f"{name}.attn"] = (module, module.attn.get_kv_cache_spec(config))
    return made


def heads_loaded(module: Any, total: int) -> list[int]:
    """The KV heads whose rows vLLM's own weight loader gives this rank."""
    projection = module.qkv_proj
    width = projection.head_size
    weight = torch.arange(total).repeat_interleave(width)[:, None].expand(-1, 128).float()
    projection.weight.data.fill_(-1)
    projection.weight_loader(projection.weight, weight, "k")
    rows = projection.weight.data[projection.num_heads * width :, 0]
    return sorted({int(row) for row in rows.tolist() if row >= 0})


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_layer_has_its_own_number_of_heads_as_its_weights_are_loaded(
    ranks: int, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvferry.engines.vllm.geometry import shards
    from support.played_worker import PlayedWorker

    model = tiny_checkpoint("gemma4", checkpoints)
    for rank in range(ranks):
        with rank_of(monkeypatch, rank, ranks, model) as config:
            made = attention_of(config)
            layers = {name: (module.attn, spec) for name, (module, spec) in made.items()}
            worker = PlayedWorker(config, torch.nn.ModuleList(module for module, _ in made.values()))
            found = shards(config, layers, rank)
            del worker
            for (name, (module, spec)), total in zip(made.items(), (2, 1), strict=True):
                shard = found[name]
                assert (shard.rank, shard.ranks, shard.total) == (rank, ranks, total)
                loaded = heads_loaded(module, total)
                assert loaded == list(range(shard.start, shard.start + spec.num_kv_heads))


def test_a_layer_that_has_no_projection_is_said_to_be_uncertain_rather_than_wrong() -> None:
    from kvferry.engines.vllm.content import Shard
    from kvferry.engines.vllm.geometry import projections, shards
    from support.played_worker import PlayedWorker

    class Parts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = torch.nn.Identity()

    parts = Parts()
    assert projections(parts.modules(), [parts.attn]) == {}
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: 8),
        compilation_config=SimpleNamespace(static_forward_context={}),
        speculative_config=None,
    )
    worker = PlayedWorker(config, parts)
    found = shards(config, {"attn": (parts.attn, SimpleNamespace(num_kv_heads=1, max_tp_shards=None))}, 1)
    assert found == {"attn": Shard(1, 2, 0, 0)}
    del worker
