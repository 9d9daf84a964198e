"""What blocks hold tells every word from every other, whoever keeps it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvferry.common.errors import TransferError
from kvferry.tools.measuring.owned import OwnedCache
from kvferry.tools.measuring.simulated import (
    SimulatedEngine,
    check_memory,
    fill_blocks,
    read_geometry,
    simulate_engine,
)
from kvferry.tools.plan.side import EngineSide

ATTENTION = read_geometry("Llama-3.1-8B", {"num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 8})
HYBRID = {"num_hidden_layers": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2}


def _filled(one: SimulatedEngine, rank: int = 0) -> OwnedCache:
    memory = one.allocated(rank)
    fill_blocks(memory, one)
    return memory


def _attention(seed: int, **side: int | str) -> SimulatedEngine:
    return simulate_engine("tiny", ATTENTION, EngineSide(**side), 64, seed=seed)


def test_the_same_token_and_head_hold_the_same_on_every_engine() -> None:
    whole, part = _attention(1), _attention(2, tp=2, layout="BHLNC")
    (ours,), (theirs,) = whole.tables, part.tables
    for rank in (0, 1):
        one, other = _filled(whole).views(guarded=False), _filled(part, rank).views(guarded=False)
        for layer, pages in one.items():
            heads = pages[ours][:, 2 * rank : 2 * rank + 2]
            assert torch.equal(heads, other[layer][theirs])


def test_state_is_the_same_on_ranks_that_share_it_out() -> None:
    reading = read_geometry("Qwen3-Next-80B-A3B", HYBRID)
    whole, part = (simulate_engine("tiny", reading, EngineSide(tp=tp), 1088) for tp in (1, 2))
    one, other = (_filled(e, rank).states(guarded=False) for e, rank in ((whole, 0), (part, 1)))
    here = {layer.name: int(t[0]) for g, t in zip(_groups(whole), whole.tables, strict=True) for layer in g}
    there = {layer.name: int(t[0]) for g, t in zip(_groups(part), part.tables, strict=True) for layer in g}
    for layer, fields in one.items():
        for name, elements in fields.items():
            mine = elements[here[layer]]
            half = mine.shape[0] // 2
            assert torch.equal(mine[half:], other[layer][name][there[layer]])


def _groups(one: SimulatedEngine) -> list:
    return [group.layers for group in one.allocated(0).geometry.groups]


def test_no_two_words_are_alike() -> None:
    one = _attention(1)
    pages = torch.stack(list(_filled(one).views(guarded=False).values()))[:, one.tables[0]]
    words = pages.contiguous().numpy().view(np.int64).reshape(-1)
    assert len(np.unique(words)) == len(words)


def test_correct_content_passes() -> None:
    check_memory(_filled(_attention(1)), _filled(_attention(1)))


def test_one_wrong_byte_is_noticed() -> None:
    found = _filled(_attention(1))
    found.buffer[5000] ^= 1
    with pytest.raises(TransferError, match=r"1 of .* bytes are not what they must be"):
        check_memory(found, _filled(_attention(1)))


def test_blocks_in_another_order_are_noticed() -> None:
    with pytest.raises(TransferError, match="please report this"):
        check_memory(_filled(_attention(1)), _filled(_attention(2)))
