"""The command line of the campaign refuses what cannot be run, before an engine is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.campaign import main


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
def test_what_cannot_be_run_is_refused_in_words(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "page.md").write_text("nothing\n")
    monkeypatch.setattr("sys.argv", ["campaign", *(one.format(folder=tmp_path) for one in arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
