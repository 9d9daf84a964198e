"""`kvferry demo` as a person runs it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from support.leftovers import Leftovers
from support.waiting import wait_for

pytestmark = [pytest.mark.engine, pytest.mark.long]

CORES = os.sched_getaffinity(0)
LANES = 2
"""Threads of a worker that read from peers."""
WRITING = "Tiny random checkpoints"
DEMO = (str(Path(sys.executable).with_name("kvferry")), "demo")


class Run:
    """A demo in a process of its own; what it printed is in `output`.

    Checkpoints, and what vLLM remembers of models, are kept in `cache`.
    """

    def __init__(self, folder: Path, cache: Path, *arguments: str) -> None:
        self.left = Leftovers()
        # Short: engines make sockets in it, whose paths may have 107 characters.
        self.temporary = Path(tempfile.mkdtemp(prefix="kvferry-", dir="/tmp"))
        self._printed = folder / "printed"
        environment = {
            **os.environ,
            **self.left.environment,
            "COLUMNS": "80",
            "TMPDIR": str(self.temporary),
            "XDG_CACHE_HOME": str(cache),
            "TORCH_COMPILE_DISABLE": "1",
        }
        with self._printed.open("wb") as out:
            self.process = subprocess.Popen(
                [*DEMO, "--families", "gemma3", *arguments],
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._printed.read_text()

    def until(self, seen: Callable[[], object]) -> None:
        def reached() -> bool:
            found = bool(seen())
            assert found or self.process.poll() is None, self.output
            return found

        wait_for(reached, 240)

    def ends(self, code: int, seconds: float) -> None:
        try:
            ended = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running: {self.left.processes()}\n{self.output}")
        assert ended == code, self.output
        assert self.left.processes() == {}
        # torch keeps its cache there, from the writing of the checkpoint.
        assert [path for path in self.temporary.iterdir() if not path.name.startswith("torchinductor_")] == []


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def start(tmp_path: Path, cache: Path) -> Iterator[Callable[..., Run]]:
    runs = []

    def one(*arguments: str, cache: Path = cache) -> Run:
        runs.append(Run(tmp_path, cache, *arguments))
        return runs[-1]

    yield one
    for run in runs:
        run.process.kill()
        run.process.wait()
        shutil.rmtree(run.temporary)


def test_demo_prints_a_table_of_transfers_and_answers_like_a_single_engine(start) -> None:
    run = start("--prompts", "3", "--answer-tokens", "12")
    run.until(lambda: "Both engines are ready" in run.output)
    ports = {int(port) for port in re.findall(r"--port (\d+)", " ".join(run.left.processes().values()))}
    assert len(ports) == 2
    below = psutil.Process(run.process.pid).children(recursive=True)
    workers = [one.pid for one in below if one.name() == "VLLM::Worker"]
    assert len(workers) == 2
    for worker in workers:
        threads = [os.sched_getaffinity(int(one.name)) for one in Path(f"/proc/{worker}/task").iterdir()]
        assert os.sched_getaffinity(worker) < CORES
        assert threads.count(CORES) > LANES, "kvferry's threads share the cores of the computation"
    run.ends(0, 240)
    table = run.output[run.output.index("What happened") :]
    assert max(map(len, table.splitlines())) <= 80
    rows = re.findall(r"^ *([\d,]+) +\S+ [KM]iB  5 window 64: \d+ KiB  .* yes +\d+$", table, re.MULTILINE)
    assert len(rows) == 3
    story = " ".join(table.split())
    assert re.search(
        r"The prefill engine computed 3 prompts of [\d,]+ tokens in all; the decode engine read", story
    )
    assert "and wrote the same text as one engine alone. If every layer" in story


@pytest.mark.parametrize(
    ("signals", "seen"),
    [
        ((signal.SIGINT,), WRITING),
        ((signal.SIGINT,), "decode-0 starting"),
        ((signal.SIGINT,), "    pair "),
        ((signal.SIGINT, signal.SIGINT), "Both engines are ready"),
        ((signal.SIGTERM,), "prefill-0 ready"),
    ],
    ids=["writing", "starting", "answering", "twice", "terminated"],
)
def test_a_signal_at_any_point_leaves_nothing_behind(start, cache, tmp_path, signals, seen) -> None:
    kept = tmp_path if seen == WRITING else cache
    run = start("--prompts", "60", "--answer-tokens", "200", cache=kept)
    run.until(lambda: seen in run.output)
    mapped = run.left.shared_memory()
    for number in signals:
        run.process.send_signal(number)
        time.sleep(0.3)
    run.ends(130, 30)
    assert run.output.endswith("\nkvferry: stopped; nothing of the demo is left running\n")
    assert "Traceback" not in run.output
    assert not [name for name in mapped if Path("/dev/shm", name).exists()]


def test_a_model_that_does_not_exist_is_one_sentence(tmp_path) -> None:
    process = subprocess.run(
        [*DEMO, str(tmp_path / "none"), "--log-dir", str(tmp_path / "logs")],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert process.returncode == 2
    assert re.fullmatch(r"kvferry: .*/none; give a folder that exists.*\n", process.stderr)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--families", "gpt9"), "no tiny checkpoint is called 'gpt9'"),
        (("model", "--families", "qwen3"), "both MODEL and --families are given"),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments, said) -> None:
    process = subprocess.run([*DEMO, *arguments], capture_output=True, text=True, check=False)
    assert process.returncode == 2
    assert said in process.stderr
    assert "Traceback" not in process.stderr
