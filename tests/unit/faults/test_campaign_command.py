"""The command line of the campaign refuses what cannot be run, before an engine is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults import campaign
from faults.campaign import Outcome, main
from faults.values import Fault, Leaks, Trial, judged


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--faults", "3"], "3 faults are planned, there are "),
        (["--faults", "-1"], "-1 faults are planned, there are "),
        (["--faults", "many"], "invalid int value: 'many'"),
        (
            ["--families", "gemma3", "--kinds", "another adapter's prompt"],
            "another adapter's prompt: engines of gemma3 cannot meet these kinds",
        ),
        (["--report", "{folder}/none.md"], "No such file or directory"),
        (["--report", "{folder}/page.md"], "the page has no part 'faults' to write"),
    ],
)
def test_campaign_that_cannot_run_is_refused_with_a_reason(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "page.md").write_text("nothing\n")
    with pytest.raises(SystemExit) as ended:
        main([one.format(folder=tmp_path) for one in arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


GOOD = Trial("3 bytes changed", "checksum", answers=1)


@pytest.mark.parametrize(
    ("trial", "leaks", "caught", "problem"),
    [
        (GOOD, Leaks(), "a wrong answer", ""),
        (Trial("3 bytes changed", "checksum", wrong=["r1"], answers=1), Leaks(), "x", "1 wrong outputs"),
        (GOOD, Leaks(blocks=2), "x", "2 leaked blocks"),
        (GOOD, Leaks(), "", "without pins (gemma3) nothing was found"),
    ],
)
def test_a_campaign_fails_if_anything_is_wrong_or_a_protection_is_not_missed(
    trial: Trial,
    leaks: Leaks,
    caught: str,
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def ran(*_: object, **__: object) -> Outcome:
        return Outcome(
            [judged(Fault(0, "preemption", "gemma3", 1), trial)], leaks, {("pins", "gemma3"): caught}
        )

    monkeypatch.setattr(campaign, "campaign", ran)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")  # main sets it
    assert main([]) == bool(problem)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("BAD ")]
    assert (f"BAD {problem}" in said) if problem else not said
