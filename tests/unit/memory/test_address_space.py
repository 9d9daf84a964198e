"""Views of registered memory that is in one piece or in several."""

from __future__ import annotations

import pytest
import torch

from kvferry.common.errors import TransferError
from kvferry.geometry import Region
from kvferry.memory.address_space import AddressSpace, largest_word
from kvferry.planning.strided_copy import Loop, StridedCopy

BLOCKS, BLOCK, APART, LAYERS = 4, 32, 256, 3
"""Layers of four blocks of 32 bytes each, which begin 256 bytes apart; half of these are not registered."""


@pytest.fixture
def buffer() -> torch.Tensor:
    return torch.arange(LAYERS * APART, dtype=torch.int64).to(torch.uint8)


def regions(buffer: torch.Tensor, **last) -> list[Region]:
    """The layers as allocations of their own."""
    found = [Region(buffer.data_ptr() + n * APART, BLOCKS * BLOCK) for n in range(LAYERS)]
    return [*found[:-1], Region(**{"address": found[-1].address, "length": found[-1].length, **last})]


def of_all_layers(first: int) -> StridedCopy:
    """Eight bytes of each layer."""
    return StridedCopy(first, 0, 8, (Loop(LAYERS, APART, 8),))


def view(space: AddressSpace, copy: StridedCopy) -> torch.Tensor:
    return space.view(copy, "src", BLOCK, BLOCKS, largest_word(copy, BLOCK))


def test_layers_in_allocations_of_their_own_are_one_view(buffer):
    copy = of_all_layers(buffer.data_ptr() + 16)
    found = view(AddressSpace(regions(buffer)), copy)
    whole = view(AddressSpace([Region(buffer.data_ptr(), buffer.nbytes)]), copy)
    assert found.shape == whole.shape == (BLOCKS, LAYERS, 1)
    assert torch.equal(found, whole)
    found[2, 1] = -1
    at = APART + 2 * BLOCK + 16
    assert buffer[at : at + 8].tolist() == [255] * 8
    assert (buffer == 255).sum() - (torch.arange(LAYERS * APART) % 256 == 255).sum() == 8


@pytest.mark.parametrize(
    "last",
    [{"length": BLOCKS * BLOCK - 25}, {"address": 0}, {"memory": "VRAM"}],
    ids=["too short", "elsewhere", "on a device"],
)
def test_a_layer_that_is_not_beside_the_others_is_refused(buffer, last):
    with pytest.raises(TransferError, match="not in registered memory"):
        view(AddressSpace(regions(buffer, **last)), of_all_layers(buffer.data_ptr()))


def test_copy_that_spans_two_regions_is_refused(buffer):
    copy = of_all_layers(buffer.data_ptr() + BLOCKS * BLOCK)
    with pytest.raises(TransferError, match="not in registered memory"):
        view(AddressSpace(regions(buffer)), copy)
