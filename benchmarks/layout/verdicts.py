"""The targets of `benchmarks layout`, and whether the tables reach them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.layout.cells import CHOSEN, LayoutRow, LayoutTable
from kvferry.planning.strategy import Strategy

NEAR_BEST = 0.85
CROSS_LAYER_GAIN = 2.0
PACKED_GAIN = 3.0
SHORT_RUN_BYTES = 2048
FLOOR, FLOOR_SHORT = 0.35, 0.2
PLANNING_SECONDS = 5e-3
_GAIN_MODEL = "Qwen3-0.6B"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result for one target.

    Attributes:
        target: description of the target.
        cells: number of cells to which the target applies.
        missed: cells that miss the target, with their figures.
    """

    target: str
    cells: int
    missed: tuple[str, ...]

    @property
    def reached(self) -> bool:
        """Return whether all cells reach the target."""
        return not self.missed


def verdicts(tables: Iterable[LayoutTable]) -> tuple[Verdict, ...]:
    """Return the results for all targets that apply to at least one cell of the tables."""
    tables = list(tables)
    rows = [(table.model, row) for table in tables for row in table.rows]
    found = [
        _judge(f"chosen within 15% of the best strategy, or {_WITHIN}", rows, _near_best),
        _cross_layer(tables),
        _judge(
            f"chosen at least {PACKED_GAIN:g}x direct, where direct's runs are 2 KiB or less",
            [(model, row) for model, row in rows if row.runs.both <= SHORT_RUN_BYTES],
            lambda row: _at_least(row.quartiles(CHOSEN, Strategy.DIRECT)[0], PACKED_GAIN),
        ),
        _judge(
            f"no cell below {FLOOR} of raw NIXL, {FLOOR_SHORT} where both sides' runs are short",
            rows,
            lambda row: _at_least(row.ratio(CHOSEN).median, _floor(row)),
        ),
        _judge(
            f"planning under {PLANNING_SECONDS * 1e3:g} ms before the first byte",
            rows,
            lambda row: (
                None
                if row.planning.ours.median < PLANNING_SECONDS
                else f"{row.planning.ours.median * 1e3:.1f} ms"
            ),
        ),
    ]
    return tuple(verdict for verdict in found if verdict.cells)


_WITHIN = "not to be told from it (upper quartile of their ratio at least 1)"


def _judge(
    target: str, rows: list[tuple[str, LayoutRow]], fault: Callable[[LayoutRow], str | None]
) -> Verdict:
    missed = [(model, row, found) for model, row in rows if (found := fault(row)) is not None]
    return Verdict(target, len(rows), tuple(f"{model} {row.cell}: {found}" for model, row, found in missed))


def _at_least(value: float, least: float) -> str | None:
    return None if value >= least else f"{value:.2f}"


def _near_best(row: LayoutRow) -> str | None:
    median, _, high = row.quartiles(CHOSEN, row.best)
    return (
        None
        if row.strategy == row.best or median >= NEAR_BEST or high >= 1
        else f"{median:.2f} of {row.best}"
    )


def _floor(row: LayoutRow) -> float:
    short = max(row.runs.src, row.runs.dst) <= SHORT_RUN_BYTES
    return FLOOR_SHORT if short else FLOOR


def _cross_layer(tables: Iterable[LayoutTable]) -> Verdict:
    """Compare the fastest cross-layer layout with the fastest per-layer layout, with one rank per side."""
    counted, missed = 0, []
    for table in tables:
        alike = [row for row in table.rows if row.cell.parallel == "1:1"]
        across = [row.ratio(CHOSEN).median for row in alike if row.cell.layout[0] == "B"]
        per_layer = [row.ratio(CHOSEN).median for row in alike if row.cell.layout[0] == "L"]
        if table.model != _GAIN_MODEL or not across or not per_layer:
            continue
        counted += 1
        if (gain := max(across) / max(per_layer)) < CROSS_LAYER_GAIN:
            missed.append(f"{table.model}: {gain:.2f}")
    target = f"cross-layer at least {CROSS_LAYER_GAIN:g}x per-layer for {_GAIN_MODEL} TP 1→1"
    return Verdict(target, counted, tuple(missed))
