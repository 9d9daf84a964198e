"""Every judge of the soak can say no, and the command line refuses nonsense before an engine is started."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from faults.growth import Sample
from faults.report import with_part
from faults.soak import interruptible, main
from faults.soak_page import report
from faults.soak_pair import Pair
from faults.soak_rest import HELD, held_of
from faults.soak_values import SOURCES, Answered, Soak, problems
from kvferry.tools.serving.engine import EngineState

PAGE = Path(__file__).parents[3] / "docs" / "reliability.md"
RESTING = "".join(f"# TYPE {name} gauge\n{name} 0.0\n" for name in HELD)


def sound() -> Soak:
    """A soak in which everything was as it must be."""
    return Soak(
        [],
        answers=[Answered("short", 30.0 * n, 0.2) for n in range(12)],
        left=2,
        samples=[Sample(60.0 * n, 100.0, 20, 10, 1.0) for n in range(12)],
        tokens=Counter(dict.fromkeys(SOURCES, 9)),
        loads=Counter({"ready": 5}),
    )


def test_a_sound_soak_has_no_problem():
    assert problems(sound()) == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda soak: soak.wrong.append("short: x"),
        lambda soak: soak.failed.append("short: x"),
        lambda soak: soak.held_at_rest.append("decode-0 holds kvferry_leases 1"),
        lambda soak: soak.deaths.append("decode-0 ended"),
        lambda soak: soak.samples.append(replace(soak.samples[-1], at=720.0, descriptors=200)),
        lambda soak: soak.tokens.pop("file, at the prefill engine"),
    ],
)
def test_each_kind_of_problem_fails_the_soak(spoil: Callable[[Soak], object]):
    soak = sound()
    spoil(soak)
    assert len(problems(soak)) == 1
    assert any(line.endswith("| 1 |") and line.count("|") == 3 for line in report(soak, "x").splitlines())


@pytest.mark.parametrize("name", HELD)
def test_an_engine_that_holds_something_is_seen(name: str):
    assert held_of(RESTING) == []
    assert held_of(RESTING.replace(f"{name} 0.0", f"{name} 2.0")) == [f"{name} 2"]
    assert held_of(RESTING.replace(name, "other")) == [f"something unknown: it has no metric {name}"]


def test_a_process_that_has_ended_is_named(tmp_path: Path):
    log = tmp_path / "decode-0.log"
    log.write_text("ValueError: no more\n")
    engine: Any = SimpleNamespace(
        spec=SimpleNamespace(name="decode-0"), log_path=log, exit_code=-9, poll=lambda: EngineState.DEAD
    )
    alive: Any = SimpleNamespace(poll=lambda: EngineState.READY)
    fleet: Any = SimpleNamespace(engines=[engine, alive])
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as router:
        router.wait()
        said = Pair(fleet, router, "", tmp_path).deaths()
    assert [one.split(":")[0] for one in said] == [
        "decode-0 ended with signal 9 (SIGKILL)",
        "the router ended with exit code 3",
    ]


def test_the_part_is_written_into_the_page():
    written = with_part(PAGE.read_text(), "soak", report(sound(), "make soak"))
    assert "12 whole answers" in written
    assert "| short | 12 | 0.20 | 0.20 | 0.20 | 0.20 |" in written


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "an hour", ""])
def test_soak_without_a_positive_time_is_refused(seconds: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["--seconds", seconds])
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"{seconds!r} is no time to soak for; give 60 seconds or more" in said


def test_a_page_that_cannot_be_written_is_refused_before_the_soak(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    page = tmp_path / "page.md"
    page.write_text("nothing\n")
    with pytest.raises(SystemExit):
        main(["--report", str(page)])
    assert "has no part 'soak'" in capsys.readouterr().err


def test_a_signal_in_the_middle_of_a_task_ends_the_soak_without_a_traceback(caplog):
    async def signalled() -> None:
        raise KeyboardInterrupt

    async def work() -> None:
        await asyncio.gather(signalled(), asyncio.sleep(30))

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(interruptible(work()))
    gc.collect()
    assert not caplog.text


def test_errors_of_unawaited_tasks_are_reported(caplog):
    async def broken() -> None:
        raise ValueError("a fault of the soak itself")

    async def work() -> None:
        await asyncio.wait([asyncio.create_task(broken())])

    asyncio.run(interruptible(work()))
    gc.collect()
    assert "a fault of the soak itself" in caplog.text
