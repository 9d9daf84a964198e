"""Copies between a whole chunk and the shares that the machines of an engine hold of it.

A share is a chunk in the form of `geometry.canonical.share`, at the same offset in the arena of each machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.geometry import RankGeometry
from kvferry.geometry.canonical import CanonicalForm, chunk_pool
from kvferry.planning.descriptors import Descriptors, concatenate
from kvferry.planning.template import Template, build_templates


@dataclass(frozen=True, slots=True, eq=False)
class ShareCopies:
    """The copies of one KV cache group between a machine's share and the whole chunk, at byte offsets.

    Attributes:
        gathered: from the share (`src`) to the chunk (`dst`). What several shares hold is gathered from one.
        scattered: from the chunk to the share: all of the share.
    """

    gathered: Descriptors
    scattered: Descriptors


def share_copies(whole: CanonicalForm, shares: Sequence[CanonicalForm]) -> list[tuple[ShareCopies, ...]]:
    """Return the copies of each machine's share, per KV cache group.

    Raise Incompatible if the shares do not hold the whole chunk, or overlap in part.
    """
    found: list[list[ShareCopies]] = [[] for _ in shares]
    for number in range(len(whole.groups)):
        chunk, pools = _chunk(whole, number), [_chunk(share, number) for share in shares]
        gathered = build_templates(pools, chunk)
        for copies, pool, template in zip(found, pools, gathered, strict=True):
            (scattered,) = build_templates([chunk], pool)
            copies.append(ShareCopies(_runs(template), _runs(scattered)))
    return [tuple(copies) for copies in found]


def _chunk(form: CanonicalForm, number: int) -> RankGeometry:
    # At address 0, so that addresses are offsets in the chunk.
    return chunk_pool(form, number, 0, 1)


def _runs(template: Template) -> Descriptors:
    return concatenate([route.runs for route in template.routes])
