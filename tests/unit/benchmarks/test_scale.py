"""Figures per unit are reported for each size, as ratios within rounds, and each case can be measured."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks.scale import chunks, open_files, peers, report, requests, tokens
from benchmarks.scale.case import Case
from benchmarks.scale.measure import CASES, measure
from benchmarks.scale.memory import traced_bytes
from benchmarks.scale.page import summary
from benchmarks.scale.result import Measure, MeasuredCase, MeasuredSizes
from kvferry.common.errors import ConfigError
from kvferry.tools.measuring.rounds import Spread

LOOK_UP = Measure(name="look up", label="look up among {n} chunks", per="chunk looked up", unit="seconds")
MEMORY = Measure(name="memory", label="memory for {n} chunks", per="chunk", unit="bytes")
FOUND = MeasuredCase(
    name="chunks",
    noun="chunks",
    sizes=(1_000, 10_000, 100_000, 1_000_000),
    measures=(
        MeasuredSizes(
            measure=LOOK_UP,
            values=((1e-7, 2e-7, 4e-7), (1e-7, 2e-7, 4e-7), (2e-7, 2e-7, 2e-7), (3e-7, 5e-7, 16e-7)),
        ),
        MeasuredSizes(measure=MEMORY, values=((600.0,), (610.0,), (650.0,), (540.0,))),
    ),
)


def _shown() -> str:
    out = io.StringIO()
    longest = [replace(CASES[name], prepare=_nothing, once=lambda size: {}) for name in CASES]
    rounds = (1.234e-4, 1.234e-2, 0.1)
    report.show(
        [
            FOUND,
            *(
                MeasuredCase(
                    name=case.name,
                    noun=case.noun,
                    sizes=case.sizes,
                    measures=tuple(MeasuredSizes(measure=one, values=(rounds,) * 4) for one in case.measures),
                )
                for case in longest
            ),
        ],
        3,
        Console(file=out, width=80, highlight=False),
    )
    return out.getvalue()


@contextmanager
def _nothing(size: int) -> Iterator[object]:
    yield dict


def test_the_report_fits_80_columns_and_cuts_nothing_off() -> None:
    shown = _shown()
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown


def test_ratios_are_taken_within_rounds() -> None:
    assert FOUND.measures[0].ratio(3) == Spread(3.0, 2.5, 4.0)
    assert FOUND.measures[0].ratio(2) == Spread(1.0, 0.5, 2.0)
    lines = [line.split() for line in _shown().splitlines()]
    assert ["ratio", "1.00", "1.00", "3.00"] in lines
    assert ["range", "of", "ratios", "1.00-1.00", "0.50-2.00", "2.50-4.00"] in lines


def test_the_page_compares_the_largest_number_with_the_smallest() -> None:
    found = summary(json.loads(json.dumps(report.as_json([FOUND], 3))))
    look_up, memory = found.comparisons
    assert (look_up.label, look_up.against) == ("look up among 1,000,000 chunks", "1,000 chunks")
    assert (look_up.ours, look_up.theirs) == ("500 ns per chunk looked up", "200 ns per chunk looked up")
    assert look_up.ratio == Spread(3.0, 2.5, 4.0)
    assert (memory.ours, memory.theirs, memory.ratio) == (
        "540 B per chunk", "600 B per chunk", Spread(0.9, 0.9, 0.9),
    )  # fmt: skip
    assert found.low_is_good
    assert found.answer.startswith(
        "1 of 2 figures per unit stay below 2 times as much from 1,000 to 1,000,000"
    )
    assert [note for note in found.notes if "3.00 times" in note] == list(found.notes)


def test_sizes_take_turns_and_the_first_round_does_not_count() -> None:
    measured: list[int] = []

    @contextmanager
    def prepare(size: int) -> Iterator[object]:
        def one_round() -> dict[str, float]:
            measured.append(size)
            return {"look up": float(len(measured))}

        yield one_round

    case = Case(
        name="c", noun="chunks", sizes=(1, 2, 3), measures=(LOOK_UP, MEMORY), prepare=prepare,
        once=lambda size: {"memory": 5.0 * size},
    )  # fmt: skip
    (found,) = measure([case], 4, lambda _: None)
    assert len(measured) == 15
    assert all(sorted(measured[at : at + 3]) == [1, 2, 3] for at in range(0, 15, 3))
    assert len({tuple(measured[at : at + 3]) for at in range(0, 15, 3)}) > 1, "the order changes"
    look_up, memory = found.measures
    assert sorted(sum(look_up.values, ())) == list(range(4, 16))
    assert memory.values == ((5.0,), (10.0,), (15.0,))


def test_traced_memory_is_that_of_new_objects() -> None:
    assert 100_000 <= traced_bytes(lambda: bytes(100_000)) < 110_000


def _tiny(case: Case, sizes: tuple[int, ...]) -> MeasuredCase:
    (found,) = measure([replace(case, sizes=sizes)], 1, lambda _: None)
    return found


@pytest.mark.parametrize(
    ("case", "sizes"),
    [(chunks.CASE, (200, 400)), (requests.CASE, (10, 20)), (tokens.CASE, (1_000, 2_000))],
)
def test_every_measure_of_a_case_has_a_figure(case: Case, sizes: tuple[int, ...]) -> None:
    found = _tiny(case, sizes)
    assert all(min(values) > 0 for one in found.measures for values in one.values)


@pytest.mark.slow
def test_every_measure_of_peers_has_a_figure() -> None:
    pytest.importorskip("nixl")
    found = _tiny(replace(peers.CASE, once=lambda size: {"memory": 1.0}), (2, 5))
    assert all(min(values) > 0 for one in found.measures for values in one.values)


def test_an_offer_has_the_same_size_for_any_prompt() -> None:
    sizes = [tokens.CASE.once(size)["offer"] for size in (1_000, 9_000)]
    assert sizes[0] == sizes[1]


def test_too_few_open_files_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"may open 200 files, and the case peers needs 300; raise"):
        open_files.allow_open_files(300, (100, 200))
