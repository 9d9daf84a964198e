"""The smallest tiers that reach a hit rate on a trace, what they cost, and whether they are worth it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt

from kvferry.common.errors import ConfigError
from kvferry.tools.plan.kept import settings_with_more_snapshots
from kvferry.tools.replay.curve import CurvePoint, hit_rate_curve
from kvferry.tools.replay.passes import Passes
from kvferry.tools.replay.replayed import Replayed
from kvferry.tools.replay.settings import UNLIMITED, ReplaySettings, ServedModel, TierSetting
from kvferry.tools.replay.wear import ENDURANCE_YEARS

# Ratio of the limits of a range below which it is not narrowed further.
_CLOSE = 1.2
_SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, slots=True)
class SizeQuestion:
    """A hit rate to reach, and the facts that decide whether it is worth it."""

    target: float
    host_bytes: int | None = None  # host memory in front of the disk; None for a sixteenth of the disk
    # Number of times that the disk can be written in full each day, for five years.
    disk_writes_per_day: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.target < 1:
            raise ConfigError(f"--target-hit is {self.target}; give a share between 0 and 1, such as 0.5")
        if self.disk_writes_per_day <= 0:
            raise ConfigError(
                f"--disk-writes-per-day is {self.disk_writes_per_day}; give a number above 0, such as 0.3"
            )


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """Engine settings, and the hit rate with unlimited host memory under them."""

    step_tokens: int  # ``max_num_batched_tokens``
    retention: int | None  # ``prefix_cache_retention_interval``
    hit_rate: float
    stored_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """The answer to a `SizeQuestion`. Sizes are in bytes."""

    question: SizeQuestion
    prefill_tokens_per_second: float  # tokens that an engine computes per second; 0 if unknown
    model: ServedModel
    ceiling: Replayed  # with unlimited host memory
    curve: tuple[CurvePoint, ...]
    # Smallest capacity that is known to reach the target; None if no capacity does, 0 if the engine's prefix
    # cache reaches it alone.
    enough: int | None
    too_little: int  # largest capacity that is known to miss it; 0 if every capacity reaches it
    # Replay with a disk of `enough` bytes behind host memory; None if `enough` is None or 0.
    with_disk: Replayed | None
    # Alternative settings of an engine with recurrent state, the present ones first; else empty.
    choices: tuple[EngineChoice, ...]

    @property
    def bytes_per_token(self) -> float:
        """Bytes that loads take from unlimited host memory, per token that they provide; 0 without hits."""
        results = self.ceiling.results
        return sum(results.tier_bytes) / max(sum(results.tier_tokens), 1)

    @property
    def written_per_second(self) -> float:
        """Bytes written to the disk each second; 0 without a disk, or if the trace has no times."""
        if self.with_disk is None or not (seconds := self.with_disk.results.seconds):
            return 0.0
        return self.with_disk.tiers[1].counts.stored_bytes / seconds

    @property
    def disk_years(self) -> float | None:
        """Years that the disk lasts under these writes; None if nothing is written."""
        if not self.enough or not self.written_per_second:
            return None
        endured = ENDURANCE_YEARS * self.question.disk_writes_per_day * self.enough
        return endured / (self.written_per_second * _SECONDS_PER_DAY)

    @property
    def break_even_bytes_per_second(self) -> float | None:
        """Speed of a tier at which loading a token takes as long as computing it; None if unknown."""
        return self.prefill_tokens_per_second * self.bytes_per_token or None


def size(passes: Passes, model: ServedModel, given: ReplaySettings, question: SizeQuestion) -> Sizing:
    """Find the smallest host memory or disk that reaches a hit rate. The replays leave time out."""

    def settings(*capacities: int) -> ReplaySettings:
        tiers = (
            TierSetting(kind=kind, capacity_bytes=capacity, shared=False, bytes_per_second=1.0)
            for kind, capacity in zip(("host", "file"), capacities, strict=False)
        )
        return replace(given, tiers=tuple(tiers), prefill_tokens_per_second=0.0)

    others = [
        passes.begin("engine settings", other, settings(UNLIMITED)) for other in _with_more_snapshots(model)
    ]
    ceiling = passes.run("unlimited memory", model, settings(UNLIMITED))
    curve = hit_rate_curve(passes, ceiling)
    reaching = [point.capacity_bytes for point in curve if point.hit_rate >= question.target]
    alone = ceiling.results.local_hit_rate >= question.target
    enough = 0 if alone else min(reaching, default=None)
    too_little, with_disk = 0, None
    if enough:
        too_little = max((p.capacity_bytes for p in curve if p.capacity_bytes < enough), default=0)
        while too_little and enough > _CLOSE * too_little:
            # The curve's capacities lie at equal factors, so the range is halved by factors too.
            middle = round(sqrt(enough * too_little))
            if passes.run("capacity", model, settings(middle)).results.hit_rate >= question.target:
                enough = middle
            else:
                too_little = middle
        host = question.host_bytes or max(enough // 16, 64 * max(g.chunk_bytes for g in model.groups))
        with_disk = passes.run("disk", model, settings(host, enough))
    choices = [ceiling, *map(passes.result, others)] if model.state is not None else []
    return Sizing(
        question=question,
        prefill_tokens_per_second=given.prefill_tokens_per_second,
        model=model,
        ceiling=ceiling,
        curve=tuple(curve),
        enough=enough,
        too_little=too_little,
        with_disk=with_disk,
        choices=tuple(map(_choice, choices)),
    )


def _with_more_snapshots(model: ServedModel) -> list[ServedModel]:
    """Return a model with recurrent state under other settings of its engine; nothing for other models."""
    if model.state is None:
        return []
    own = model.form.steps
    return [
        replace(model, form=replace(model.form, steps=steps))
        for steps in dict.fromkeys(settings_with_more_snapshots(own))
        if steps != own
    ]


def _choice(replayed: Replayed) -> EngineChoice:
    steps = replayed.model.form.steps
    return EngineChoice(
        steps.step_tokens, steps.retention, replayed.results.hit_rate, replayed.tiers[0].counts.stored_bytes
    )
