"""The commands of the core on computers without engines, with Windows and with Linux."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from kvferry.tools.cli.main import app
from support.configs import DENSE

# One worker has the two processes.
pytestmark = pytest.mark.xdist_group("light core")

LIGHT_COMPUTER = Path(__file__).parents[1] / "support" / "light_computer.py"
NOBODY = "http://127.0.0.1:9"
"""Address of the discard service, where no engine listens."""
POSIX = "needs a POSIX system, and this is Windows; run it where engines run"


class Done(NamedTuple):
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@contextmanager
def light_computer(system: str, folder: Path) -> Iterator[Run]:
    """Yield a function that runs a command line, in `folder` if it is given no other."""
    with subprocess.Popen(
        [sys.executable, str(LIGHT_COMPUTER), system],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "200"},
    ) as process:

        def run(*arguments: str, folder: Path = folder) -> Done:
            process.stdin.write(json.dumps([arguments, str(folder)]) + "\n")
            process.stdin.flush()
            return Done(*json.loads(process.stdout.readline()))

        yield run


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with light_computer("Windows", tmp_path_factory.mktemp("windows")) as run:
        yield run


@pytest.fixture(scope="module")
def linux(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with light_computer("Linux", tmp_path_factory.mktemp("linux")) as run:
        yield run


def command_names(group: Any = typer.main.get_command(app), prefix: str = "") -> Iterator[str]:  # noqa: B008
    """Yield the names of all commands and of their subcommands."""
    for name, command in sorted(group.commands.items()):
        yield prefix + name
        if hasattr(command, "commands"):
            yield from command_names(command, f"{prefix}{name} ")


@pytest.mark.parametrize("command", list(command_names()))
def test_every_command_prints_its_help(command: str, windows: Run) -> None:
    code, out, err = windows(*command.split(), "--help")
    assert (code, out[:6], err) == (0, "Usage:", "")


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
        ("top --dashboard .", 0, "kvferry-dashboard.json"),
        ("keygen -", 0, "="),
        ("cache ls file:///nowhere", 2, "/nowhere"),
    ],
)
def test_a_command_of_the_core_does_its_work(
    tmp_path: Path, windows: Run, command: str, code: int, expected: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    (tmp_path / "kv.json").write_text("{}")
    done = windows(*command.split(), folder=tmp_path)
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
    linux: Run, tiers: str, code: int, expected: str
) -> None:
    done = linux("config", "--role", "prefill", "--tiers", tiers)
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
    windows: Run, command: str, sentence: str
) -> None:
    done = windows(*command.split())
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"kvferry: {sentence}\n")


@pytest.mark.parametrize("command", ["serve", "demo", "bench tiers", "bench transfer", "doctor --calibrate"])
def test_a_command_of_engines_says_that_it_needs_linux_before_it_asks_for_packages(
    windows: Run, command: str
) -> None:
    done = windows(*command.split(), *(["model"] if command == "serve" else []))
    assert (done.returncode, done.stdout, done.stderr) == (
        2, "", f"kvferry: kvferry {command} needs Linux, and this is Windows; run it where engines run\n"
    )  # fmt: skip


def test_the_router_says_which_extra_it_needs(windows: Run) -> None:
    done = windows("router", "--prefill", NOBODY, "--decode", NOBODY)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "kvferry: kvferry router needs Starlette, which is not installed; install kvferry's extra router as "
        "https://github.com/kvferry/kvferry/blob/main/docs/install.md says\n"
    )
