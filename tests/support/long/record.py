"""The record of the long tests: what ran when, on which commit and machine, and what failed."""

from __future__ import annotations

import os
import platform
import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

RECORD = Path("docs/test-record.json")
PAGE = Path("docs/test-record.md")
BEGIN = "<!-- record: written by make test-all, do not edit -->"


@dataclass(frozen=True)
class Machine:
    """The machine that a part ran on.

    Attributes:
        processor: name of the processor.
        cores: logical cores.
        memory_gib: memory, in GiB.
        instructions: instruction sets by which vLLM's CPU kernels differ.
    """

    processor: str
    cores: int
    memory_gib: int
    instructions: tuple[str, ...]

    @classmethod
    def this(cls) -> Machine:
        """Return this machine."""
        path = Path("/proc/cpuinfo")
        text = path.read_text() if path.exists() else ""
        name = re.search(r"model name\s*: (.+)", text)
        flags = re.search(r"flags\s*: (.+)", text)
        known = {*flags[1].split()} if flags else set()
        return cls(
            name[1] if name else platform.processor(),
            os.cpu_count() or 1,
            round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
            tuple(one for one in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if one in known),
        )


@dataclass(frozen=True)
class PartRecord:
    """The last run of a part.

    Attributes:
        commit: commit that was tested; followed by ``+`` if anything was changed and not committed.
        date: day of the run, UTC, such as 2026-11-28.
        machine: the machine.
        seconds: wall-clock time, without installation.
        passed, failed, skipped: counts of tests.
        failures: ids of tests that failed, or the reason why the part did not run to its end.
    """

    commit: str
    date: str
    machine: Machine
    seconds: int
    passed: int
    failed: int
    skipped: int
    failures: tuple[str, ...]


@dataclass(frozen=True)
class Counts:
    """Results of a pytest run."""

    passed: int
    skipped: int
    failures: tuple[str, ...]


def counts_of(report: str) -> Counts:
    """Return the results in a report of pytest in JUnit's XML.

    >>> counts_of(
    ...     '<testsuites><testsuite><testcase classname="a" name="x"/>'
    ...     '<testcase classname="a" name="y"><failure/></testcase>'
    ...     '<testcase classname="a" name="z"><skipped/></testcase></testsuite></testsuites>'
    ... )
    Counts(passed=1, skipped=1, failures=('a::y',))
    """
    cases = [*ET.fromstring(report).iter("testcase")]
    failed = [case for case in cases if {"failure", "error"} & {child.tag for child in case}]
    skipped = sum(case.find("skipped") is not None for case in cases)
    names = dict.fromkeys(f"{case.get('classname')}::{case.get('name')}" for case in failed)
    return Counts(len(cases) - len(failed) - skipped, skipped, tuple(names))


def short(commit: str) -> str:
    """Return the first digits of a commit, with the ``+`` that says that tracked files differed from it.

    >>> short("0123456789abcdef+")
    '01234567+'
    """
    return f"{commit[:8]}{'+' * commit.endswith('+')}"


def read_record(path: Path = RECORD) -> dict[str, PartRecord]:
    """Return the record by part; an empty one if there is none."""
    if not path.exists():
        return {}
    return msgspec.json.decode(path.read_bytes(), type=dict[str, PartRecord])


def write_record(record: Mapping[str, PartRecord], path: Path = RECORD, page: Path = PAGE) -> None:
    """Write the record, and its table into the page."""
    values: dict[str, Any] = {name: asdict(record[name]) for name in record}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(values), indent=1) + b"\n")
    head, _, _ = page.read_text().partition(BEGIN)
    page.write_text(f"{head}{BEGIN}\n\n{table_of(record)}")


def table_of(record: Mapping[str, PartRecord]) -> str:
    """Return the record as Markdown: a table, its sums, and the failures."""
    lines = [
        "| part | commit | date | minutes | passed | skipped | failed |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {name} | `{short(one.commit)}` | {one.date} "
            f"| {one.seconds / 60:.1f} | {one.passed:,} | {one.skipped:,} | {one.failed:,} |"
            for name, one in record.items()
        ),
    ]
    parts = record.values()
    lines += [
        (
            f"| all | | | {sum(one.seconds for one in parts) / 60:.0f} "
            f"| {sum(one.passed for one in parts):,} | {sum(one.skipped for one in parts):,} "
            f"| {sum(one.failed for one in parts):,} |"
        ),
        "",
    ]
    for machine in dict.fromkeys(one.machine for one in parts):
        ran = ", ".join(name for name, one in record.items() if one.machine == machine)
        sets = ", ".join(machine.instructions) or "no vector instructions that matter"
        lines += [
            f"{machine.processor}, {machine.cores} cores, {machine.memory_gib} GiB, {sets}: {ran}.",
            "",
        ]
    failures = [f"- {name}: `{test}`" for name, one in record.items() for test in one.failures]
    if failures:
        lines += ["Failed:", "", *failures, ""]
    return "\n".join(lines).rstrip() + "\n"
