"""The part of docs/reliability.md that the soak writes."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles

from faults.growth import Sample, largest_shares, slopes, table
from faults.report import machine
from faults.soak_values import Answered, Soak, problems


def report(soak: Soak, command: str) -> str:
    """Return the part's text."""
    minutes = soak.samples[-1].at / 60 if soak.samples else 0.0
    requests = len(soak.answers) + soak.left + len(soak.wrong) + len(soak.failed)
    tokens = "\n".join(f"| {source} | {count} |" for source, count in sorted(soak.tokens.items()))
    loads = ", ".join(f"{count} {outcome}" for outcome, count in sorted(soak.loads.items()))
    return f"""
Repeat it: `{command}`. Machine: {machine()}.
It served {requests} requests in {minutes:.0f} minutes.
{len(soak.answers)} whole answers and {soak.left} beginnings, whose clients left, are the single engine's.

| count | must be 0 |
|---|---|
| wrong answers | {len(soak.wrong)} |
| requests without an answer | {len(soak.failed)} |
| processes that ended | {len(soak.deaths)} |
| blocks, leases, loads or requests held at one of {len(soak.samples)} rests | {len(soak.held_at_rest)} |
| things that grow, or were not tried | {_others(soak)} |

Both engines and the router at rest. The first third of the time is left out of what grows: caches fill up.

{_growth(soak.samples) if slopes(soak.samples) else "Too few samples."}

Tokens that were not computed. Loads: {loads}.

| from | tokens |
|---|---|
{tokens}

From a request to its last token, seconds:

{_latency(soak.answers)}
"""


def _growth(samples: Sequence[Sample]) -> str:
    return f"{table(samples)}\n\nOf the memory: {largest_shares(samples) or 'no process has grown by a MiB'}."


def _others(soak: Soak) -> int:
    lists = (soak.wrong, soak.failed, soak.deaths, soak.held_at_rest)
    return len(problems(soak)) - sum(map(len, lists))


def _latency(answers: Sequence[Answered]) -> str:
    """A row per kind of request: the median, the slowest hundredth, and whether that changes with time.

    >>> _latency([Answered("short", float(n), 0.5) for n in range(9)]).splitlines()[-1]
    '| short | 9 | 0.50 | 0.50 | 0.50 | 0.50 |'
    """
    rows = [
        "| kind | answers | median | 99 % | median, second third | median, last third |",
        "|---" * 6 + "|",
    ]
    end = max((one.at for one in answers), default=0.0)
    for kind in sorted({one.kind for one in answers}):
        mine = [one for one in answers if one.kind == kind]
        values = [
            median(one.seconds for one in mine),
            quantiles([one.seconds for one in mine], n=100)[-1] if len(mine) > 1 else mine[0].seconds,
            *(
                median([one.seconds for one in mine if start <= one.at / end <= start + 1 / 3] or [0.0])
                for start in (1 / 3, 2 / 3)
            ),
        ]
        rows.append(f"| {kind} | {len(mine)} | {' | '.join(f'{one:.2f}' for one in values)} |")
    return "\n".join(rows)
