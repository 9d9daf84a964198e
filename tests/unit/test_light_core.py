"""The commands of the core on computers without engines, with Windows and with Linux."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.configs import DENSE

LIGHT_COMPUTER = Path(__file__).parents[1] / "support" / "light_computer.py"
CORE = ("plan", "replay", "size", "config", "doctor", "top", "explain", "cache", "dashboard", "keygen")
OTHERS = ("serve", "router", "demo", "bench", "bench tiers")
NOBODY = "http://127.0.0.1:9"
"""Address of the discard service, where no engine listens."""
POSIX = "needs a POSIX system, and this is Windows; run it where engines run"


def run(
    *arguments: str, folder: Path | None = None, system: str = "Windows"
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(LIGHT_COMPUTER), system, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "200"},
    )


@pytest.mark.slow
def test_every_command_prints_its_help() -> None:
    commands = [*CORE, *OTHERS]
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda each: run(*each.split(), "--help"), commands))
    helped = {
        each: (one.returncode, one.stdout[:6], one.stderr) for each, one in zip(commands, done, strict=True)
    }
    assert helped == dict.fromkeys(commands, (0, "Usage:", ""))


@pytest.mark.parametrize(
    ("command", "code", "expected"),
    [
        ("plan config.json --json", 0, '"tiers"'),
        ("plan --list", 0, "Llama-3.1-8B"),
        ("config --role prefill --tiers default", 0, '"kv_role":"kv_producer"'),
        ("doctor", 0, "Windows runs no engines"),
        (f"doctor {NOBODY}", 1, "Windows runs no engines"),
        (f"doctor --no-machine {NOBODY}", 1, "refused"),
        ("doctor --config kv.json", 0, "configuration kv.json"),
        (f"top {NOBODY} --once", 1, "no answer"),
        ("dashboard", 0, "kvferry-dashboard.json"),
        ("keygen -", 0, "="),
        ("cache ls file:///nowhere", 2, "/nowhere"),
    ],
)
def test_a_command_does_its_work(tmp_path: Path, command: str, code: int, expected: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    (tmp_path / "kv.json").write_text("{}")
    done = run(*command.split(), folder=tmp_path)
    assert expected in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == code


@pytest.mark.parametrize(
    ("tiers", "code", "expected"),
    [
        ("default", 0, '"tiers":"default"'),
        ('[{"type":"host","capacity":"1MiB"}]', 0, '"capacity":"1MiB"'),
        ('[{"type":"host","capacity":"900TiB"}]', 2, "lower its capacity"),
        ('[{"type":"file","path":"/nope"}]', 2, "/nope does not exist"),
    ],
)
def test_the_memory_and_directories_of_tiers_are_checked_on_linux(
    tiers: str, code: int, expected: str
) -> None:
    done = run("config", "--role", "prefill", "--tiers", tiers, system="Linux")
    assert expected in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == code


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("keygen key", f"closing key to other users {POSIX}"),
        ("explain", f"asking an engine for the trace of a request {POSIX}"),
        ("cache ls .", f"a cache directory {POSIX}"),
    ],
)
def test_a_command_says_in_a_sentence_what_the_system_lacks(
    tmp_path: Path, command: str, sentence: str
) -> None:
    done = run(*command.split(), folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"kvferry: {sentence}\n")


@pytest.mark.parametrize("command", ["serve", "demo", "bench tiers", "bench transfer", "bench calibrate"])
def test_a_command_of_engines_says_that_it_needs_linux_before_it_asks_for_packages(command: str) -> None:
    done = run(*command.split(), *(["model"] if command == "serve" else []))
    assert (done.returncode, done.stdout, done.stderr) == (
        2, "", f"kvferry: kvferry {command} needs Linux, and this is Windows; run it where engines run\n"
    )  # fmt: skip


def test_the_router_says_which_extra_it_needs() -> None:
    done = run("router", "--prefill", NOBODY, "--decode", NOBODY)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "kvferry: kvferry router needs Starlette, which is not installed; install kvferry's extra router as "
        "https://github.com/kvferry/kvferry/blob/main/docs/install.md says\n"
    )
