"""What `benchmarks storage` contributes to the page of benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.page.figures import Comparison, Summary
from kvferry.common.units import format_seconds
from kvferry.tools.measuring.rounds import Spread

_WORK = {
    "new": "first token of a new prompt",
    "stored": "storing a new prompt",
    "load": "first token of a stored prompt",
    "shared": "first token, first half stored",
}
_PLACES = {"file": "files", "host": "host memory"}
_PAGE_CACHE = "ExampleConnector, page cache"
_DISK = "ExampleConnector, disk"


def summary(document: Any) -> Summary:
    """Return the comparisons with ExampleConnector and with computing.

    Args:
        document: what `python -m benchmarks storage --json` prints.
    """
    prompts: list[dict[str, Any]] = document["prompts"]
    rows = [row for work in _WORK for one in prompts for row in _rows(work, one)]
    rows += [_peer(name, error) for name, error in document["peers"].items()]
    return Summary(
        answer=_answer(prompts[-1]), comparisons=tuple(rows), low_is_good=True, notes=_notes(document)
    )


def _rows(work: str, one: dict[str, Any]) -> Iterator[Comparison]:
    rounds = one["rounds"]
    label = f"{_WORK[work]}, {one['tokens']:,} tokens"
    peer = _PAGE_CACHE if work == "load" else "ExampleConnector"
    for variant, place in _PLACES.items():
        yield _comparison(f"{label}, {place}", peer, _times(rounds, variant, work), rounds, "example", work)
    file = _times(rounds, "file", work)
    if work == "load":
        cold = _times(rounds, "file", "disk_load")
        yield _comparison(f"{label}, files on disk", _DISK, cold, rounds, "example", "disk_load")
    if work == "stored":
        yield _comparison(f"{label}, files", "ExampleConnector, flushed", file, rounds, "example", "flushed")
    computed = "shared" if work == "shared" else "new"
    yield _comparison(f"{label}, files", "computing", file, rounds, "compute", computed)


def _comparison(
    label: str, against: str, ours: Sequence[float], rounds: Any, variant: str, work: str
) -> Comparison:
    theirs = _times(rounds, variant, work)
    return Comparison(
        label=label,
        against=against,
        ours=format_seconds(Spread.of(ours).median),
        theirs=format_seconds(Spread.of(theirs).median),
        ratio=_ratio(ours, theirs),
    )


def _peer(name: str, error: str | None) -> Comparison:
    theirs = "works here, not measured" if error is None else error
    return Comparison(label="start and load", against=name, ours="works", theirs=theirs, ratio=None)


def _answer(one: dict[str, Any]) -> str:
    rounds = one["rounds"]
    file, host = (_times(rounds, variant, "load") for variant in _PLACES)
    cold, cached, disk, computed = (
        _times(rounds, *each)
        for each in (
            ("file", "disk_load"), ("example", "load"), ("example", "disk_load"), ("compute", "new"),
        )
    )  # fmt: skip
    return (
        f"For a stored prompt of {one['tokens']:,} tokens, the time to first token from kvferry's files is "
        f"{_text(file, cached)} of ExampleConnector's from the page cache and {_text(cold, disk)} from the "
        f"disk. From host memory it is {_text(host, cached)} of the former. "
        f"From files it is {_text(file, computed)} of the time to compute the prompt."
    )


def _notes(document: Any) -> tuple[str, ...]:
    one = document["prompts"][-1]
    first, half = one["rounds"][0], one["tokens"] // 2
    reading = (
        "kvferry reads files that are not in the page cache past it."
        if document["direct_io"]
        else "The file system has no direct I/O, so kvferry reads files through the page cache."
    )
    sharing = (
        f"Of {half:,} tokens that a prompt shares with a stored one, kvferry loads "
        f"{first['file']['shared_tokens']:,} and ExampleConnector {first['example']['shared_tokens']:,}."
    )
    return sharing, reading


def _text(ours: Sequence[float], theirs: Sequence[float]) -> str:
    ratio = _ratio(ours, theirs)
    return f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    return Spread.of([mine / other for mine, other in zip(ours, theirs, strict=True)])


def _times(rounds: Any, variant: str, work: str) -> list[float]:
    return [each[variant][work] for each in rounds]
