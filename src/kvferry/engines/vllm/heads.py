"""KV heads of a layer that a tensor-parallel rank holds.

The layers of a model may have different numbers of KV heads: Gemma 4 has fewer in its layers with full
attention. So the number in the model's configuration need not be that of a layer. If there are fewer heads
than ranks, vLLM gives copies of one head to several ranks. Each rank then has 1 head, so this number does not
show how many heads the layer has. But the layer's QKV projection knows the number of copies: its weight
loader loads the rows of head ``rank // copies``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvferry.engines.vllm.compat.models import built_models
from kvferry.engines.vllm.compat.specs import is_replicated
from kvferry.engines.vllm.content import Shard

_COPIES = "num_kv_head_replicas"


def projections(modules: Iterable[Any], layers: Iterable[Any]) -> dict[int, Any]:
    """Return the QKV projection module of each attention layer that has one, by the layer's Python `id`.

    Args:
        modules: all modules of the models that contain the layers.
        layers: attention layers.
    """
    wanted = {id(layer) for layer in layers}
    found = {}
    for module in modules:
        children = list(module.children())
        # With LoRA, an adapter wraps the projection.
        beside = [one for child in children if hasattr(one := getattr(child, "base_layer", child), _COPIES)]
        # With several projections side by side, which one belongs to the layer is not certain.
        if len(beside) == 1:
            found.update({id(child): beside[0] for child in children if id(child) in wanted})
    return found


def shard_of(held: int, rank: int, ranks: int, projection: Any, of_model: int) -> Shard:
    """Return the range of a layer's KV heads that a rank holds; `Shard.total` is 0 for an unknown range.

    >>> shard_of(2, 1, 4, None, 8), shard_of(1, 3, 4, None, 2)
    (Shard(rank=1, ranks=4, start=2, total=8), Shard(rank=3, ranks=4, start=1, total=2))
    >>> shard_of(1, 3, 4, None, 8)  # unknown range, because 4 ranks with 1 head each cannot hold 8 heads
    Shard(rank=3, ranks=4, start=0, total=0)

    Args:
        projection: the layer's `QKVParallelLinear`; None if the layer has none.
    """
    if projection is not None and int(projection.num_kv_heads) == held:
        copies = int(projection.num_kv_head_replicas)
        start, total = projection.tp_rank // copies * held, projection.tp_size // copies * held
        return Shard(rank, ranks, start, total)
    # A rank has several heads only if none is copied.
    if held > 1 or ranks == 1:
        return Shard(rank, ranks, rank * held, ranks * held)
    # The model's number of heads is not this layer's, or the rank would hold several.
    if of_model > ranks:
        return Shard(rank, ranks, 0, 0)
    return Shard(rank, ranks, rank * of_model // ranks, of_model)


def shards(vllm_config: Any, layers: Mapping[str, tuple[Any, Any]], rank: int) -> dict[str, Shard]:
    """Return the KV heads that this rank holds, from (attention layer, its spec), by layer name."""
    ranks = int(vllm_config.parallel_config.tensor_parallel_size)
    of_model = int(vllm_config.model_config.get_total_num_kv_heads())
    # A single rank holds all heads.
    found = projections(_modules(vllm_config), (layer for layer, _ in layers.values())) if ranks > 1 else {}
    return {
        name: Shard(rank, ranks, 0, 1)  # a latent, the same on every rank
        if is_replicated(spec)
        else shard_of(int(spec.num_kv_heads), rank, ranks, found.get(id(layer)), of_model)
        for name, (layer, spec) in layers.items()
    }


def _modules(vllm_config: Any) -> Iterator[Any]:
    models = built_models(vllm_config)
    for model in (models.target, models.draft):
        if model is not None:
            yield from model.modules()
