"""What the table of layouts says follows from what was measured."""

from __future__ import annotations

import io
import json
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

from benchmarks.layout import report as layout_report
from benchmarks.layout.cells import CHOSEN, METHODS, Cell, LayoutRow, LayoutTable, Runs, runs_of
from benchmarks.layout.measure import LayoutJob, k_and_v_apart, moved_tokens, pair_of
from benchmarks.layout.plot import picture
from benchmarks.layout.verdicts import verdicts
from benchmarks.overhead.planning import PlanningTimes, measure
from kvferry.planning.strategy import Strategy
from kvferry.tools.bench.rounds import MoverRounds
from kvferry.tools.measuring.rounds import MachineFacts, Spread
from kvferry.tools.measuring.simulated import read_geometry

MACHINE = MachineFacts(
    128, "Some Long-named Processor 9654P 96-Core @ 3.70GHz", "rc,cuda_copy,cuda_ipc,sm,self"
)
EQUAL = dict.fromkeys(METHODS, (0.5, 0.5, 0.5))


def _row(
    layout: str = "LBNHC", ratios=EQUAL, runs: float = 65536, planning: float = 1e-3, strategy: str = "direct"
) -> LayoutRow:
    size = 128 << 20
    ways = {
        way: MoverRounds(str(way), size, tuple(size / 1e9 / r / 16 for r in ratios[way])) for way in METHODS
    }
    spread = Spread(planning, planning, planning)
    return LayoutRow(
        cell=Cell(layout, 1, 1),
        runs=Runs(runs, runs, 65536),
        strategy=strategy,
        ways=ways,
        ratios=ratios,
        planning=PlanningTimes(
            tokens=131072,
            pages=262144,
            strategies=(strategy,),
            tables=spread,
            plan=spread,
            ours=spread,
            chunks=spread,
        ),
    )


def _table(*rows: LayoutRow, model: str = "Qwen3-0.6B") -> LayoutTable:
    return LayoutTable(
        model=model,
        tokens=1024,
        raw=(16.0, 15.0, 17.0),
        rows=rows,
        left_out=(("BHLNC TP 1→1", "pages of two shapes"),),
    )


def _verdict(words: str, *rows: LayoutRow):
    return next(verdict for verdict in verdicts([_table(*rows)]) if words in verdict.target)


def _ratios(**by_way: float | tuple[float, ...]) -> dict[str, tuple[float, ...]]:
    named = {name.replace("_", "-"): value for name, value in by_way.items()}
    return {way: v if isinstance(v := named.get(way, 0.5), tuple) else (v, v, v) for way in METHODS}


@pytest.mark.parametrize(("chosen", "reached"), [(0.51, True), (0.505, False), ((0.4, 0.4, 1.0), True)])
def test_chosen_must_be_near_the_best_strategy(chosen, reached: bool) -> None:
    row = _row(ratios=_ratios(staged=0.6, chosen=chosen))
    assert _verdict("of the best strategy", row).reached is reached


@pytest.mark.parametrize(("across", "reached"), [(1.0, True), (0.99, False)])
def test_cross_layer_is_held_against_per_layer(across: float, reached: bool) -> None:
    rows = _row(), _row("BHLNC", _ratios(chosen=across))
    assert _verdict("cross-layer", *rows).reached is reached


@pytest.mark.parametrize(("chosen", "reached"), [(0.31, True), (0.29, False)])
def test_packing_must_gain_with_short_runs(chosen: float, reached: bool) -> None:
    verdict = _verdict(
        "3x direct", _row(), _row(runs=2048, ratios=_ratios(direct=0.1, chosen=chosen)), _row(runs=2049)
    )
    assert verdict.cells == 1
    assert verdict.reached is reached


@pytest.mark.parametrize(("chosen", "reached"), [(0.35, True), (0.34, False)])
def test_cell_below_the_floor_misses_the_target(chosen: float, reached: bool) -> None:
    verdict = _verdict("no cell below", _row(ratios=_ratios(chosen=chosen)))
    assert verdict.reached is reached
    assert reached or verdict.missed == ("Qwen3-0.6B LBNHC TP 1→1: 0.34",)


