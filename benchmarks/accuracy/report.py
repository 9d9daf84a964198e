"""The report of `benchmarks accuracy`, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.accuracy.comparison import RULE, Comparison
from benchmarks.accuracy.evaluation import Score
from benchmarks.accuracy.questions import EXAMPLES
from kvferry.units import format_bytes, format_count


def show(found: Comparison, console: Console) -> None:
    """Print the report with at most 80 columns."""
    console.print(f"{found.model}", markup=False, soft_wrap=True)
    console.print(
        f"{found.count} questions of {found.questions}, {EXAMPLES} examples before each; "
        f"lm-eval {found.pair.version}\n",
        markup=False,
    )
    console.print(_table(found))
    moved = found.moved
    console.print(
        f"\nSame text: {found.same} of {found.count} answers.\n"
        f"KV moved: {moved.served} of {moved.asked} requests got KV from the prefill engine, "
        f"{format_count(moved.tokens)} tokens, {format_bytes(moved.read_bytes)}."
    )
    for reason, count in sorted(moved.misses.items()):
        console.print(f"Requests that got none, because of {reason}: {count}.")
    if found.spoiled:
        console.print("The KV was spoiled on purpose, so answers must differ.")
    else:
        console.print(RULE)
    for sentence in found.failures:
        console.print(sentence)
    console.print("[red]failed[/]" if found.failures else "[green]passed[/]")


def as_json(found: Comparison) -> dict[str, Any]:
    """Return scores, counts and the verdict as values for JSON."""
    return {
        "model": found.model,
        "questions": found.questions,
        "count": found.count,
        "lm_eval": found.pair.version,
        "scores": {
            name: {
                "pair": asdict(score),
                "single": asdict(found.single.scores[name]),
                "difference": found.difference(name),
                "allowed": found.allowed(name),
            }
            for name, score in found.pair.scores.items()
        },
        "same": found.same,
        "different": list(found.different),
        "moved": asdict(found.moved),
        "spoiled": found.spoiled,
        "failures": list(found.failures),
        "passed": not found.failures,
    }


def _table(found: Comparison) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("exact match", no_wrap=True)
    for name in ("pair", "single engine", "difference", "allowed"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, score in found.pair.scores.items():
        table.add_row(
            name,
            _score(score),
            _score(found.single.scores[name]),
            f"{found.difference(name):+.4f}",
            f"{found.allowed(name):.4f}",
        )
    return table


def _score(score: Score) -> str:
    return f"{score.value:.4f} ± {score.error:.4f}"
