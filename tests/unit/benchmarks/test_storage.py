"""The report and the summary of `benchmarks storage`, its comparison of answers, and its files."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.served import FirstAnswer
from benchmarks.storage import page, report, stored_files
from benchmarks.storage.answers import agree
from benchmarks.storage.command import storage
from benchmarks.storage.peers import one_line
from benchmarks.storage.rounds import Measured, PromptRounds, VariantRound
from kvferry.common.errors import ConfigError


def made_up(tokens: int = 2048, times: Sequence[float] = (1, 2, 3)) -> Measured:
    """Rounds in which everything takes `times` as long."""
    each = tuple(
        {
            "compute": VariantRound(new=0.4 * n, shared=0.5 * n),
            "example": VariantRound(
                new=0.6 * n, stored=0.6 * n, flushed=0.8 * n, load=0.04 * n, disk_load=0.1 * n,
                load_tokens=tokens, shared=0.5 * n,
            ),
            "file": VariantRound(
                new=0.42 * n, stored=0.48 * n, load=0.08 * n, disk_load=0.09 * n, load_tokens=tokens + 1,
                shared=0.3 * n, shared_tokens=tokens // 2,
            ),
            "host": VariantRound(
                new=0.41 * n, stored=0.42 * n, load=0.02 * n, load_tokens=tokens + 1, shared=0.25 * n,
                shared_tokens=tokens // 2,
            ),
        }
        for n in times
    )  # fmt: skip
    peers = {"OffloadingConnector": "CPU Offloading is only supported on GPUs", "Other": None}
    return Measured(prompts=(PromptRounds(tokens, tokens << 15, each),), peers=peers, direct_io=True)


def answer(token: int, **logprobs: float) -> FirstAnswer:
    likely = {int(name[1:]): each for name, each in logprobs.items()}
    return FirstAnswer(seconds=1.0, hit_tokens=0, token=token, logprobs=likely)


def shown(found: Measured) -> list[str]:
    console = Console(file=(out := io.StringIO()), width=80, highlight=False)
    report.show(found, console)
    return [" ".join(line.split()) for line in out.getvalue().splitlines()]


def test_storing_is_shown_as_the_time_added_to_computing_in_the_same_round() -> None:
    lines = shown(made_up())
    assert "2,048 computing, in all 800.0 (400.0-1,200.0)" in lines
    assert "ExampleConnector +400 (200 to 600) +400 (200 to 600)" in lines
    assert "flushed to disk +800 (400 to 1,200)" in lines
    assert "kvferry, files +40 (20 to 60) +160 (80 to 240)" in lines


def test_first_tokens_are_shown_with_the_tokens_that_were_loaded() -> None:
    lines = shown(made_up())
    assert "from disk 200.0 (100.0-300.0) 2,048" in lines
    assert "kvferry, files 160.0 (80.0-240.0) 2,049" in lines
    assert "from disk 180.0 (90.0-270.0) 2,049" in lines
    assert "ExampleConnector 1,000 (500-1,500) 0" in lines
    assert "kvferry, files 600.0 (300.0-900.0) 1,024" in lines


def test_the_report_has_the_error_of_each_peer_that_cannot_run_and_fits_a_terminal() -> None:
    lines = shown(made_up(32_768, (7, 11, 100)))
    assert "32,768 computing, in all 4,400 (2,800-40,000)" in lines
    assert "ExampleConnector +2,200 (1,400 to 20,000) +2,200 (1,400 to 20,000)" in lines
    assert "OffloadingConnector: CPU Offloading is only supported on GPUs" in lines


def test_ratios_of_the_summary_are_of_one_round_each() -> None:
    found = page.summary(json.loads(json.dumps(report.as_json(made_up()))))
    ratios = {(one.label, one.against): one.ratio for one in found.comparisons}
    same = {
        ("first token of a stored prompt, 2,048 tokens, files", "ExampleConnector, page cache"): 2.0,
        ("first token of a stored prompt, 2,048 tokens, files on disk", "ExampleConnector, disk"): 0.9,
        ("first token of a stored prompt, 2,048 tokens, host memory", "ExampleConnector, page cache"): 0.5,
        ("first token of a stored prompt, 2,048 tokens, files", "computing"): 0.2,
        ("first token of a new prompt, 2,048 tokens, files", "ExampleConnector"): 0.7,
        ("storing a new prompt, 2,048 tokens, files", "ExampleConnector, flushed"): 0.6,
        ("first token, first half stored, 2,048 tokens, host memory", "ExampleConnector"): 0.5,
        ("first token, first half stored, 2,048 tokens, files", "computing"): 0.6,
    }
    for row, ratio in same.items():
        spread = ratios[row]
        assert spread is not None
        assert (spread.median, spread.low, spread.high) == pytest.approx((ratio, ratio, ratio))
    assert found.low_is_good
    assert "2.00 (2.00-2.00) of ExampleConnector's from the page cache and 0.90" in found.answer
    assert "kvferry loads 1,024 and ExampleConnector 0" in found.notes[0]


def test_a_peer_that_cannot_run_is_a_row_with_its_error_and_no_ratio() -> None:
    *_, offloading, other = page.summary(report.as_json(made_up())).comparisons
    assert (offloading.against, offloading.ratio) == ("OffloadingConnector", None)
    assert offloading.theirs == "CPU Offloading is only supported on GPUs"
    assert other.theirs == "works here, not measured"


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (answer(5, _5=-1.9), True),
        (answer(6, _6=-2.2), True),  # as likely as the computed token
        (answer(7, _7=-3.0), False),  # unlikely when computed
        (answer(5, _5=-1.0), False),  # the same token by chance
        (answer(8, _8=-2.0), False),  # not among the likely tokens
    ],
)
def test_a_first_token_is_right_if_computing_finds_it_about_as_likely(
    other: FirstAnswer, *, same: bool
) -> None:
    assert agree(answer(5, _5=-2.0, _6=-2.1, _7=-3.0), other) is same


def test_files_are_flushed_dropped_swapped_and_removed(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "layer").write_text(name)
    assert stored_files.flush(tmp_path) > 0
    stored_files.drop_from_page_cache(tmp_path)
    stored_files.overwrite(tmp_path / "one", tmp_path / "other")
    assert (tmp_path / "one" / "layer").read_text() == "other"
    stored_files.remove_all(tmp_path)
    assert isinstance(stored_files.has_direct_io(tmp_path), bool)
    assert not [*tmp_path.iterdir()]


def test_an_error_becomes_one_line() -> None:
    assert one_line(ValueError("no\n  such thing")) == "no such thing"
    assert one_line(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert len(one_line(ValueError("long " * 100))) == 200


@pytest.mark.parametrize("prompts", ["x", "", "0", "2048,1000", "-512"])
def test_prompts_that_cannot_be_halved_into_chunks_are_refused(prompts: str) -> None:
    with pytest.raises(ConfigError, match="is not a multiple of 512 tokens, such as 2048"):
        storage(prompts=prompts)
