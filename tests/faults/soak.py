"""The soak: mixed traffic through the router for an hour, every answer checked, and what grows meanwhile.

python -m faults.soak --seconds 3600 --report docs/reliability.md
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import httpx

from faults.growth import sample
from faults.report import page_with, write
from faults.soak_page import report
from faults.soak_pair import Pair, pair, single
from faults.soak_rest import counted, held_at_rest
from faults.soak_values import Answered, Soak, problems
from faults.traffic import Ask, NoAnswer, answer, conversations, is_right, single_asks
from kvferry.tools.serving.processes import StopRequested, StopSignals
from kvferry.tools.serving.tiny import tiny_checkpoint
from support.clients import LIMITS

TOGETHER = 6
"""Conversations and requests under way at the same time."""
BETWEEN_RESTS_SECONDS = 45.0
LEAST_SECONDS = 60.0
"""In less nothing can be said about growth."""
_RESTS = 8
"""Of a short soak."""
_TENANTS = 12
_T = TypeVar("_T")


async def reference(url: str, model: str, seed: int) -> Soak:
    """Draw the traffic, and ask a single engine for everything in it."""
    draw = random.Random(seed)
    async with httpx.AsyncClient(timeout=120, trust_env=False, limits=LIMITS) as client:
        scripts = await conversations(client, url, draw, model, 8, 3)
        for number, ask in enumerate(single_asks(draw, model)):
            said = await answer(client, url, replace(ask, leaves=None), f"alone {number}")
            scripts.append([(ask, said)])
    return Soak(scripts)


class Traffic:
    """Requests drawn from a seed, of tenants that come again and of guests that never do."""

    def __init__(self, soak: Soak, url: str, seed: int) -> None:
        self._soak, self._url = soak, url
        self._draw, self._guests = random.Random(seed), itertools.count()
        self._began = time.monotonic()

    async def serve(self, seconds: float) -> None:
        """Ask for scripts drawn at random, several at once, for so long; none is left unfinished."""
        until = time.monotonic() + seconds
        limits = httpx.Limits(max_connections=4 * TOGETHER, keepalive_expiry=LIMITS.keepalive_expiry)
        async with httpx.AsyncClient(timeout=60, trust_env=False, limits=limits) as client:

            async def one_after_the_other() -> None:
                while True:
                    script, salt = self._draw.choice(self._soak.scripts), self._salt()
                    for ask, expected in script:
                        await self._check(client, ask, expected, salt)
                    if time.monotonic() >= until:
                        return

            await asyncio.gather(*(one_after_the_other() for _ in range(TOGETHER)))

    def _salt(self) -> str:
        again = self._draw.random() < 0.5
        return f"tenant {self._draw.randrange(_TENANTS)}" if again else f"guest {next(self._guests)}"

    async def _check(self, client: httpx.AsyncClient, ask: Ask, expected: list[str], salt: str) -> None:
        soak, asked = self._soak, time.monotonic()
        try:
            said = await answer(client, self._url, ask, salt)
        except (httpx.HTTPError, NoAnswer) as error:
            soak.failed.append(f"{ask.kind}: {type(error).__name__}: {error}")
            return
        now = time.monotonic()
        if not is_right(ask, said, expected):
            soak.wrong.append(f"{ask.kind}, {salt}: {said!r}, a single engine says {expected!r}")
        elif ask.leaves is not None:
            soak.left += 1
        else:
            soak.answers.append(Answered(ask.kind, now - self._began, now - asked))


async def soaked(soak: Soak, served: Pair, model: str, seconds: float, seed: int) -> None:
    """Traffic and rest by turns, until the time is over or a process has ended."""
    began, traffic = time.monotonic(), Traffic(soak, served.url, seed)
    between = min(BETWEEN_RESTS_SECONDS, seconds / _RESTS)
    while (left := seconds - (time.monotonic() - began)) > 0:
        await traffic.serve(min(left, between))
        try:
            held = await held_at_rest(served.fleet.engines, model)
            soak.tokens, soak.loads = await counted(served.fleet.engines)
        except httpx.HTTPError as error:
            held = [f"an engine at rest does not answer: {type(error).__name__}: {error}"]
        soak.held_at_rest += held
        if dead := served.deaths():
            soak.deaths += dead
            return
        at = time.monotonic() - began
        soak.samples.append(await asyncio.to_thread(sample, at, served.pids, served.logs.glob("*.log")))
        counts = f"{len(soak.answers)} answers, {len(soak.wrong)} wrong, {len(soak.failed)} failed"
        print(f"{at:.0f} s: {counts}, {held or 'nothing held'}, {soak.samples[-1]}", flush=True)


async def interruptible(work: Awaitable[_T]) -> _T:
    """Await work in which a signal may raise KeyboardInterrupt, which asyncio prints for every task."""

    def report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), KeyboardInterrupt):
            loop.default_exception_handler(context)

    asyncio.get_running_loop().set_exception_handler(report)
    return await work


def run(seconds: float, seed: int) -> Soak:
    """Start the engines, soak, and end them."""
    with tempfile.TemporaryDirectory(prefix="kvferry-", dir="/tmp") as runtime:
        os.environ["XDG_RUNTIME_DIR"] = runtime
        folder = Path(runtime) / "soak"
        model = str(tiny_checkpoint("qwen3", folder / "checkpoints"))
        with single(model, folder / "single") as url:
            soak = asyncio.run(interruptible(reference(url, model, seed)))
        with pair(model, folder) as served:
            asyncio.run(interruptible(soaked(soak, served, model, seconds, seed)))
    return soak


def _seconds(text: str) -> float:
    """Read how long to soak; an upper end keeps out what is no length of time."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not LEAST_SECONDS <= seconds <= 1e7:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time to soak for; give {LEAST_SECONDS:g} seconds or more "
            "(make soak SECONDS_OF_SOAK=3600)"
        )
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak from the command line; 1 if anything is not as it must be."""
    parser = argparse.ArgumentParser(prog="python -m faults.soak", description=__doc__)
    parser.add_argument("--seconds", type=_seconds, default=3600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=page_with("soak"), help="the page whose part is written")
    given = parser.parse_args(arguments)
    signals = StopSignals()
    try:
        with signals, signals.interruptible():
            soak = run(given.seconds, given.seed)
    except (KeyboardInterrupt, StopRequested):
        print("the soak was stopped: all processes have ended, and no figures were written", file=sys.stderr)
        return signals.exit_code or 1
    said = report(soak, f"make soak SECONDS_OF_SOAK={given.seconds:g} SEED={given.seed}")
    if given.report is not None:
        write(given.report, "soak", said)
    found = problems(soak)
    print(said, *(f"BAD {one}" for one in found[:50]), sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
