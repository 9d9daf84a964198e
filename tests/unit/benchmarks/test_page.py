"""The page of benchmarks: what is run, what is kept, and what the page says of it."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import app
from benchmarks.conditions import QUIET
from benchmarks.handover.engine import Stamps
from benchmarks.handover.page import summary as handover
from benchmarks.page.figures import Comparison, Summary
from benchmarks.page.measure import measure_page
from benchmarks.page.plot import draw, names
from benchmarks.page.results import Result, load, save, these_versions, this_machine
from benchmarks.page.run import last_error, run
from benchmarks.page.sections import SECTIONS, Reason, Section
from benchmarks.page.tiers import summary as tiers
from benchmarks.page.transfer import summary as transfer
from benchmarks.page.write import UNEXPLAINED, write
from benchmarks.steps.page import summary as steps
from benchmarks.streaming.page import summary as streaming
from benchmarks.turns.page import summary as turns
from kvferry.common.errors import ConfigError
from kvferry.tools.measuring.rounds import Spread

SLOWER, FASTER = Spread(1.3, 1.2, 1.4), Spread(0.5, 0.4, 0.6)


def row(ratio: Spread | None, label: str = "512 tokens", against: str = "peer", theirs: str = "2 ms"):
    return Comparison(label=label, against=against, ours="1 ms", theirs=theirs, ratio=ratio)


def summed(*comparisons: Comparison, low_is_good: bool = True, notes: tuple[str, ...] = ()) -> Summary:
    return Summary(answer="Soon.", comparisons=comparisons, low_is_good=low_is_good, notes=notes)


def section(summary: Summary | None = None, *reasons: Reason, name: str = "first") -> Section:
    return Section(
        name=name,
        title=f"The {name} one",
        question="How soon?",
        program=("benchmarks", "layout"),
        arguments=("--repeats", "9"),
        quick_arguments=("--repeats", "7"),
        summary=lambda _: summary,
        method="performance.md#x",
        reasons=reasons,
    )


def result(error: str | None = None, command: tuple[str, ...] = ("benchmarks", "layout"), **other) -> Result:
    values = {"machine": this_machine(), "versions": these_versions(), **other}
    document = None if error else {"a": 1}
    return Result(
        command=command,
        seconds=90,
        date="2026-01-02",
        commit="abc1234",
        document=document,
        error=error,
        **values,
    )


def written(folder: Path, *measured: tuple[Section, Result], quick: bool = False) -> str:
    write(measured, folder / "page.md", quick=quick)
    return (folder / "page.md").read_text()


@pytest.mark.parametrize(
    ("ratio", "low_is_good", "behind"),
    [
        (Spread(1.01, 1.001, 1.4), True, True),
        (Spread(1.05, 0.99, 1.4), True, False),
        (Spread(1.2, 0.9, 1.4), True, True),
        (Spread(0.5, 0.4, 0.6), True, False),
        (Spread(0.99, 0.9, 0.999), False, True),
        (Spread(0.95, 0.9, 1.1), False, False),
        (Spread(0.8, 0.7, 1.2), False, True),
        (Spread(1.5, 1.4, 1.6), False, False),
        (None, True, False),
    ],
)
def test_kvferry_is_behind_in_every_round_or_clearly(ratio, low_is_good: bool, behind: bool) -> None:
    assert summed(low_is_good=low_is_good).is_behind(ratio) is behind


def test_page_gives_a_reason_for_each_ratio_behind(tmp_path: Path) -> None:
    rows = row(SLOWER), row(FASTER, against="other"), row(SLOWER, "8,192 tokens"), row(SLOWER, "big", "disk")
    known = Reason(against="peer", label="512", text="The peer is in a hurry.")
    text = written(tmp_path, (section(summed(*rows, notes=("It rains.",)), known), result()))
    assert "| 512 tokens | peer | 1 ms | 2 ms | **1.30 (1.20-1.40)** [1] |" in text
    assert "| | other | 1 ms | 2 ms | 0.50 (0.40-0.60) |" in text, "a label stands once"
    assert "| 8,192 tokens | peer | 1 ms | 2 ms | **1.30 (1.20-1.40)** [2] |" in text
    assert "| big | disk | 1 ms | 2 ms | **1.30 (1.20-1.40)** [2] |" in text
    assert f"1. The peer is in a hurry.\n2. {UNEXPLAINED}\n" in text
    assert "- It rains." in text
    assert "| [The first one](#the-first-one) | Soon. | 3 of 4 |" in text
    assert "```\npython -m benchmarks layout\n```" in text
    assert "It took 90 s on 2026-01-02 at commit abc1234. [How it is measured](performance.md#x)." in text
    assert "Shortened" not in text


def test_a_page_without_a_ratio_behind_has_no_list_of_reasons(tmp_path: Path) -> None:
    text = written(tmp_path, (section(summed(row(FASTER))), result()), quick=True)
    assert "Where kvferry is behind:" not in text
    assert UNEXPLAINED not in text
    assert "**Shortened.** These figures are of `--quick`" in text


def test_a_peer_that_fails_has_its_error_in_place_of_a_figure(tmp_path: Path) -> None:
    failing = row(None, theirs="wrong tokens | no\nerror")
    text = written(tmp_path, (section(summed(failing, row(FASTER))), result()))
    assert r"| 512 tokens | peer | 1 ms | wrong tokens \| no error | |" in text
    assert "| 0 of 1 |" in text


def test_a_failed_section_has_its_error_and_the_others_stay(tmp_path: Path) -> None:
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "second.svg").write_text("of an earlier run")
    text = written(
        tmp_path,
        (section(summed(row(FASTER))), result()),
        (section(name="second"), result(error="no room | left")),
    )
    assert r"| [The second one](#the-second-one) | failed: no room \| left | |" in text
    assert r"**Failed.** The command ended with: no room \| left" in text
    assert "![ratios of first](page/first.svg)" in text
    assert [path.name for path in (tmp_path / "page").iterdir()] == ["first.svg"]


def test_sections_that_were_not_measured_are_listed_with_their_question(tmp_path: Path) -> None:
    one = section(summed(row(FASTER)))
    assert "Not measured" not in written(tmp_path, (one, result()))
    write([(one, result())], tmp_path / "page.md", left_out=[section(name="second")], quick=False)
    text = (tmp_path / "page.md").read_text()
    assert "**Not measured for this page.**" in text
    assert "- [The second one](performance.md#x): How soon?\n" in text


def test_the_page_of_the_documentation_has_or_lists_every_section() -> None:
    text = (Path(__file__).parents[3] / "benchmarks" / "figures.md").read_text()
    listed = [one.name for one in SECTIONS if f"- [{one.title}]({one.method}): {one.question}\n" in text]
    measured = [one.name for one in SECTIONS if f"\n## {one.title}\n\n*{one.question}*\n" in text]
    assert sorted(listed + measured) == sorted(one.name for one in SECTIONS)


def test_the_page_names_the_machine_and_all_versions(tmp_path: Path) -> None:
    text = written(tmp_path, (section(summed(row(FASTER))), result()))
    assert all(f"{name}: {value}" in text for name, value in (this_machine() | these_versions()).items())


def test_equal_figures_give_an_equal_plot() -> None:
    summary = summed(row(SLOWER), row(FASTER, "<a> & b"), row(None))
    first = draw(summary)
    assert first == draw(summary)
    assert ET.fromstring(first).tag == "{http://www.w3.org/2000/svg}svg"
    assert "0.50 (0.40-0.60)" in first
    assert "dc:date" not in first
    assert len(first) < 20_000


def test_a_wide_range_of_ratios_has_a_logarithmic_axis() -> None:
    def ticks(ratio: Spread) -> set[str]:
        return set(re.findall(r">([\d.]+)</text>", draw(summed(row(ratio), row(FASTER)))))

    assert {"0.01", "0.1", "1"} <= ticks(Spread(0.02, 0.01, 0.1))
    assert not {"0.01", "0.1"} & ticks(Spread(0.5, 0.4, 0.6))


def test_a_section_without_ratios_has_no_plot(tmp_path: Path) -> None:
    assert draw(summed(row(None))) is None
    assert "![" not in written(tmp_path, (section(summed(row(None))), result()))


def test_bars_are_labelled_by_their_differences() -> None:
    assert names([row(FASTER, "a"), row(FASTER, "b")]) == ["a", "b"]
    assert names([row(FASTER, against="x"), row(FASTER, against="y")]) == ["against x", "against y"]
    assert names([row(FASTER, "a", "x"), row(FASTER, "b", "y")]) == ["a, against x", "b, against y"]


def test_a_stored_result_is_used_again_but_not_a_failed_one(tmp_path: Path) -> None:
    command = ("benchmarks", "layout")
    assert load(tmp_path / "new", "first", command) is None
    save(result(), tmp_path / "new", "first")
    assert load(tmp_path / "new", "first", command) == result()
    save(result("no room"), tmp_path / "new", "first")
    assert load(tmp_path / "new", "first", command) is None
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["first.json"]


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"machine": {**this_machine(), "processor": "Z80"}}, r"of another machine \(processor: Z80, here "),
        ({"versions": {**these_versions(), "NIXL": "0.1"}}, r"of another version \(NIXL: 0.1, here "),
        ({"versions": {"kvferry": "0.0"}}, r"of another version \(kvferry: 0.0, here "),
        (
            {"command": ("benchmarks", "layout", "-q")},
            "of another command, `benchmarks layout -q`; leave out",
        ),
    ],
)
def test_a_result_of_something_else_is_refused_in_words(tmp_path: Path, other, says: str) -> None:
    save(result(**other), tmp_path, "first")
    with pytest.raises(ConfigError, match=says):
        load(tmp_path, "first", ("benchmarks", "layout"))


def test_a_file_that_is_no_result_is_named(tmp_path: Path) -> None:
    (tmp_path / "first.json").write_text('{"command": 3}')
    with pytest.raises(ConfigError, match=r"first\.json is not the result of a section: .*leave out --reuse"):
        load(tmp_path, "first", ())


def test_the_error_of_a_command_is_kvferrys_last_sentence_or_the_last_line() -> None:
    assert last_error("\x1b[31mkvferry: one\x1b[0m\r\nkvferry: two\nleaked objects\n") == "two"
    assert last_error("starting ...\nValueError: x\n\n") == "ValueError: x"
    assert last_error("") == ""


@pytest.mark.slow
def test_failed_command_is_a_section_and_the_next_one_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fails = Section(
        name="fails",
        title="It fails",
        question="?",
        program=("kvferry", "plan"),
        arguments=("/nowhere",),
        quick_arguments=(),
        summary=lambda _: pytest.fail("there is nothing to summarize"),
        method="x",
    )
    works = Section(
        name="works",
        title="It works",
        question="?",
        program=("kvferry", "plan", "Qwen3-0.6B"),
        quick_arguments=(),
        summary=lambda document: summed(row(FASTER, label=next(iter(document)))),
        method="x",
    )
    out, kept = tmp_path / "page.md", tmp_path / "results"
    assert measure_page([fails, works], out, kept) == ["fails"]
    said = "cannot read /nowhere: No such file or directory; give a config.json or the folder it is in"
    assert f"**Failed.** The command ended with: {said}" in out.read_text()
    assert "**Answer.** Soon." in out.read_text()
    assert json.loads((kept / "fails.json").read_text())["error"] == said
    assert f"kvferry: {said}" in capfd.readouterr().err, "messages of the command are passed on"
    # What has worked is used again; what has failed runs again.
    measure_page([fails, works], out, kept, reuse=True)
    again = capfd.readouterr().err
    assert "section 1 of 2, fails" in again
    assert "section 2 of 2" not in again


@pytest.mark.slow
def test_a_command_that_prints_no_json_has_failed() -> None:
    found = run(("kvferry", "--version"))
    assert found.document is None
    assert "has no option --json" in found.error or "no JSON" in found.error


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--only", "transfer,speed"), "--only speed is not known; choose from transfer, handover"),
        (("--out", "page.html"), "--out page.html is not an .md file"),
        (("--out", "/nowhere/page.md"), "there is no folder /nowhere; create it"),
    ],
)
def test_an_option_that_cannot_be_used_is_named(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        app(["page", *arguments], standalone_mode=False)


def test_results_are_kept_if_the_user_interrupts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = iter([result()])

    def stopped(command: tuple[str, ...]) -> Result:
        for measured in commands:
            return measured
        raise KeyboardInterrupt

    both = section(name="first"), section(name="second")
    with pytest.raises(KeyboardInterrupt):
        measure_page(both, tmp_path / "page.md", tmp_path, run_command=stopped)
    assert [path.name for path in tmp_path.iterdir()] == ["first.json"]
    assert "--reuse goes on after the results in" in capsys.readouterr().err


def test_names_of_sections_are_distinct_and_quick_runs_differ() -> None:
    assert len({one.name for one in SECTIONS}) == len(SECTIONS)
    assert len({one.title for one in SECTIONS}) == len(SECTIONS)
    assert all(one.command(quick=True) != one.command(quick=False) for one in SECTIONS)


def test_every_section_links_to_a_section_of_the_documentation() -> None:
    docs = Path(__file__).parents[3] / "docs"
    for one in SECTIONS:
        page, _, anchor = one.method.partition("#")
        headings = re.findall(r"^#+ (.+)$", (docs / page).read_text(), re.MULTILINE)
        assert anchor in [re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings]


def stamps(milliseconds: float) -> dict[str, Any]:
    """One round of one request."""
    stamped = [asdict(Stamps(added=1.0, answered=1.0 + milliseconds * 1e-3))]
    return {"stamps": stamped, "conditions": QUIET.as_json()}


def test_hand_overs_are_compared_round_by_round() -> None:
    connectors = {"kvferry": [10, 22, 12], "nixl": [20, 20, 24], "nixl+": [8, 20, 10]}
    rounds = {name: [stamps(each) for each in times] for name, times in connectors.items()}
    found = handover(
        {"qwen3": [{"kind": "load", "tokens": 8192, "requests": 1, "connectors": rounds, "failures": {}}]}
    )
    plus, plain = found.comparisons
    assert (plus.label, plus.against, plus.ours, plus.theirs) == (
        "qwen3, 8,192 tokens x 1", "nixl+", "12.0 ms", "10.0 ms",
    )  # fmt: skip
    assert (plus.ratio.median, plus.ratio.low, plus.ratio.high) == pytest.approx((1.2, 1.1, 1.25))
    assert (plain.against, plain.ratio.low, plain.ratio.high) == (
        "NixlConnector", pytest.approx(0.5), pytest.approx(1.1),
    )  # fmt: skip
    assert found.is_behind(plus.ratio)
    assert "1.20 of nixl+'s (+2.0 ms), and 0.50 of NixlConnector's (-10.0 ms)" in found.answer


def test_streamed_hand_overs_are_compared_with_those_at_the_end() -> None:
    times = ((False, 2.0, 1.5), (True, 1.0, 0.9), (False, 1.0, 0.5), (True, 0.8, 0.7))
    requests = [
        {
            "gigabits": 0.0,
            "tokens": 2048,
            "streamed": streamed,
            "seconds": whole,
            "left_seconds": whole - prefill,
        }
        for streamed, whole, prefill in times
    ]
    found = streaming({"kv_bytes_per_token": 4096, "requests": requests})
    (one,) = found.comparisons
    assert (one.label, one.ours, one.theirs) == ("no limit, 2,048 tokens, 8 MiB", "900 ms", "1.5 s")
    assert (one.ratio.low, one.ratio.high) == pytest.approx((0.5, 0.8))
    assert "100 ms, not 500 ms" in found.notes[0]


def test_bytes_of_turns_are_compared_without_the_first_turn() -> None:
    def loads(*sizes: int):
        return [{"bytes_by_group": {"0 state": size // 2, "1 full": size // 2}} for size in sizes]

    family = {"family": "lfm2", "block_tokens": 128, "most_again": 111}
    found = turns([{**family, "without": loads(100, 4096, 8192), "shared": loads(100, 2048, 2048)}])
    (one,) = found.comparisons
    assert (one.label, one.ours, one.theirs) == ("lfm2, turns 2 to 3", "2 KiB a turn", "6 KiB a turn")
    assert one.ratio == Spread(0.375, 0.25, 0.5)
    assert "lfm2 111 (blocks of 128)" in found.notes[1]


def test_hooks_are_compared_without_the_share_of_an_empty_connector() -> None:
    found = steps({
        "empty": [[50e-6], [60e-6]],
        "nixl": [[110e-6], [120e-6]],
        "kvferry": [[80e-6], [75e-6]],
        "kvferry with tiers": [[170e-6], [180e-6]],
    })  # fmt: skip
    plain, tiered = found.comparisons
    assert (plain.ratio.low, plain.ratio.high) == pytest.approx((0.25, 0.5))
    assert tiered.ratio.median == pytest.approx(2.0)
    assert "empty 55 µs" in found.notes[0]


def test_a_transfer_is_compared_with_raw_nixl_and_memcpy() -> None:
    others = ["(a) raw NIXL, 2 MiB descriptors", "(b) raw NIXL, same descriptors", "(c) memcpy"]
    spreads = [asdict(Spread(ratio, ratio, ratio)) for ratio in (0.6, 0.95, 0.5)]
    found = transfer({
        "geometry": "m", "tokens": 4096, "order": "scattered", "blocks": 2, "layers": 2, "page_bytes": 65536,
        "comparison": {"others": [{"name": name} for name in others], "stages": [0.001, 0.05, 0.0001, 0.002]},
        "kvferry_as_multiple_of": dict(zip(others, spreads, strict=True)),
        "gigabytes_per_second": {name: {"median": 9.5} for name in ("kvferry", *others)},
    })  # fmt: skip
    assert [one.against for one in found.comparisons] == [name[4:] for name in others]
    assert found.comparisons[0].label == "m, 4,096 tokens in scattered blocks, 256 KiB"
    assert not found.low_is_good
    assert "0.95 (0.95-0.95) of raw NIXL's speed" in found.answer


def test_tiers_are_compared_with_their_limit() -> None:
    speed = {
        "depth": 8, "limit": "memcpy", "ratio": asdict(Spread(0.95, 0.8, 1.1)),
        "gigabytes_per_second": {"kvferry": {"median": 9.0}, "memcpy": {"median": 10.0}},
    }  # fmt: skip
    speeds = [{**speed, "tier": f"host, {layout}", "direction": "load"} for layout in ("LBNHC", "BHLNC")]
    found = tiers({"chunk_tokens": 256, "chunk_bytes": 1 << 24, "speeds": speeds})
    assert found.comparisons[0].label == "host, LBNHC, load, depth 8"
    assert "host: 0.95." in found.answer
    assert not found.is_behind(found.comparisons[0].ratio)


def test_hand_overs_that_stall_have_the_reason_in_place_of_a_ratio() -> None:
    rounds = {"kvferry": [stamps(100)] * 3, "nixl+": [stamps(120), stamps(1500), stamps(120)]}
    load = {"kind": "load", "tokens": 512, "requests": 1, "connectors": rounds, "failures": {}}
    found = handover({"qwen3": [load]})
    (one,) = found.comparisons
    assert (one.ratio, one.theirs) == (None, "nixl+ stalled in 1 of 3 rounds, up to 1.5 s")
    assert found.answer.endswith("could not be compared in any row.")
    assert any("nixl+ ran 3 rounds, 3 of them on a quiet machine." in note for note in found.notes)
    assert any("1 rounds stalled, up to 1.5 s." in note for note in found.notes)
