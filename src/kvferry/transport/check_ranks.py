"""Check a peer's description of its ranks: sizes must be within limits, and ranks must agree.

A peer with the right key may still send wrong sizes. Planning runs in the thread that extends leases, and its
time and memory grow with the sizes in a geometry. So sizes are checked before planning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvferry.errors import ProtocolError
from kvferry.geometry import Layer, RankGeometry, Region
from kvferry.terminal import shown

if TYPE_CHECKING:
    from kvferry.transport.messages import RankCard

MAX_NAME = 1024
MAX_GROUPS = 256
MAX_LAYERS = 4096
MAX_REGIONS = 4096
MAX_FIELDS = 64
MAX_AXES = 16
MAX_LOOPS = 16
MAX_FACTORS = 65_536

_ADDRESSES = 1 << 63  # addresses are computed as int64
_MEMORIES = ("DRAM", "VRAM")


def check_ranks(cards: Sequence[RankCard]) -> None:
    """Check that a peer's rank descriptions are in bounds, and that the ranks form one engine.

    Raises:
        ProtocolError: a value, such as a size or an address, is out of bounds; a rank is missing or described
            twice; or the ranks differ in their parallel sizes or KV cache groups.
        GeometryError: the geometry of a rank is inconsistent.
    """
    for card in cards:
        for what, count, most in _sizes(card.geometry):
            if count > most:
                raise ProtocolError(f"{count} {what}, at most {most}")
    # Only now are the geometries small enough to be looked at closely.
    for card in cards:
        _check_words(card)
        for region in card.geometry.regions:
            _check_region(region)
        card.geometry.check()  # its time grows with the sizes, too
    _check_agreement([card.geometry for card in cards])


def _sizes(rank: RankGeometry) -> Iterator[tuple[str, int, int]]:
    """Yield (name, size, limit) for every size in a rank's geometry that has a limit."""
    yield "groups of a rank", len(rank.groups), MAX_GROUPS
    yield "layers of a rank", sum(len(group.layers) for group in rank.groups), MAX_LAYERS
    yield "regions of a rank", len(rank.regions), MAX_REGIONS
    for group in rank.groups:
        for layer in group.layers:
            yield from _sizes_of_layer(layer)


def _sizes_of_layer(layer: Layer) -> Iterator[tuple[str, int, int]]:
    names = (layer.name, layer.draft, layer.page.content)
    yield "characters of a name", max(map(len, names)), MAX_NAME
    yield "scales of a layer", len(layer.scales), MAX_FIELDS
    for scale in layer.scales:
        yield "characters of a scale's source", len(scale.source), MAX_NAME
        yield "factors of a scale", len(scale.factors), MAX_FACTORS
    yield "fields of a page", len(layer.page.fields), MAX_FIELDS
    for field in layer.page.fields:
        yield "characters of a field's name", len(field.name), MAX_NAME
        yield "axes of a field", len(field.axes), MAX_AXES
        for axis in field.axes:
            yield "characters of an axis' name", len(axis.name), MAX_NAME
            yield "loops of an axis", len(axis.loops), MAX_LOOPS


def _check_region(region: Region) -> None:
    if region.memory not in _MEMORIES:
        raise ProtocolError(f"memory of kind {shown(region.memory)}, expected {' or '.join(_MEMORIES)}")
    if region.address < 0 or region.length < 1 or region.address + region.length > _ADDRESSES:
        raise ProtocolError(
            f"a region of {region.length} bytes at address {region.address}, expected one within 63 bits"
        )
    if not 0 <= region.device < 1 << 16:
        raise ProtocolError(f"a region on device {region.device}, expected 0 to 65535")


def _check_words(card: RankCard) -> None:
    if card.leases < 1:
        raise ProtocolError(
            f"a rank with {card.words} words, none of them a lease word; expected one or more"
        )
    if card.words_address + 8 * card.words > _ADDRESSES:
        raise ProtocolError(
            f"{card.words} words at address {card.words_address}, expected them within 63 bits"
        )


def _check_agreement(ranks: Sequence[RankGeometry]) -> None:
    if not ranks:  # the handshake refuses that
        return
    first = ranks[0]
    sizes = {(rank.pp_size, rank.tp_size) for rank in ranks}
    places = {(rank.pp_rank, rank.tp_rank) for rank in ranks}
    expected = first.pp_size * first.tp_size
    if len(sizes) > 1 or len(places) < len(ranks) or len(ranks) != expected:
        raise ProtocolError(
            f"{len(ranks)} ranks with {len(places)} different indices, parallel sizes (pp, tp) "
            f"{sorted(sizes)[:4]}; "
            f"expected {expected} ranks of one size, each with its own index"
        )
    groups = {
        tuple((one.kind, one.block_tokens, one.attention_span) for one in rank.groups) for rank in ranks
    }
    if len(groups) > 1:
        raise ProtocolError("the peer's ranks have different KV cache groups; all must have the same")
