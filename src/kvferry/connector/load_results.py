"""Values that tell how a load ended, what it moved, and how long its stages took."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class LoadOutcome(StrEnum):
    """How a load ended."""

    READY = "ready"
    FAILED = "failed"
    EXPIRED = "expired"  # its deadline passed; late writes may still land in its blocks
    DROPPED = "dropped"  # the request ended first, or another part of its prefix failed


@dataclass(frozen=True, slots=True)
class GroupBytes:
    """Bytes moved for a KV cache group, summed over all ranks.

    Attributes:
        group: number and kind.
        strategy: name of the transfer strategy.
        size: bytes.
    """

    group: str
    strategy: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFigures:
    """What a load from a peer moved, and how long its stages took. All 0 or empty for tiers.

    Attributes:
        bytes_by_group: useful bytes per group; empty if nothing was planned.
        strategy_by_group: how the bytes of each group travelled; empty where none did.
        pages: number of prepared descriptors.
        descriptors: number of descriptors after merging neighbours.
        run_bytes: the largest contiguous run.
        plan_seconds, transfer_seconds, check_seconds: times of the slowest worker.
    """

    bytes_by_group: tuple[int, ...] = ()
    strategy_by_group: tuple[str, ...] = ()
    pages: int = 0
    descriptors: int = 0
    run_bytes: int = 0
    plan_seconds: float = 0.0
    transfer_seconds: float = 0.0
    check_seconds: float = 0.0

    def with_other(self, other: LoadFigures) -> LoadFigures:
        """Return two workers' figures of one load as one."""
        longer = self.bytes_by_group or (0,) * len(other.bytes_by_group)
        others = other.bytes_by_group or (0,) * len(longer)
        return LoadFigures(
            bytes_by_group=tuple(a + b for a, b in zip(longer, others, strict=True)),
            strategy_by_group=_merged(self.strategy_by_group, other.strategy_by_group),
            pages=self.pages + other.pages,
            descriptors=self.descriptors + other.descriptors,
            run_bytes=max(self.run_bytes, other.run_bytes),
            plan_seconds=max(self.plan_seconds, other.plan_seconds),
            transfer_seconds=max(self.transfer_seconds, other.transfer_seconds),
            check_seconds=max(self.check_seconds, other.check_seconds),
        )


NO_FIGURES = LoadFigures()
"""Figures of a load that moved nothing, or came from tiers."""


def _merged(ours: tuple[str, ...], theirs: tuple[str, ...]) -> tuple[str, ...]:
    """Return the strategies of two workers by group, each named once."""
    if not ours or not theirs:
        return ours or theirs
    pairs = zip(ours, theirs, strict=True)
    return tuple("+".join(dict.fromkeys(filter(None, (*a.split("+"), *b.split("+"))))) for a, b in pairs)