@pytest.mark.parametrize(("seconds", "reached"), [(4.9e-3, True), (5.1e-3, False)])
def test_planning_has_five_milliseconds(seconds: float, reached: bool) -> None:
    assert _verdict("planning", _row(planning=seconds)).reached is reached


def test_report_leaves_out_cases_that_were_not_measured() -> None:
    assert not [v for v in verdicts([_table(_row())]) if "3x" in v.target or "cross-layer" in v.target]


def test_report_fits_80_columns_and_cuts_off_no_text() -> None:
    out = io.StringIO()
    wide = _row("BHLNC", _ratios(chosen=(0.12, 0.5, 1.25)), 1835008, 22.5e-3, "direct+over-read+staged")
    layout_report.show([_table(_row(), wide)], MACHINE, 9, Console(file=out, width=80, highlight=False))
    assert max(map(len, out.getvalue().splitlines())) <= 80
    assert "…" not in out.getvalue()
    assert "0.12-1.25" in out.getvalue()
    assert "left out: BHLNC TP 1→1; the first since pages of two shapes" in out.getvalue()


def test_json_holds_every_round() -> None:
    loaded = json.loads(json.dumps(layout_report.as_json([_table(_row())], MACHINE)))
    (cell,) = loaded["tables"][0]["cells"]
    assert cell["ways"][CHOSEN]["of_raw"] == [0.5, 0.5, 0.5]
    assert len(cell["ways"][Strategy.STAGED]["seconds"]) == 3
    assert cell["descriptors"] == round(cell["ways"][CHOSEN]["bytes"] / cell["run_bytes"]["both"])


def test_the_picture_has_a_bar_for_every_way_of_every_cell() -> None:
    root = ET.fromstring(picture([_table(_row(), _row("BHLNC")), _table(_row(), model="A<B>")]))
    bars = [
        group.get("id")
        for group in root.iter("{http://www.w3.org/2000/svg}g")
        if " TP " in group.get("id", "")
    ]
    assert len(bars) == 3 * len(METHODS)
    assert "Qwen3-0.6B LBNHC TP 1→1 staged 0.50" in bars
    assert "A<B>" in [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]


def test_runs_are_those_of_either_side_and_of_both() -> None:
    llama = read_geometry("Llama-3.1-8B", {"num_hidden_layers": 2})
    assert runs_of(*pair_of(Cell("LBNHC", 2, 1), llama, 64)) == Runs(2048, 32768, 2048)
    assert runs_of(*pair_of(Cell("BHLNC", 1, 1), llama, 64)) == Runs(131072, 131072, 131072)


def test_k_and_v_on_pages_of_their_own_halve_the_runs() -> None:
    llama = read_geometry("Llama-3.1-8B", {"num_hidden_layers": 2})
    apart = k_and_v_apart(llama)
    assert apart.cache.name == f"{llama.cache.name}, K and V apart"
    whole, half = (runs_of(*pair_of(Cell("LBNHC", 1, 1), one, 64)).both for one in (llama, apart))
    assert (whole, half) == (65536, 32768)


def test_tokens_are_whole_blocks_of_every_engine() -> None:
    hybrid = read_geometry("Qwen3-Next-80B-A3B")
    assert moved_tokens(LayoutJob(tokens=1), hybrid) == 544
    assert moved_tokens(LayoutJob(), hybrid) % 544 == 0
    assert moved_tokens(LayoutJob(), read_geometry("Llama-3.1-8B")) == 1024


def test_planning_needs_no_memory_and_finds_the_chosen_strategy() -> None:
    llama = read_geometry("Llama-3.1-8B")
    whole = measure(*pair_of(Cell("BHLNC", 1, 1), llama, 131_072), 1)
    assert (whole.pages, whole.strategies) == (262_144, ("direct",))
    assert measure(*pair_of(Cell("LBNHC", 2, 1), llama, 131_072), 1).strategies != ("direct",)
