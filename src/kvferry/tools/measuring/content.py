"""Fill a request's blocks with values that identify their position, and compare memory.

The value of an element depends on its layer, field, token, head and position within the head, and not on the
engine's layout or parallel sizes. It is written through the views that an engine uses. So the expected memory
after a transfer can be computed without a transfer, and compared byte for byte.
"""

from __future__ import annotations

from functools import cache
from math import gcd, prod

import numpy as np
import torch

from kvferry.errors import TransferError
from kvferry.geometry import Group, GroupKind, Layer
from kvferry.tools.measuring.simulated import SimulatedEngine
from kvferry.memory.device_stream import finish_stream
from kvferry.memory.owned import OwnedCache

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Large odd numbers without meaning, so that products differ in all bytes modulo 2**64.
_HEAD, _TOKEN, _WORD, _LAYER, _FIELD, _MIX = (
    0x1B873593CC9E2D51, 0x27D4EB2F165667C5, 0x369DEA0F31A53F85, 0x2545F4914F6CDD1D, 0x41C64E6DA3BC0075,
    0x5851F42D4C957F2D,
)  # fmt: skip


def fill_blocks(memory: OwnedCache, engine: SimulatedEngine) -> None:
    """Write test values into the blocks of an engine's request on one rank. Mutates `memory`."""
    pages, states = memory.views(guarded=False), memory.states(guarded=False)
    for group, table in zip(memory.geometry.groups, engine.tables, strict=True):
        for layer in group.layers:
            number = int(layer.name.rpartition(".")[2])
            if group.kind is GroupKind.STATE:
                _fill_state(states[layer.name], layer, number, int(table[0]))
            else:
                _fill_pages(pages[layer.name], group, layer, number, table.tolist())
    finish_stream(memory.buffer.device)


def check_memory(memory: OwnedCache, expected: OwnedCache) -> None:
    """Check that a rank's memory equals the expected memory, byte for byte.

    Raises:
        TransferError: a byte differs.
    """
    found, wanted = memory.buffer.cpu().numpy(), expected.buffer.cpu().numpy()
    if np.array_equal(found, wanted):
        return
    wrong = int((found != wanted).sum())
    raise TransferError(
        f"{wrong:,} of {len(found):,} bytes are not what they must be after a move: please report this"
    )


def _fill_pages(pages: torch.Tensor, group: Group, layer: Layer, number: int, table: list[int]) -> None:
    _, heads, tokens, content = pages.shape
    # Writing words is quicker than bytes. The largest that divides a head's bytes.
    word = gcd(8, content)
    words = pages.view(_WORDS[word])
    base = _base(_first_head(layer), (heads, tokens, content // word))
    for position, block in enumerate(table):
        if block:
            first = position * group.block_tokens
            words[block].copy_(_mix_bits(base + _wrap(first * _TOKEN + number * _LAYER)).to(_WORDS[word]))


def _fill_state(fields: dict[str, torch.Tensor], layer: Layer, number: int, block: int) -> None:
    for index, (field, elements) in enumerate(fields.items()):
        axis = next(f for f in layer.page.fields if f.name == field).axis("head")
        heads, inner = elements.shape[1], elements.shape[2:]
        base = _base(axis.start if axis else 0, (heads, 1, prod(inner)))
        value = _mix_bits(base + _wrap(number * _LAYER + (index + 1) * _FIELD))
        elements[block].copy_(value.reshape(heads, *inner).to(elements.dtype))


def _first_head(layer: Layer) -> int:
    axis = layer.page.fields[0].axis("head")
    return axis.start if axis else 0


@cache
def _base(first_head: int, counts: tuple[int, int, int]) -> torch.Tensor:
    """Return the part of a page's test values that is the same for every block and layer.

    Args:
        first_head: index, among the model's heads, of the first head in the page.
        counts: number of heads, number of tokens, and number of words per head and token.

    Returns:
        int64 of shape (heads, tokens, words).
    """
    head, token, word = (torch.arange(count, dtype=torch.int64) for count in counts)
    return ((head + first_head) * _HEAD)[:, None, None] + (token * _TOKEN)[None, :, None] + word * _WORD


def _mix_bits(value: torch.Tensor) -> torch.Tensor:
    """Mix the bits of each element of an int64 tensor, which is mutated and returned."""
    # So that each bit depends on many of the original ones: a swapped byte is then a wrong one.
    value ^= value >> 29
    value *= _MIX
    return value.__ixor__(value >> 32)


def _wrap(value: int) -> int:
    """Return the signed 64-bit integer that equals `value` modulo 2**64."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
