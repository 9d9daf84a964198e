"""Recurrent state as a real engine of any number of ranks leaves it: pages, and what fields find in them."""

from __future__ import annotations

import multiprocessing as mp
import os
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvferry.geometry import Field, PageFormat
from support.vllm_engine.process import ENVIRONMENT, EngineError


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
        numbers = torch.from_numpy(np.ascontiguousarray(raw)).view(self.dtype(field)).double()
        return numbers.reshape([axis.count for axis in field.axes]).numpy()

    def dtype(self, field: Field) -> torch.dtype:
        """dtype of a field: a page's content names that of the convolution first, that of the state last."""
        _, *dtypes = self.format.content.split()
        return getattr(torch, dtypes[-1 if field.name == "ssm" else 0])


def states_after(
    prompt: list[int], log: Path, environment: dict[str, str] | None = None, **settings: Any
) -> list[Page]:
    """What an engine of its own has as state after all but the last token of a prompt, of every rank.

    Args:
        prompt: computed as for another engine, so that its blocks are kept.
        log: file for what the engine prints.
        environment: on top of `ENVIRONMENT`.
        settings: of `vllm.LLM`, with a connector.
    """
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    arguments = (theirs, str(log), {**ENVIRONMENT, **(environment or {})}, prompt, settings)
    process = context.Process(target=_compute, args=arguments)
    process.start()
    theirs.close()
    try:
        if not ours.poll(280.0):
            raise EngineError(f"no answer; see {log}")
        pages = ours.recv()
    except EOFError:
        raise EngineError(f"the engine's process ended; see {log}") from None
    finally:
        process.join(20)
        if process.is_alive():
            process.kill()
            process.join(5)
    if isinstance(pages, str):
        raise EngineError(f"{pages}\nsee {log}")
    return pages


def _compute(pipe: Any, log: str, environment: dict[str, str], prompt: list[int], settings: Any) -> None:
    os.setsid()
    os.environ.update(environment)
    out = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    try:
        from support.vllm_engine import inside

        engine = inside.start(settings)
        offer = inside.prefill(engine, [prompt])[0]["params"]
        asked = (offer["remote_block_ids"], offer["remote_num_tokens"])
        answers = engine.collective_rpc(_pages, args=asked)
        pipe.send([page for of_rank in answers for page in of_rank])
        inside.stop(engine)
    except BaseException as error:  # noqa: BLE001 - told to the test
        traceback.print_exc()
        pipe.send(f"{type(error).__name__}: {error}")
    os._exit(0)


def _pages(worker: Any, tables: list[list[int]], tokens: int) -> list[Page]:
    """On every worker: the page of every state layer that holds the state after `tokens` tokens."""
    import ctypes

    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from kvferry.geometry import GroupKind
    from kvferry.planning.select import Span, blocks_needed

    (half,) = get_kv_transfer_group()._halves.values()
    found = []
    for group, table in zip(half._geometry.groups, tables, strict=True):
        if group.kind is not GroupKind.STATE:
            continue
        span = Span(0, tokens, tokens + 1)
        (block,) = blocks_needed(group.kind, group.reach, group.block_tokens, span, np.array(table, np.int64))
        for layer in group.layers:
            address = layer.address + int(block) * layer.block_stride
            raw = np.frombuffer(ctypes.string_at(address, layer.page.page_bytes), np.uint8)
            found.append(Page(layer.name, half._geometry.tp_rank, layer.page, raw))
    return found
