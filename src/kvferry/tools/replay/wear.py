"""The wear of disks in a replay: what is written to each tier per day, and how long a disk lasts.

A replay with an admission filter is compared with one that writes every chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.common.errors import ConfigError
from kvferry.tools.replay.replayed import Replayed
from kvferry.tools.replay.settings import ADMIT_ALL, UNLIMITED, TierSetting

_SECONDS_PER_DAY = 86_400
_DAYS_PER_YEAR = 365
# Disk makers state writes per day for this time of warranty.
ENDURANCE_YEARS = 5


@dataclass(frozen=True, slots=True)
class Endurance:
    """How much may be written to a disk in its life: bytes, or full writes per day. One of them is None."""

    total_bytes: int | None = None
    writes_per_day: float | None = None

    def bytes_of(self, tier: TierSetting) -> float | None:
        """Return the bytes that the disk of a tier endures; None for a tier that is no disk of its own."""
        if tier.kind != "file":
            return None
        if self.total_bytes is not None:
            return self.total_bytes
        if self.writes_per_day is None:
            return None
        if tier.capacity_bytes == UNLIMITED:
            raise ConfigError(
                "--disk-writes-per-day counts full writes of a disk, and --tier file=unlimited has no size; "
                "give the tier a size, or --endurance"
            )
        return self.writes_per_day * tier.capacity_bytes * ENDURANCE_YEARS * _DAYS_PER_YEAR


@dataclass(frozen=True, slots=True, kw_only=True)
class TierWear:
    """What a replay wrote to one kind of tier in storage. Numbers of bytes are those of one such tier."""

    name: str
    admits_all: bool  # True if every chunk was written
    written_per_day: float | None  # bytes; None if the trace has no times
    years: float | None  # how long the disk lasts; None if unknown, or if nothing is written
    declined: int  # number of chunks that were not written to spare the disk
    hit_rate: float  # of engines and tiers together


def wear_of(replayed: Replayed, endurance: Endurance) -> list[TierWear]:
    """Return what a replay wrote to each kind of tier in storage."""
    found = []
    for setting, tier in zip(replayed.settings.tiers, replayed.tiers, strict=True):
        if setting.kind in ("host", "fleet"):
            continue
        per_day = None
        if replayed.seconds:
            per_day = tier.counts.stored_bytes / tier.tiers / replayed.seconds * _SECONDS_PER_DAY
        total = endurance.bytes_of(setting)
        found.append(
            TierWear(
                name=setting.kind,
                admits_all=replayed.settings.admission == ADMIT_ALL,
                written_per_day=per_day,
                years=total / per_day / _DAYS_PER_YEAR if total and per_day else None,
                declined=tier.counts.declined,
                hit_rate=replayed.results.hit_rate,
            )
        )
    return found


def wear_as_json(rows: Sequence[TierWear]) -> list[dict[str, object]]:
    """Return rows as values that can be written as JSON. docs/replay.md explains every key."""
    return [{name: getattr(row, name) for name in TierWear.__slots__} for row in rows]
