"""Data-parallel ranks of a mixture of experts on a CPU: vLLM's CPU communicator lacks two operations."""

from __future__ import annotations

from typing import Any


def declare() -> None:
    """Add the operations that gather the tokens of all ranks, and give each rank the sums of its own.

    They are synchronous, so the ranks compute each layer together, as on GPUs.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator.all_gatherv = _all_gatherv
    CpuCommunicator.reduce_scatterv = _reduce_scatterv
    CpuCommunicator.reduce_scatterv_into_output = _reduce_scatterv_into_output


def _all_gatherv(self: Any, tensors: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    import torch

    assert dim == 0
    if not isinstance(tensors, list):
        return _all_gatherv(self, [tensors], dim, sizes)[0]
    gathered = []
    for tensor in tensors:
        counts = sizes or [len(tensor)] * self.world_size
        # Gloo gathers pieces of one size only.
        pieces = [tensor.new_empty((count, *tensor.shape[1:])) for count in counts]
        pieces[self.rank_in_group] = tensor.contiguous()
        for rank, piece in zip(self.ranks, pieces, strict=True):
            torch.distributed.broadcast(piece, src=rank, group=self.device_group)
        gathered.append(torch.cat(pieces))
    return gathered


def _reduce_scatterv(self: Any, tensor: Any, dim: int = -1, sizes: list[int] | None = None) -> Any:
    import torch

    assert dim == 0
    total = tensor.contiguous().clone()
    torch.distributed.all_reduce(total, group=self.device_group)
    counts = sizes or [len(tensor) // self.world_size] * self.world_size
    start = sum(counts[: self.rank_in_group])
    return total[start : start + counts[self.rank_in_group]].clone()


def _reduce_scatterv_into_output(
    self: Any, tensor: Any, output: Any, dim: int = -1, sizes: list[int] | None = None
) -> Any:
    return output.copy_(_reduce_scatterv(self, tensor, dim, sizes))
