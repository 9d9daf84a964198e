"""`kvferry replay` on small traces."""

from __future__ import annotations

import base64
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kvferry.tools.cli.main import app
from kvferry.tools.replay.settings import ASSUMED_KV_CACHE
from kvferry.tools.replay.trace.open import open_trace
from support.command_line import run_command_in_terminal
from support.configs import DENSE
from support.terminal import Terminal

TARGET = ("--target-hit", "0.5")
FILE = ("--tier", "host=1MiB", "--tier", "file=unlimited")
ONE_WRITE = ("--disk-writes-per-day", "1")
TOKEN_BYTES = 2 * 2 * 2 * 16 * 2
"""Bytes of a token of the model: K and V of 2 heads of 16 elements of 2 bytes, in 2 layers."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    lines = [
        {"timestamp": 1000 * n, "input_length": 1024, "output_length": 5, "hash_ids": [n % 4, 7]}
        for n in range(12)
    ]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def run(*arguments: str) -> tuple[int, str]:
    trace = Path("trace.jsonl").read_text() if "-" in arguments else None
    done = CliRunner().invoke(app, arguments, input=trace, env={"COLUMNS": "80"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        return 1, f"{type(done.exception).__name__}: {done.exception}"
    return done.exit_code, done.output


def replay(*options: str) -> dict[str, object]:
    code, output = run("replay", "trace.jsonl", "--model", "config.json", "--json", *options)
    assert code == 0, output
    return json.loads(output)


def test_json_has_the_hit_rate_and_the_tiers(folder: Path) -> None:
    found = replay()
    assert found["hit_rate"] == pytest.approx(8 / 12)
    assert found["unit_hit_rate"] == pytest.approx(8 / 12)
    assert (found["requests"], found["seconds"], found["complete"]) == (12, 11.0, True)
    assert [tier["name"] for tier in found["tiers"]] == ["host"]


def test_text_has_a_curve_and_files_have_requests_and_a_picture(folder: Path) -> None:
    options = ["--tier", "host=1MiB", "--tier", "file=unlimited", "--prefill-tokens-per-second", "5000"]
    more = ["--curve", "--html", "page.html", "--requests", "requests.jsonl", "--bandwidth", "file=1"]
    more += ["--engine-blocks", "0"]
    code, output = run("replay", "trace.jsonl", "--model", "config.json", *options, *more)
    assert code == 0, output
    assert "Tiers save 66.7% of the prompt tokens from being computed" in output
    assert "Time to the first token" in output
    assert "Hit rate by capacity" in output
    assert max(map(len, output.splitlines())) <= 80
    assert "<polyline" in Path("page.html").read_text()
    found = [json.loads(line) for line in Path("requests.jsonl").read_text().splitlines()]
    assert [sum(one["tier_tokens"]) for one in found] == [0] * 4 + [1024] * 8


def test_engines_of_a_fleet_find_what_others_hold(folder: Path) -> None:
    options = ("--engines", "4", "--route", "least-busy", "--engine-blocks", "0", "--tier", "host=1MiB")
    alone, found = replay(*options), replay(*options, "--tier", "fleet")
    assert (alone["hit_rate"], found["hit_rate"]) == (pytest.approx(8 / 12), pytest.approx(8 / 12))
    uneven = ("--engines", "3", *options[2:])
    alone, found = replay(*uneven), replay(*uneven, "--tier", "fleet")
    assert (alone["hit_rate"], found["hit_rate"]) == (0, pytest.approx(8 / 12))
    fleet = next(tier for tier in found["tiers"] if tier["name"] == "fleet")
    assert fleet["read_bytes"] == sum(one["read_bytes"] for one in found["by_engine"]) > 0
    code, output = run("replay", "trace.jsonl", "--model", "config.json", *uneven, "--tier", "fleet")
    assert code == 0, output
    assert "others read" in output


def test_sessions_run_so_many_at_once(folder: Path) -> None:
    rows = [
        {"session_id": name, "input_length": 1024, "output_length": 5, "hash_ids": [1, 2]} | when
        for name in "abc"
        for when in ({"timestamp": 0.0}, {"delay": 1500.0})
    ]
    Path("trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--engine-blocks", "0", "--prefill-tokens-per-second", "1024")
    found, one = replay(*options), replay(*options, "--concurrency", "1")
    assert found["requests"] == one["requests"] == 6
    # The very first prompt takes 1 s and is found by the others, and each second turn takes 1 s. One at a
    # time, the last turn arrives after three delays of 1.5 s, the first prompt, and two second turns.
    assert (found["seconds"], one["seconds"]) == (pytest.approx(2.5, abs=0.1), pytest.approx(7.5, abs=0.1))


def test_a_trace_of_lengths_cannot_tell_what_prompts_share(folder: Path) -> None:
    Path("lengths.csv").write_text("arrival,prompt_tokens,output_tokens\n" + "1,4096,8\n" * 9)
    code, output = run("replay", "lengths.csv", "--model", "config.json")
    assert code == 0, output
    assert "The trace cannot tell how many of the prompt tokens need not be computed" in output
    assert "0.0% of the prompt tokens" not in output
    code, output = run("replay", "lengths.csv", "--model", "config.json", "--json")
    found = next(json.loads(line) for line in output.splitlines() if line.startswith("{"))
    assert found["why_no_hit_rate"].startswith("the trace has only lengths")
    hits = [found["hit_rate"], found["hit_tokens"], *(each["hit_rate"] for each in found["tiers"])]
    assert {*hits, *(each["hit_rate"] for each in found["groups"])} == {None}
    run("replay", "lengths.csv", "--model", "config.json", "--requests", "requests.jsonl")
    assert '"local_tokens": null, "tier_tokens": null' in Path("requests.jsonl").read_text()
    code, output = run("replay", "lengths.csv", "--model", "config.json", "--html", "page.html")
    assert "The trace cannot tell" in Path("page.html").read_text()
    assert "%" not in Path("page.html").read_text().partition("<pre>")[2]


@pytest.mark.parametrize(
    "arguments",
    [
        ("replay", "lengths.csv", "--model", "config.json", "--target-hit", "0.5"),
        ("replay", "lengths.csv", "--model", "config.json", "--curve"),
        ("plan", "config.json", "--trace", "lengths.csv", "--json"),
    ],
)
def test_a_curve_of_a_trace_of_lengths_is_refused(folder: Path, arguments: tuple[str, ...]) -> None:
    Path("lengths.csv").write_text("arrival,prompt_tokens,output_tokens\n" + "1,4096,8\n" * 9)
    code, output = run(*arguments)
    assert code != 0
    assert "lengths.csv has only lengths" in " ".join(output.split()), output


def test_the_gain_of_tiers_is_what_they_add_to_the_engines_own_prefix_cache(folder: Path) -> None:
    found = replay("--block-size", "16")
    assert found["engine_blocks"] == (40 << 30) // (16 * TOKEN_BYTES)
    assert found["local_tokens"] == 8 * (1024 - 16), "the last token is computed, and a block is whole"
    assert found["tiers"][0]["hit_tokens"] == 8 * 16
    first, gain, *_ = run("replay", "trace.jsonl", "--model", "config.json")[1].split("\n\n")
    assert "1 engine with a prefix cache of 10,485,760 blocks" in first
    assert "(40 GiB of KV cache per rank, assumed)" in " ".join(first.split())
    assert " ".join(gain.split()).startswith(
        "Tiers save 1.0% of the prompt tokens from being computed, the engine's own prefix cache 65.6%"
    )
    small = replay("--kv-cache-memory", "300KiB")
    assert small["engine_blocks_source"] == "300 KiB of KV cache per rank"
    assert small["local_tokens"] == 0
    assert small["hit_rate"] == found["hit_rate"]


def test_size_says_what_the_engine_has_without_tiers(folder: Path) -> None:
    size = ("replay", "trace.jsonl", "--model", "config.json", "--target-hit", "0.5")
    output = run(*size)[1]
    found = " ".join(output.split())
    assert "No tier is needed for 50%: the engine's own prefix cache reaches 65.6%" in found, output
    assert "(40 GiB of KV cache per rank, assumed), which has 65.6% of the prompt tokens." in found
    assert "Tiers are not worth it on this trace: at best they add 1.0%" in found
    numbers = json.loads(run(*size, "--json")[1])
    assert numbers["engine_hit_rate"] == pytest.approx(8 * 1008 / 12 / 1024)
    assert numbers["capacity_bytes"] == 0


def test_a_terminal_shows_how_far_each_pass_over_a_described_workload_is(folder: Path) -> None:
    workload = "users=20,requests-per-second=2,hours=0.3"
    options = ["--model", "config.json", "--engine-blocks", "0", "--target-hit", "0.5"]
    command = partial(run_command_in_terminal, "replay", workload, *options)
    with Terminal(command, 80, 24) as terminal:
        assert terminal.end() == 0
    said = terminal.said.decode()
    assert "unlimited memory" in said
    assert "curve, pass 1" in said
    assert f"{sum(1 for _ in open_trace(workload)):,} read" in said


@pytest.mark.parametrize("command", ["replay", "plan"])
def test_the_help_names_the_assumed_memory(command: str) -> None:
    assert ASSUMED_KV_CACHE in run(command, "--help")[1]


def test_a_recorded_trace_brings_the_settings_of_its_engine(folder: Path) -> None:
    keys = base64.b64encode(np.arange(1, 17, dtype="<u8").tobytes()).decode()
    header = {
        "kvferry_trace": 1,
        "unit_tokens": 64,
        "chunk_tokens": 64,
        "block_tokens": [32],
        "step_tokens": 256,
    }
    request = {"arrival": 1.0, "end": 2.0, "prompt_tokens": 1024, "output_tokens": 0, "keys": keys}
    request |= {"prompt_key": keys[:12], "session": "", "local_tokens": 0, "loaded": {}}
    request["prompt_key"] = base64.b64encode(b"12345678").decode()
    lines = [
        header | {"num_blocks": 1000, "snapshot_tokens": 64},
        request,
        request | {"arrival": 3.0, "end": 4.0},
    ]
    Path("trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = replay()
    assert (found["chunk_tokens"], found["engine_blocks"]) == (64, 1000)
    assert found["local_tokens"] == 1024 - 32, "the last token is computed, and blocks have 32 tokens"
    assert replay("--engine-blocks", "0")["local_tokens"] == 0
    assert replay("--chunk-tokens", "128")["chunk_tokens"] == 128
    lines[0] |= {"block_tokens": "many"}
    Path("trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, output = run("replay", "trace.jsonl", "--model", "config.json")
    assert code != 0
    assert "the header of the trace is damaged" in output


def test_ctrl_c_prints_what_was_found_so_far(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvferry.tools.replay import engine

    admit = engine.SimulatedEngine.admit

    def interrupted(self, arrived):
        if arrived.request.arrival >= 6:
            raise KeyboardInterrupt
        return admit(self, arrived)

    monkeypatch.setattr(engine.SimulatedEngine, "admit", interrupted)
    code, output = run("replay", "trace.jsonl", "--model", "config.json")
    assert code == 130
    assert output.startswith("Interrupted: these are the numbers of the requests so far.\n6 requests")


def test_size_answers_with_a_number_and_a_range(folder: Path) -> None:
    code, output = run(
        *("replay", "trace.jsonl", "--model", "config.json", "--target-hit", "0.5", "--json"),
        *("--engine-blocks", "0"),
    )
    assert code == 0, output
    found = json.loads(output)
    assert found["too_little_bytes"] < found["capacity_bytes"] <= 1.2 * max(found["too_little_bytes"], 1) or (
        found["too_little_bytes"] == 0
    )
    assert found["unlimited_hit_rate"] == pytest.approx(8 / 12)
    code, output = run("replay", "trace.jsonl", "--model", "config.json", "--target-hit", "0.9")
    assert code == 0
    assert output.startswith("No capacity reaches 90%: with unlimited memory, 66.7%")


def test_size_counts_the_bytes_of_a_token_that_is_loaded_and_not_those_of_answers(folder: Path) -> None:
    workload = "users=20,requests-per-second=2,hours=0.05,turns=4,prompt-tokens=500,output-tokens=1.5k"
    options = ["--prefill-tokens-per-second", "1000", "--engine-blocks", "0", "--target-hit", "0.5"]
    code, output = run("replay", workload, "--model", "config.json", *options, "--json")
    assert code == 0, output
    found = json.loads(output)
    assert found["bytes_per_token"] == pytest.approx(TOKEN_BYTES, rel=0.02)
    assert found["break_even_bytes_per_second"] == pytest.approx(1000 * found["bytes_per_token"])


def test_size_shows_each_combination_of_engine_settings_once(folder: Path) -> None:
    workload = "users=2,requests-per-second=1,hours=0.002,shared-prompt-tokens=0"
    options = ["--retention", "None", "--step-tokens", "2048", "--target-hit", "0.5", "--json"]
    code, output = run("replay", workload, "--model", "Qwen3-Next-80B-A3B", *options)
    assert code == 0, output
    found = [tuple(one.values())[:2] for one in json.loads(output)["engine_settings"]]
    assert found == [(2048, None), (544, None)]


def test_size_takes_a_described_workload(folder: Path) -> None:
    workload = "users=20,requests-per-second=2,hours=0.02,turns=3"
    options = ["--prefill-tokens-per-second", "10000", "--html", "size.html", "--target-hit", "0.4"]
    options += ["--kv-cache-memory", "64KiB", "--tier", "host=1MiB"]
    code, output = run("replay", workload, "--model", "config.json", *options)
    assert code == 0, output
    assert "With 1 MiB of host memory in front of such a disk" in output
    assert "of host memory, or as much disk, reach 40%" in output
    assert "Loading is faster than computing" in output
    assert max(map(len, output.splitlines())) <= 80
    assert "<polyline" in Path("size.html").read_text()


def test_a_replay_takes_a_described_workload_in_place_of_a_trace(folder: Path) -> None:
    workload = "users=1,requests-per-second=1,turns=2,hours=0.01"
    code, output = run("replay", workload, "--model", "config.json", "--curve", "--json")
    assert code == 0, output
    found = json.loads(output)
    assert found["trace"] == "a described workload"
    assert 0 < found["hit_rate"] < 1
    assert found["curve"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("replay", "missing.jsonl", "--model", "config.json"), "missing.jsonl"),
        (("replay", "config.json", "--model", "config.json"), "no trace in a known format"),
        (("replay", "trace.jsonl", "--model", "config.json", "--tier", "disk=1"), "is not a tier"),
        (
            ("replay", "trace.jsonl", "--model", "config.json", "--bandwidth", "tape=3"),
            "--bandwidth 'tape=3'",
        ),
        (
            ("replay", "trace.jsonl", "--model", "config.json", "--requests", "no/file"),
            "cannot write no/file",
        ),
        (("replay", "missing.jsonl", "--model", "config.json", "--html", "no/page"), "cannot write no/page"),
        (
            ("replay", "trace.jsonl", "--model", "config.json", "--target-hit", "50"),
            "--target-hit is 50",
        ),
        (("replay", "turns=2", "--model", "config.json", "--concurrency", "-1"), "--concurrency"),
        (("replay", "users=0", "--model", "config.json"), "users is 0"),
        (("replay", "user=9,turns=2", "--model", "config.json"), "'user=9' is not known; give NAME=VALUE"),
        (("replay", "turns=many", "--model", "config.json"), "turns is 'many'; give a number, such as 5"),
        (
            ("replay", "turns=2", "--model", "config.json", "--disk-writes-per-day", "1"),
            "are about tiers in storage, and there is none",
        ),
        (
            ("replay", "turns=2", "--model", "config.json", *FILE, "--min-uses", "0"),
            "--min-uses is 0; it must be at least 1",
        ),
        (
            ("replay", "turns=2", "--model", "config.json", *FILE, "--write-per-day", "0"),
            "--write-per-day is 0; give a size above 0",
        ),
        (
            ("replay", "turns=2", "--model", "config.json", *FILE, "--endurance", "1PB", *ONE_WRITE),
            "--endurance and --disk-writes-per-day both say",
        ),
        (
            ("replay", "turns=2", "--model", "config.json", *FILE, *ONE_WRITE),
            "--tier file=unlimited has no size; give the tier a size, or --endurance",
        ),
        (
            ("replay", "turns=2", "--model", "config.json", *TARGET, "--min-uses", "2"),
            "--endurance, --min-uses, --min-prompt-tokens, --write-per-day",
        ),
        (("replay", "-", "--model", "config.json", *FILE, "--min-uses", "2"), "needs several passes"),
        (
            ("replay", "turns=2", "--model", "config.json", *TARGET, "--disk-writes-per-day", "0"),
            "--disk-writes-per-day is 0.0",
        ),
        (
            ("replay", "turns=2", "--model", "config.json", *TARGET, "--engines", "2"),
            "--target-hit looks for the size of one engine's tiers; leave out --bandwidth, --requests",
        ),
        (("replay", "-", "--model", "config.json", "--curve"), "--curve needs several passes"),
        (
            ("replay", "turns=2", "--model", "config.json", "--kv-cache-memory", "1KiB"),
            "has no room for a block of 4 KiB",
        ),
        (
            (
                "replay",
                "turns=2",
                "--model",
                "config.json",
                "--kv-cache-memory",
                "1GiB",
                "--engine-blocks",
                "9",
            ),
            "both give the size of the pool",
        ),
        (("replay", "-", "--model", "config.json", *TARGET), "--target-hit needs several passes"),
        (("replay", "trace.jsonl", "--model", "config.json", "--requests", "/dev/full"), "No space left"),
    ],
)
def test_bad_input_gets_one_sentence(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    code, output = run(*arguments)
    assert code != 0
    assert message in output
    assert "Traceback" not in output


TABLE = """arrival,prompt_tokens,output_tokens,session,tenant
0,1024,1,s,acme
{flood}
9,1024,1,s,acme
"""
HINTED = ("replay", "table.csv", "--model", "config.json", "--engine-blocks", "0", "--tier", "host=4MiB")


@pytest.fixture
def table(folder: Path) -> None:
    flood = "\n".join(f"{n / 10},1024,1,f{n},other" for n in range(10, 60))
    Path("table.csv").write_text(TABLE.format(flood=flood))


def test_hints_are_shown_beside_the_same_replay_without(table: None) -> None:
    hint = ("--hint", "retain_seconds=60,priority=1", "--hint-share", "0.25")
    code, output = run(*HINTED, *hint)
    assert code == 0, output
    assert "Hints are worth +1.9 points of the hit rate" in output
    assert "they retain at most 1 MiB" in output.replace("\n", " ")
    assert max(map(len, output.splitlines())) <= 80
    code, output = run(*HINTED, *hint, "--json", "--curve")
    found = json.loads(output)
    assert found["hints"]["hints"] == ["retain_seconds=60,priority=1"]
    assert found["hints"]["hit_rate_without_hints"] == 0
    by_tenant = {
        one["tenant"]: (one["hit_rate"], one["hit_rate_without_hints"]) for one in found["by_tenant"]
    }
    assert by_tenant == {"acme": (0.5, 0), "other": (0, 0)}
    assert all(point["hit_rate_without_hints"] <= point["hit_rate"] for point in found["curve"])


@pytest.mark.parametrize(("begin", "found"), [(3590, 0.5), (3601, 0)])
def test_a_hint_retains_no_longer_than_the_default_of_hint_seconds(
    folder: Path, begin: int, found: float
) -> None:
    flood = "\n".join(f"{begin + n / 10},1024,1,f{n},other" for n in range(50))
    Path("table.csv").write_text(TABLE.format(flood=flood).replace("9,1024,1,s", f"{begin + 9},1024,1,s"))
    hint = ("--hint", "retain_seconds=7200", "--hint-share", "0.25")
    code, output = run(*HINTED, *hint, "--json")
    assert code == 0, output
    assert {one["tenant"]: one["hit_rate"] for one in json.loads(output)["by_tenant"]}["acme"] == found


def test_weights_of_tenants_decide_whose_chunks_are_evicted(table: None) -> None:
    code, output = run(*HINTED, "--json")
    assert code == 0, output
    assert json.loads(output)["hit_rate"] == 0
    code, output = run(*HINTED, "--json", "--tenants", '{"acme": {"weight": 3}}')
    assert code == 0, output
    tenants = {one["tenant"]: one for one in json.loads(output)["by_tenant"]}
    assert tenants["acme"]["hit_rate"] == 0.5
    assert tenants["acme"]["tiers"][0] == {"name": "host", "used_bytes": 1024 * TOKEN_BYTES, "evicted": 0}
    assert tenants["others"]["tiers"][0]["evicted"] > 0
    code, output = run(*HINTED, "--tenants", '{"acme": {"weight": 3}}')
    assert "evicted from" in output
    assert max(map(len, output.splitlines())) <= 80


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            ("--hint", "ends_session"),
            "trace.jsonl has no sessions, and ends_session and prefetch are about sess",
        ),
        (
            ("--hint", "keep=3"),
            "--hint 'keep=3': Object contains unknown field `keep`; write retain_seconds=600",
        ),
        (
            ("--hint-share", "0.1"),
            "--hint-share is about hints, and there is none; add --hint, or leave it out",
        ),
        (
            ("--hint", "store=false", "--hint-share", "0.5"),
            "--hint-share is 0.5; give a share from 0 to 0.25",
        ),
        (("--tenants", "acme"), "--tenants 'acme' is not JSON; write an object such as"),
        (("--tenants", '{"a": {"weights": 1}}'), "weights"),
        (
            ("--tier", "host=1MiB", "--tenants", '{"a": {"limit": 0.01}}'),
            "the limit of a is 0.01 of the host",
        ),
        (("--hint", "store=false", *TARGET), "leave out"),
        (("--tenants", "{}", *TARGET), "leave out"),
    ],
)
def test_wrong_hints_and_tenants_are_refused_in_a_sentence(
    folder: Path, options: tuple[str, ...], problem: str
) -> None:
    code, output = run("replay", "trace.jsonl", "--model", "config.json", *options)
    assert code == 1
    assert problem in " ".join(output.split())
