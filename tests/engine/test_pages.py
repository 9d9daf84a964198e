"""The commands that pages give for a machine without GPUs, run as printed, up to the engines' answers."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from kvferry.tools.serving.tiny import tiny_checkpoint
from support.leftovers import Leftovers
from support.waiting import wait_for

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
MARK = "tests/engine/test_pages.py runs it -->"
SECONDS = 300
"""Longest wait for engines that start beside each other."""


def commands_of(page: str) -> list[list[str]]:
    """Return the commands of the blocks of a page that are marked for this module, one list per block."""
    blocks = re.findall(
        rf"{re.escape(MARK)}\n```\w*\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL
    )
    joined = [re.sub(r"\\\n\s*", "", block) for block in blocks]
    return [[line for line in block.splitlines() if "activate" not in line] for block in joined]


class Shell:
    """Terminals in the checkout. Servers run until `stop`; all processes are ended by `close`."""

    def __init__(self, folder: Path, model: str) -> None:
        self.left = Leftovers()
        self._folder, self._model, self._id = folder, model, ""
        self._variables: list[str] = []
        self.servers: list[subprocess.Popen[bytes]] = []
        (folder / "bin").mkdir()
        script = folder / "bin" / "kvferry"
        script.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvferry "$@"\n')
        script.chmod(0o755)
        runtime = folder / "runtime"
        runtime.mkdir(0o700)
        path = [str(folder / "bin"), sysconfig.get_path("scripts"), os.environ["PATH"]]
        self._environment = {
            **os.environ,
            **self.left.environment,
            "PATH": os.pathsep.join(path),
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "HOME": str(folder),
            "XDG_CACHE_HOME": str(folder / ".cache"),
            "XDG_RUNTIME_DIR": str(runtime),
            "TORCH_COMPILE_DISABLE": "1",
        }

    def _text(self, command: str) -> str:
        """Return a command after the assignments before it, with the page's placeholders filled in."""
        written = command.replace("REQUEST-ID", self._id)
        written = re.sub(r"(?<![$\w])MODEL(?![=\w])", self._model, written)
        return "\n".join([*self._variables, written])

    def assign(self, command: str) -> bool:
        """Keep an assignment for the commands after it; return False for any other command."""
        found = re.match(r"([A-Z]+)=\S", command)
        if found:
            value = self.run(f'{command}; printf %s "${found[1]}"')
            self._variables = [f"{found[1]}={shlex.quote(value)}"]
        return found is not None

    def serve(self, command: str) -> None:
        with (self._folder / f"server-{len(self.servers)}").open("wb") as log:
            self.servers.append(
                subprocess.Popen(
                    ["bash", "-euo", "pipefail", "-c", self._text(command)],
                    cwd=ROOT,
                    env=self._environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def run(self, command: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self._text(command)],
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}\n{self.logs()}"
        return done.stdout

    def ask(self, command: str) -> str:
        """Run a request of the page, and return the engine's answer."""
        answer = json.loads(self.run(command))
        self._id = answer["id"]
        (choice,) = answer["choices"]
        return str(choice["text"])

    def wait_ready(self, port: int) -> None:
        def answers() -> bool:
            assert all(server.poll() is None for server in self.servers), self.logs()
            with suppress(httpx.HTTPError):
                return httpx.get(f"http://127.0.0.1:{port}/v1/models", trust_env=False).is_success
            return False

        wait_for(answers, SECONDS)

    def logs(self) -> str:
        return "\n".join(path.read_text()[-4000:] for path in sorted(self._folder.glob("server-*")))

    def stop(self) -> None:
        """End the servers as Ctrl-C in their terminals does."""
        for server in self.servers:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGINT)
        for server in self.servers:
            server.wait(60)
        wait_for(lambda: self.left.processes() == {}, 60)
        self.servers.clear()

    def close(self) -> None:
        for server in self.servers:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()
        for process in self.left.processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


@pytest.fixture
def shell(running, checkpoints: Path, tmp_path: Path) -> Iterator[Shell]:
    running.close()
    shell = Shell(tmp_path, str(tiny_checkpoint("gemma3", checkpoints)))
    yield shell
    shell.close()


def is_server(command: str) -> bool:
    return bool(re.search(r"kvferry (serve|router)|api_server", command))


def start(shell: Shell, block: list[str]) -> None:
    """Run a block that starts servers."""
    for command in block:
        if not shell.assign(command):
            assert is_server(command), command
            shell.serve(command)


def loaded(text: str, source: str) -> bool:
    return re.search(rf"Loading tokens 0 to [\d,]+:.* from {source}", " ".join(text.split())) is not None


def test_the_laptop_page(shell: Shell) -> None:
    first, second = commands_of("docs/start/laptop.md")
    start(shell, first)
    shell.wait_ready(8000)
    said: dict[str, str] = {}
    for command in second:
        if not shell.assign(command):
            kind: Callable[[str], str] = shell.ask if command.startswith("curl") else shell.run
            said[command] = kind(command)
    curl, _, explain = said
    assert said[curl]
    assert loaded(said[explain], "peer"), said[explain]
    shell.stop()


def test_two_engines_on_a_cpu(shell: Shell) -> None:
    (block,) = commands_of("docs/serving.md")
    start(shell, block)
    for port in (8100, 8200, 8000):
        shell.wait_ready(port)
    _, (curl,), (explain, *_) = commands_of("docs/tiers.md")
    assert shell.ask(curl)
    said = shell.run(explain)
    assert loaded(said, "peer"), said
    shell.stop()


def test_the_tiers_page(shell: Shell, tmp_path: Path) -> None:
    block, (curl,), (explain, listed) = commands_of("docs/tiers.md")
    answers = []
    for _ in range(2):
        start(shell, block)
        shell.wait_ready(8000)
        answers.append(shell.ask(curl))
        wait_for(lambda: [*(tmp_path / ".cache" / "kvferry" / "chunks").rglob("*.kv")])
        said = shell.run(explain)
        shell.stop()
    assert answers[0] == answers[1]
    assert loaded(said, "file"), said
    assert shell.run(listed)
