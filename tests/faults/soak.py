"""The soak: mixed traffic through the router for an hour, every answer checked, and what grows meanwhile.

python -m faults.soak --seconds 3600 --report docs/reliability.md
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from faults.growth import Sample, problems, sample, table
from faults.report import machine, write
from faults.traffic import Ask, answer, conversations, single_asks
from kvferry.serving.devices import this_machine
from kvferry.serving.engine import EngineSpec
from kvferry.serving.launch import Fleet, fleet_specs
from kvferry.serving.ports import free_ports
from kvferry.serving.role import Role
from kvferry.serving.tiny import tiny_checkpoint

ENGINE = (
    "--enforce-eager",
    "--dtype=float32",
    "--max-model-len=1024",
    f"--kv-cache-memory-bytes={64 << 20}",
    "--max-num-seqs=8",
)
QUIET = {"HF_HUB_OFFLINE": "1", "TORCH_COMPILE_DISABLE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
TOGETHER = 6
"""Conversations and requests under way at the same time."""
BETWEEN_IDLE_SECONDS = 45.0
IDLE_SECONDS = 30.0
"""How long engines may take until they hold nothing, once nobody asks."""


@dataclass
class Soak:
    """What is asked, what was answered, and what was seen of the engines.

    Attributes:
        scripts: requests that follow each other, with the single engine's answers.
        answers: right answers by kind.
        wrong: sentences about answers that are not the single engine's.
        failed: sentences about requests without an answer.
        samples: of the engines, in order, while nobody asks.
        busy_when_idle: sentences about engines that held something while nobody asked.
    """

    scripts: list[list[tuple[Ask, list[str]]]]
    answers: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    busy_when_idle: list[str] = field(default_factory=list)


async def reference(url: str, model: str, seed: int) -> Soak:
    """Draw the traffic, and ask a single engine for everything in it."""
    draw = random.Random(seed)
    async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
        scripts = await conversations(client, url, draw, model, 8, 3)
        for number, ask in enumerate(single_asks(draw, model)):
            said = [] if ask.leaves is not None else await answer(client, url, ask, f"alone {number}")
            scripts.append([(ask, said)])
    return Soak(scripts)


async def serve_traffic(soak: Soak, url: str, seconds: float, seed: int) -> None:
    """Ask for scripts drawn at random, several at once, for so long."""
    draw, until = random.Random(seed), time.monotonic() + seconds
    limits = httpx.Limits(max_connections=4 * TOGETHER)
    async with httpx.AsyncClient(timeout=60, trust_env=False, limits=limits) as client:

        async def one_after_the_other() -> None:
            while time.monotonic() < until:
                script, salt = draw.choice(soak.scripts), f"tenant {draw.randrange(12)} {seed}"
                for ask, expected in script:
                    await _check(soak, client, url, ask, expected, salt)

        await asyncio.gather(*(one_after_the_other() for _ in range(TOGETHER)))


async def _check(
    soak: Soak, client: httpx.AsyncClient, url: str, ask: Ask, expected: list[str], salt: str
) -> None:
    try:
        said = await answer(client, url, ask, salt)
    except httpx.HTTPError as error:
        soak.failed.append(f"{ask.kind}: {type(error).__name__}: {error}")
        return
    if said != expected:
        soak.wrong.append(f"{ask.kind}: {said!r}, a single engine says {expected!r}")
    else:
        soak.answers[ask.kind] += 1


async def idle(soak: Soak, fleet: Fleet, logs: Path, began: float) -> None:
    """Wait until no engine holds anything, and take a sample."""
    until = time.monotonic() + IDLE_SECONDS
    async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
        while True:
            held = [found for engine in fleet.engines if (found := await _held(client, engine.spec.url))]
            if not held or time.monotonic() > until:
                break
            await asyncio.sleep(0.5)
    if held:
        soak.busy_when_idle.append("; ".join(held))
    pids = [engine._guard.pid for engine in fleet.engines]
    files = await asyncio.to_thread(lambda: sorted(logs.glob("*.log")))
    soak.samples.append(sample(time.monotonic() - began, pids, files))


async def _held(client: httpx.AsyncClient, url: str) -> str:
    """What an engine holds by its own metrics; empty if nothing."""
    text = (await client.get(f"{url}/metrics")).text
    names = ("vllm:kv_cache_usage_perc", "kvferry_leases", "kvferry_late_blocks", "vllm:num_requests_running")
    found = {
        name: sum(float(n) for n in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))
        for name in names
    }
    return ", ".join(f"{url} {name} {value:g}" for name, value in found.items() if value)


@contextmanager
def single(model: str, arguments: Sequence[str], logs: Path) -> Iterator[str]:
    """One engine without kvferry; its URL."""
    spec = EngineSpec(
        "single", Role.BOTH, model, free_ports(1)[0], arguments=tuple(arguments), environment=QUIET
    )
    with Fleet([spec], logs) as fleet:
        fleet.wait_ready()
        yield spec.url


@contextmanager
def pair(model: str, arguments: Sequence[str], folder: Path) -> Iterator[tuple[Fleet, str]]:
    """A pair with tiers behind the router: the engines, and the router's URL."""
    (folder / "chunks").mkdir(parents=True)
    tiers = [
        {"type": "host", "capacity": "64MiB"},
        {"type": "file", "path": str(folder / "chunks"), "capacity": "256MiB"},
    ]
    settings = {"tiers": tiers, "chunk_tokens": 64, "lease_seconds": 10.0}
    specs = fleet_specs(
        model,
        prefill_settings=settings,
        decode_settings={**settings, "turn_seconds": 5.0},
        arguments=arguments,
        machine=this_machine(),
    )
    specs = tuple(replace(spec, environment={**spec.environment, **QUIET}) for spec in specs)
    with Fleet(specs, folder / "logs") as fleet:
        fleet.wait_ready()
        router = [sys.executable, "-c", "from kvferry.cli.main import main; main()", "router", "--port", "0"]
        router += ["--prefill", fleet.prefill_urls[0], "--decode", fleet.decode_urls[0]]
        process = subprocess.Popen(router, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            yield fleet, process.stdout.readline().split()[-1].removesuffix("/v1")
        finally:
            process.terminate()
            process.wait(30)


async def soaked(soak: Soak, fleet: Fleet, url: str, seconds: float, seed: int, logs: Path) -> None:
    """Traffic and rest by turns."""
    began = time.monotonic()
    for turn in range(1 << 30):
        left = seconds - (time.monotonic() - began)
        if left <= 0:
            return
        await serve_traffic(soak, url, min(left, BETWEEN_IDLE_SECONDS), seed + turn)
        await idle(soak, fleet, logs, began)
        said = f"{soak.answers.total()} answers, {len(soak.wrong)} wrong, {soak.busy_when_idle[-1:]}"
        print(f"{time.monotonic() - began:.0f} s: {said}, {soak.samples[-1]}", flush=True)


def report(soak: Soak, command: str) -> str:
    """The part of docs/reliability.md that `make soak` writes."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(soak.answers.items()))
    return f"""
Repeat it: `{command}`. Machine: {machine()}.
{soak.answers.total()} right answers in {soak.samples[-1].at / 60:.0f} minutes ({kinds}).

| count | must be 0 |
|---|---|
| wrong answers | {len(soak.wrong)} |
| requests without an answer | {len(soak.failed)} |
| times an engine held something while nobody asked | {len(soak.busy_when_idle)} |

Over both engines, idle, after the first third of the time:

{table(soak.samples)}
"""


def main() -> int:
    """Soak from the command line; 1 if anything is not as it must be."""
    parser = argparse.ArgumentParser(prog="python -m faults.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, help="the page whose part is written")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvferry-", dir="/tmp") as runtime:
        os.environ["XDG_RUNTIME_DIR"] = runtime
        folder = Path(runtime) / "soak"
        model = tiny_checkpoint("qwen3", folder / "checkpoints")
        with single(str(model), ENGINE, folder / "single") as url:
            soak = asyncio.run(reference(url, str(model), given.seed))
        with pair(str(model), ENGINE, folder) as (fleet, url):
            asyncio.run(soaked(soak, fleet, url, given.seconds, given.seed, folder / "logs"))
    if given.report is not None:
        write(
            given.report,
            "soak",
            report(soak, f"make soak SECONDS_OF_SOAK={given.seconds:g} SEED={given.seed}"),
        )
    found = [*soak.wrong, *soak.failed, *soak.busy_when_idle, *problems(soak.samples)]
    print(report(soak, "make soak"), *(f"BAD {one}" for one in found[:50]), sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
