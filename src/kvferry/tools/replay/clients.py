"""What clients get from a replay: what their hints are worth, and what each tenant finds and uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvferry.common.units import counted, format_bytes, format_count
from kvferry.tiers import TenantUsage
from kvferry.tools.replay.replayed import Replayed, TenantResults
from kvferry.tools.replay.settings import UNLIMITED
from kvferry.tools.report import Column, Report

# Tenants in the table, those with the most prompt tokens. JSON has all.
_MOST_SHOWN = 12

_PLACES = (
    Column("tokens from", left=True),
    Column("without hints"),
    Column("with hints"),
    Column("points", rank=1),
)


@dataclass(frozen=True, slots=True)
class TenantOutcome:
    """What the requests of a tenant, or of all with one label, found in a replay.

    Attributes:
        label: empty for the requests without a tenant, if there are no weights.
        without_hints: the same without hints; None if no hints were given.
        usage: usage of each kind of tier that tenants share by weight, over all such tiers, by its name.
    """

    label: str
    found: TenantResults
    without_hints: TenantResults | None = None
    usage: Mapping[str, TenantUsage] = field(default_factory=dict)


def tenants_of(replayed: Replayed, without_hints: Replayed | None) -> tuple[TenantOutcome, ...]:
    """Return what each tenant found, with the most prompt tokens first; nothing if there are no tenants."""
    before = {} if without_hints is None else _by_label(without_hints)
    found = [
        TenantOutcome(label, results, before.get(label), _usage(replayed, label))
        for label, results in _by_label(replayed).items()
    ]
    return tuple(sorted(found, key=lambda one: -one.found.prompt_tokens))


def _by_label(replayed: Replayed) -> dict[str, TenantResults]:
    all_of, known = replayed.results, replayed.results.by_tenant
    if not known or (len(known) == 1 and "" in known):
        return {}
    requests, prompt, hits = (
        sum(getattr(one, name) for one in known.values()) for name in TenantResults.__slots__
    )
    rest = TenantResults(all_of.requests - requests, all_of.prompt_tokens - prompt, all_of.hit_tokens - hits)
    return {**known, **({"": rest} if rest.requests else {})}


def _usage(replayed: Replayed, label: str) -> dict[str, TenantUsage]:
    return {tier.name: tier.tenants[label] for tier in replayed.tiers if label in tier.tenants}


def tenants_as_json(tenants: tuple[TenantOutcome, ...]) -> list[dict[str, Any]]:
    """Return tenants as values that can be written as JSON. docs/replay.md explains every key."""
    return [
        {
            "tenant": one.label,
            "requests": one.found.requests,
            "prompt_tokens": one.found.prompt_tokens,
            "hit_tokens": one.found.hit_tokens,
            "hit_rate": one.found.hit_rate,
            "hit_rate_without_hints": one.without_hints.hit_rate if one.without_hints else None,
            "tiers": [
                {"name": name, "used_bytes": usage.used_bytes, "evicted": usage.evicted}
                for name, usage in one.usage.items()
            ],
        }
        for one in tenants
    ]


def show_tenants(tenants: tuple[TenantOutcome, ...], report: Report) -> None:
    """Print a row for each tenant."""
    columns = [Column("by tenant", left=True), Column("requests"), Column("hit rate")]
    if tenants[0].without_hints is not None:
        columns.append(Column("without hints"))
    kinds = list(tenants[0].usage)
    columns += [Column(f"in {name}", rank=1) for name in kinds]
    columns += [Column(f"evicted from {name}", rank=2) for name in kinds]
    rows = []
    for one in tenants[:_MOST_SHOWN]:
        row = [one.label or "none", format_count(one.found.requests), f"{one.found.hit_rate:.1%}"]
        if one.without_hints is not None:
            row.append(f"{one.without_hints.hit_rate:.1%}")
        row += [format_bytes(one.usage[name].used_bytes) for name in kinds]
        row += [f"{one.usage[name].evicted:,}" for name in kinds]
        rows.append(tuple(row))
    report.table(columns, rows)
    if len(tenants) > _MOST_SHOWN:
        report.note(f"And {counted(len(tenants) - _MOST_SHOWN, 'tenant')} with fewer prompt tokens.")


@dataclass(frozen=True, slots=True)
class HintWorth:
    """A replay with hints, and the same without."""

    replayed: Replayed
    without_hints: Replayed

    @property
    def gained(self) -> float:
        """Difference of the hit rates, as a share of the prompt tokens; negative for a loss."""
        return self.replayed.results.hit_rate - self.without_hints.results.hit_rate

    @property
    def gained_in_host(self) -> float:
        """Difference of the shares of the prompt tokens that host memory provides."""
        before, after = self.without_hints.results, self.replayed.results
        return (after.tier_tokens[0] - before.tier_tokens[0]) / max(after.prompt_tokens, 1)

    @property
    def retained_bytes(self) -> int:
        """Maximum bytes of host memory that an engine kept because of hints."""
        return max(engine.retained_bytes for engine in self.replayed.engines)

    def places(self) -> Iterator[tuple[str, int, int]]:
        """Yield each place that prompt tokens came from, and their numbers without and with hints."""
        before, after = self.without_hints.results, self.replayed.results
        if self.replayed.settings.pool.blocks:
            yield "the engine's prefix cache", before.local_tokens, after.local_tokens
        for tier, *tokens in zip(
            self.replayed.settings.tiers, before.tier_tokens, after.tier_tokens, strict=True
        ):
            yield tier.kind, tokens[0], tokens[1]
        computed = [one.prompt_tokens - one.hit_tokens for one in (before, after)]
        yield "computed", computed[0], computed[1]


def worth_as_json(worth: HintWorth | None) -> dict[str, Any] | None:
    """Return what hints are worth as values that can be written as JSON; None without hints."""
    if worth is None:
        return None
    before, after = worth.without_hints.results, worth.replayed.results
    timed = bool(len(after.waits))
    return {
        "hints": _texts(worth),
        "hit_rate": after.hit_rate,
        "hit_rate_without_hints": before.hit_rate,
        "retained_bytes": worth.retained_bytes,
        "tokens": [
            {"from": place, "without_hints": without, "with_hints": with_them}
            for place, without, with_them in worth.places()
        ],
        "mean_time_to_first_token": after.waits.mean if timed else None,
        "mean_time_to_first_token_without_hints": before.waits.mean if timed else None,
    }


def show_worth(worth: HintWorth, report: Report) -> None:
    """Print what hints are worth, and from where prompt tokens come without and with them."""
    host, prompt = worth.replayed.settings.tiers[0].capacity_bytes, worth.replayed.results.prompt_tokens
    memory = "unlimited host memory" if host == UNLIMITED else f"{format_bytes(host)} of host memory"
    each = " for each engine" * (len(worth.replayed.engines) > 1)
    kept = worth.retained_bytes
    retained = f", of which they retain at most {format_bytes(kept)}" * bool(kept)
    report.heading(
        f"Hints are worth {_points(worth.gained)} points of the hit rate, and "
        f"{_points(worth.gained_in_host)} points of that of host memory alone, with {memory}{each}"
        f"{retained}"
    )
    report.note(f"Hints: {'; '.join(_texts(worth))}.")
    rows = []
    for place, *tokens in worth.places():
        before, after = (one / max(prompt, 1) for one in tokens)
        rows.append((place, f"{before:.1%}", f"{after:.1%}", _points(after - before)))
    report.table(_PLACES, rows, last_is_total=True)


def _points(share: float) -> str:
    """Format a difference of shares in percentage points.

    >>> _points(0.0321), _points(-0.001)
    ('+3.2', '-0.1')
    """
    return f"{100 * share:+.1f}"


def _texts(worth: HintWorth) -> list[str]:
    hints = worth.replayed.settings.hints
    return [] if hints is None else [rule.text for rule in hints.rules]
