"""The report of `benchmarks accuracy`, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.accuracy.comparison import RULE, Comparison, Results
from benchmarks.accuracy.evaluation import Evaluation, Score
from kvferry.common.units import format_bytes, format_count


def show(results: Results, console: Console) -> None:
    """Print the report with at most 80 columns."""
    console.print(f"{results.model}", markup=False, soft_wrap=True)
    console.print(
        f"{len(results.single.answers)} questions of {results.questions}, {results.examples} examples before "
        f"each; lm-eval {results.single.version}\n",
        markup=False,
    )
    console.print(_table(results))
    console.print()
    for one in results.comparisons:
        for reason, count in sorted(one.moved.misses.items()):
            console.print(f"{one.way.title}: {count} requests got no KV, because of {reason}.")
    if any(one.way.spoils for one in results.comparisons):
        console.print("KV that is zeroed on purpose must change the answers.")
    if not all(one.way.spoils for one in results.comparisons):
        console.print(RULE)
    for sentence in results.failures:
        console.print(sentence)
    console.print("[red]failed[/]" if results.failures else "[green]passed[/]")


def show_every(found: Sequence[Results], console: Console) -> None:
    """Print the report of each model, and a table of all if there are several."""
    for results in found:
        show(results, console)
    if len(found) > 1:
        show_all(found, console)


def show_all(found: Sequence[Results], console: Console) -> None:
    """Print one table of all models: a row per system, and the share of right answers of each model."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("right answers", no_wrap=True)
    for results in found:
        table.add_column(Path(results.model).name, justify="right")
    rows: dict[str, dict[int, Evaluation]] = {}
    for number, results in enumerate(found):
        rows.setdefault("single engine", {})[number] = results.single
        for one in results.comparisons:
            rows.setdefault(one.way.title, {})[number] = one.found
    for title, cells in rows.items():
        scores = (next(iter(cells[n].scores.values())) if n in cells else None for n in range(len(found)))
        table.add_row(title, *("" if score is None else f"{score.value:.2f}" for score in scores))
    console.print()
    console.print(table)


def as_json(results: Results) -> dict[str, Any]:
    """Return scores, counts and the verdict as values for JSON."""
    return {
        "model": results.model,
        "questions": results.questions,
        "count": len(results.single.answers),
        "lm_eval": results.single.version,
        "single": _scores(results.single),
        "ways": {one.way.name: _comparison(one) for one in results.comparisons},
        "failures": list(results.failures),
        "passed": not results.failures,
    }


def _comparison(one: Comparison) -> dict[str, Any]:
    return {
        "scores": _scores(one.found),
        "allowed": {name: one.allowed(name) for name in one.found.scores},
        "same": one.same,
        "different": list(one.different),
        "moved": asdict(one.moved),
        "failures": list(one.failures),
    }


def _scores(evaluation: Evaluation) -> dict[str, Any]:
    return {name: asdict(score) for name, score in evaluation.scores.items()}


def _table(results: Results) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("system", no_wrap=True)
    names = list(results.single.scores)
    for name in (*names, "same", "tokens", "KV moved"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("single engine", *(_score(results.single.scores[name]) for name in names))
    for one in results.comparisons:
        table.add_row(
            one.way.title,
            *(_score(one.found.scores[name]) for name in names),
            f"{one.same}/{one.count}",
            format_count(one.moved.tokens),
            format_bytes(one.moved.read_bytes),
        )
    return table


def _score(score: Score) -> str:
    return f"{score.value:.2f} ± {score.error:.2f}"
