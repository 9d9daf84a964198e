"""Recurrent state as a real engine of any number of ranks leaves it: pages, and what fields find in them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvferry.geometry import Field, PageFormat
from support.vllm_engine import inside, process
from support.vllm_engine.parts import only_half


@dataclass(frozen=True)
class Page:
    """One rank's state of one layer after a prompt.

    Attributes:
        layer: its name.
        rank: tensor-parallel rank.
        format: what the worker says is in it.
        bytes: the page, uint8.
    """

    layer: str
    rank: int
    format: PageFormat
    bytes: np.ndarray

    def values(self, field: Field) -> np.ndarray:
        """The elements of a field, float64, one dimension per axis in the field's order."""
        offsets = np.array([field.offset], np.int64)
        for axis in field.axes:
            offsets = (offsets[:, None] + axis.offsets()).reshape(-1)
        raw = self.bytes[offsets[:, None] + np.arange(field.item_bytes)]
        numbers = torch.from_numpy(np.ascontiguousarray(raw)).view(self._dtype(field)).double()
        return numbers.reshape([axis.count for axis in field.axes]).numpy()

    def _dtype(self, field: Field) -> torch.dtype:
        """The content id names the dtype of the convolution first, that of the recurrent state last."""
        _, *dtypes = self.format.content.split()
        return getattr(torch, dtypes[-1 if field.name == "ssm" else 0])


def serve(*told: Any) -> None:
    """As `process.serve`, with what is below beside the functions of `inside`."""
    inside.kept_states = kept_states
    inside.spoil_states = spoil_states
    process.serve(*told)


class RankEngine(process.Engine):
    """An engine of any number of ranks, which can also run `kept_states` and `spoil_states`."""

    main = staticmethod(serve)


def kept_states(engine: Any, offer: dict[str, Any]) -> list[Page]:
    """Every rank's pages of the state that an engine keeps for another one."""
    return [page for of_rank in engine.collective_rpc(_pages, args=_asked(engine, offer)) for page in of_rank]


def spoil_states(engine: Any, offer: dict[str, Any]) -> None:
    """Invert the sign of every element of that state, on every rank."""
    engine.collective_rpc(_spoil, args=_asked(engine, offer))


def _asked(engine: Any, offer: dict[str, Any]) -> tuple[list[list[int]], int]:
    return inside.granted(engine, offer), offer["remote_num_tokens"]


def _where(tables: list[list[int]], tokens: int) -> Any:
    """(rank, layer, address) of this worker's state pages that hold the state after `tokens` tokens."""
    from kvferry.geometry import GroupKind
    from kvferry.planning.select import LoadSpan, blocks_needed

    half = only_half()
    for group, table in zip(half.geometry.groups, tables, strict=True):
        if group.kind is not GroupKind.STATE:
            continue
        span = LoadSpan(0, tokens, tokens + 1)
        (block,) = blocks_needed(group, span, np.array(table, np.int64))
        for layer in group.layers:
            yield half.geometry.tp_rank, layer, layer.address + int(block) * layer.block_stride


def _pages(worker: Any, tables: list[list[int]], tokens: int) -> list[Page]:
    return [
        Page(layer.name, rank, layer.page, _memory(layer, address).copy())
        for rank, layer, address in _where(tables, tokens)
    ]


def _memory(layer: Any, address: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_char * layer.page.page_bytes).from_address(address), np.uint8)


def _spoil(worker: Any, tables: list[list[int]], tokens: int) -> None:
    for _, layer, address in _where(tables, tokens):
        memory = _memory(layer, address)
        for field in layer.page.fields:
            offsets = np.array([field.offset + field.item_bytes - 1], np.int64)
            for axis in field.axes:
                offsets = (offsets[:, None] + axis.offsets()).reshape(-1)
            memory[offsets] ^= 0x80
