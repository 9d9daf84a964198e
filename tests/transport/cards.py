"""Small engines as they introduce themselves on the control channel."""

from __future__ import annotations

from kvferry.geometry import GroupKind
from kvferry.transport.messages import Facts, RankCard
from support.engines import EngineSpec, Family, GroupSpec, Interior, Stored, ranks

ATTENTION = Family(
    GroupKind.FULL, fields=(Stored("k", 2, 4, (("content", 8),)), Stored("v", 2, 4, (("content", 8),)))
)


def spec(tp: int = 1, block_tokens: int = 16, address: int = 1 << 40) -> EngineSpec:
    """Two layers of attention in a pool of eight blocks."""
    groups = (GroupSpec(GroupKind.FULL, 0, (0, 1), block_tokens),)
    return EngineSpec(tp, (2,), groups, "LBHNC", Interior(), 8, address)


def ticket(name: str) -> bytes:
    """A ticket that shows its name."""
    return name.encode().ljust(16, b".")


def cards(tp: int = 1, family: Family = ATTENTION) -> tuple[RankCard, ...]:
    """A card per rank; its transport metadata is not NIXL's."""
    return tuple(
        RankCard(rank, b"metadata", 4096, 64, 1 + number)
        for number, rank in enumerate(ranks(spec(tp), [family] * 2))
    )


def facts(engine_id: str = "P", incarnation: int = 1, **must_agree: str) -> Facts:
    """Who speaks; weights and dtype unless told otherwise."""
    return Facts(
        engine_id, incarnation, "made up", {"weights": "abc", "model dtype": "float32", **must_agree}
    )
