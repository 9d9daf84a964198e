"""Commands in the documentation are run here, or say why not. All commands of kvferry parse."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from support.command_line import parse_command_line

ROOT = Path(__file__).parents[2]
PAGES = [
    path for folder in ("*.md", "docs/**/*.md", "examples/**/*.md") for path in sorted(ROOT.glob(folder))
]

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "head_dim": 128,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}
"""The ``config.json`` of the model in the folder ``model``."""

BLOCK = re.compile(
    r"(?P<before>[^\n]*)\n+(?:```(?:bash|sh|)\n(?P<fenced>.*?)^```|(?P<indented>(?: {4}[^\n]*\n)+))",
    re.MULTILINE | re.DOTALL,
)
COMMAND = re.compile(
    r"(?:[A-Z_]+=\S+ +)*(?:[A-Z_]+=|(?:\.venv/bin/)?"
    r"(?:kvferry|vllm|make|python3?|pip|nft|scp|kubectl|docker|curl|sudo|git|export|ulimit|echo|mkdir) )"
)
RUN = "<!-- run -->"
REASON = re.compile(r"<!-- not run: \S.*-->")
PAGE_REASON = re.compile(r"^<!-- no command of this page is run: \S.*-->$", re.MULTILINE)
NO_COMMANDS = ("<!-- output -->", "<!-- synopsis -->")
FERRY = re.compile(r"(?:^|\$\(|/)kvferry ((?:'[^']*'|\"[^\"]*\"|[^)|;#>\n\"'])*)", re.MULTILINE)


@dataclass(frozen=True)
class ShellBlock:
    """A block of commands on a page.

    Attributes:
        page: the page, relative to the repository.
        line: line at which the block starts.
        mark: the line above the block.
        commands: content, each command on one line.
    """

    page: str
    line: int
    mark: str
    commands: str


def shell_blocks(page: Path) -> Iterator[ShellBlock]:
    """Yield the blocks of a page that begin with a command."""
    text = page.read_text()
    for found in BLOCK.finditer(text):
        content = found["fenced"]
        if content is None:
            content = re.sub(r"^ {4}", "", found["indented"], flags=re.MULTILINE)
        if COMMAND.match(content) and found["before"] not in NO_COMMANDS:
            line = text[: found.start()].count("\n") + 2
            name = page.relative_to(ROOT).as_posix()
            yield ShellBlock(name, line, found["before"], re.sub(r"\\\n\s*", "", content))


BLOCKS = [block for page in PAGES for block in shell_blocks(page)]
NAMES = {f"{block.page}:{block.line}": block for block in BLOCKS}


def test_commands_are_found_on_many_pages():
    assert len({block.page for block in BLOCKS}) > 15


def test_what_is_pasted_from_a_page_has_no_prompt():
    """The site's button copies a whole block."""
    prompts = [
        f"{page.relative_to(ROOT)}: {line.strip()}"
        for page in PAGES
        for line in page.read_text().splitlines()
        if re.match(r" *\$ ", line)
    ]
    assert not prompts, "write commands into a block of sh without prompts, and their output into one of text"


def test_every_block_of_commands_is_run_or_says_why_not():
    excused = {path.relative_to(ROOT).as_posix() for path in PAGES if PAGE_REASON.search(path.read_text())}
    unmarked = [
        name
        for name, block in NAMES.items()
        if block.mark != RUN and not REASON.fullmatch(block.mark) and block.page not in excused
    ]
    assert not unmarked, f"write {RUN} or <!-- not run: REASON --> above these blocks"


@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS}))
def test_kvferry_accepts_every_command_on_the_page(page):
    wrong: dict[str, object] = {}
    for name, block in NAMES.items():
        for found in FERRY.finditer(block.commands) if block.page == page else ():
            try:
                parse_command_line(shlex.split(found[1]))
            except typer.Exit:
                pass  # --version, --help
            except Exception as error:  # noqa: BLE001 - all that a command line may be refused with
                wrong[f"{name}: {found[0].strip()}"] = getattr(error, "message", error)
    assert not wrong, "correct these commands of the page"


def test_every_target_of_make_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    missing = {
        f"{name}: make {target}"
        for name, block in NAMES.items()
        for each in re.findall(r"^make ([a-z][a-z -]*)", block.commands, re.MULTILINE)
        for target in each.split()
        if target not in targets
    }
    assert not missing, "correct these pages, or add the targets to Makefile"


def test_every_benchmark_exists():
    missing = {
        f"{name}: {benchmark}"
        for name, block in NAMES.items()
        for benchmark in re.findall(r"python -m benchmarks (\w+)", block.commands)
        if not (ROOT / "benchmarks" / benchmark).exists()
    }
    assert not missing, "correct these pages: there is no such folder in benchmarks"


def blocks_to_run() -> Iterator[Any]:
    """Yield the names of the blocks to run. A block of commands that blocks before it have run is long."""
    tried: set[str] = set()
    for name, block in NAMES.items():
        if block.mark == RUN:
            commands = {found[1].partition(" ")[0] for found in FERRY.finditer(block.commands)}
            yield pytest.param(name, marks=[pytest.mark.long] if commands <= tried else [])
            tried |= commands


@pytest.mark.slow
@pytest.mark.parametrize("name", list(blocks_to_run()))
def test_the_commands_run(name, tmp_path):
    """Each in a folder of its own, with a model's ``config.json``."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "deploy" / "kubernetes" / "components" / "prometheus").mkdir(parents=True)
    home = tmp_path / "home"
    home.mkdir()
    script = tmp_path / "kvferry"
    script.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c "from kvferry.tools.cli.entry import main; main()" "$@"\n'
    )
    script.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), sysconfig.get_path("scripts"), os.environ["PATH"]])
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("XDG_", "KVFERRY_"))},
        "PATH": path,
        "HOME": str(home),
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", NAMES[name].commands],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
