"""The hit-rate curve of `kvferry plan --trace`, beside that of `kvferry replay --curve`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvferry.tools.cli.main import app
from kvferry.tools.cli.traces import described
from kvferry.tools.models import read_model
from kvferry.tools.plan.find import find_config
from kvferry.tools.plan.kept import KeptSettings
from kvferry.tools.plan.side import EngineSide
from kvferry.tools.replay.settings import NO_PREFIX_CACHE, served_model
from kvferry.tools.replay.simulation import Simulation
from support.configs import DENSE

PLAN = ("plan", "config.json", "--trace", "trace.jsonl")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(DENSE))
    lines = [
        {"timestamp": 1000 * n, "input_length": 1024, "output_length": 5, "hash_ids": [n % 40, 1000 + n]}
        for n in range(200)
    ]
    Path("trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def run(*arguments: str) -> tuple[int, str, str]:
    trace = Path("trace.jsonl").read_text() if "-" in arguments else None
    done = CliRunner().invoke(app, arguments, input=trace, env={"COLUMNS": "80"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        return 1, done.stdout, f"{type(done.exception).__name__}: {done.exception}"
    return done.exit_code, done.stdout, done.stderr


def printed(*arguments: str) -> dict[str, object]:
    code, out, err = run(*arguments, "--json")
    assert code == 0, err
    return json.loads(out)


@pytest.mark.parametrize("settings", [(), ("--chunk-tokens", "128", "--dtype", "fp8"), ("--tp", "2")])
def test_the_curve_equals_that_of_a_replay_with_the_same_settings(settings: tuple[str, ...]) -> None:
    settings = (*settings, "--kv-cache-memory", "64KiB")
    replayed = printed("replay", "trace.jsonl", "--model", "config.json", "--curve", *settings)
    found = printed(*PLAN, *settings)["curve"]
    assert found == replayed["curve"]
    assert found[-1]["hit_rate"] == pytest.approx(160 / 200 / 2)
    assert found[0]["hit_rate"] < 0.1


def test_the_page_has_the_curve_and_says_what_it_shows() -> None:
    code, out, err = run(*PLAN, "--html", "page.html")
    assert (code, err) == (0, "")
    assert "The picture is in page.html." in out
    page = Path("page.html").read_text()
    assert "Hit rate by capacity of host memory" in page
    assert "<polyline" in page
    assert "200 requests of trace.jsonl." in page
    assert "stores chunks of 256 tokens" in page
    assert "blocks (40 GiB of KV cache per rank, assumed)" in page
    assert "Without host memory, the hit rate is 40.0%" in page
    assert "retention" not in page
    run("plan", "config.json", "--html", "page.html")
    assert "<polyline" not in Path("page.html").read_text()


def test_settings_of_windows_and_snapshots_are_named_for_models_that_have_some() -> None:
    name, config = find_config("Qwen3-Next-80B-A3B")
    reading = read_model(config, name=name)
    side, settings = EngineSide(layout="BLHNC"), KeptSettings(2048, None, snapshot_tokens=544)
    assert described(served_model(reading, side, settings), NO_PREFIX_CACHE).endswith(
        "kept at least 544 tokens apart, with a retention of None and 2,048 tokens per step."
    )


def test_units_of_another_size_change_the_curve() -> None:
    assert printed(*PLAN, "--unit-tokens", "768")["curve"] != printed(*PLAN)["curve"]


def test_ctrl_c_leaves_the_curve_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self, requests):
        raise KeyboardInterrupt

    monkeypatch.setattr(Simulation, "run", interrupted)
    code, out, err = run(*PLAN, "--json", "--html", "page.html")
    assert (code, err) == (130, "kvferry: interrupted; the hit-rate curve is left out\n")
    assert json.loads(out)["curve"] == []
    assert "<polyline" not in Path("page.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (PLAN, "--trace adds a curve to a page or to JSON; add --html FILE or --json"),
        (("plan", "config.json", "--trace", "config.json", "--json"), "no trace in a known format"),
        (("plan", "config.json", "--trace", "missing.jsonl", "--json"), "missing.jsonl"),
        (("plan", "config.json", "--trace", "-", "--json"), "--trace needs several passes"),
        (("plan", "config.json", "--unit-tokens", "16"), "--unit-tokens is for the curve of a trace"),
        (("plan", "config.json", "--kv-cache-memory", "1GiB"), "add --trace FILE"),
        ((*PLAN, "--json", "--unit-tokens", "0"), "--unit-tokens is 0"),
    ],
)
def test_bad_input_gets_one_sentence(arguments: tuple[str, ...], message: str) -> None:
    code, _, err = run(*arguments)
    assert code != 0
    assert message in err
    assert "\n" not in err


def test_a_plan_without_a_trace_imports_no_simulation() -> None:
    code = (
        "import sys; from kvferry.tools.cli.main import app;"
        "app(['plan', 'config.json', '--json'], standalone_mode=False);"
        "heavy = ('kvferry.tools.replay', 'torch', 'vllm');"
        "print(*(m for m in sys.modules if m.startswith(heavy)), file=sys.stderr)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stderr.split() == []
