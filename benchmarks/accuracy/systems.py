"""A system that answers questions: a prefill and a decode engine behind a router, or one engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console

from kvferry.common.errors import KVFerryError
from kvferry.tools.serving.demo.client import routed
from kvferry.tools.serving.engine import EngineProcess, EngineSpec, EngineState
from kvferry.tools.serving.launch import Fleet, LaunchError, death_notice, startup_progress
from kvferry.tools.serving.processes import StopSignals


@dataclass(frozen=True, slots=True)
class System:
    """A running system.

    Attributes:
        url: base URL of the endpoint that answers questions.
        engine_url: base URL of the engine that writes the answers.
        model: name of the served model.
        check: function that raises LaunchError if an engine has ended, and StopRequested after a signal.
    """

    url: str
    engine_url: str
    model: str
    check: Callable[[], None]


@contextmanager
def running(
    specs: Sequence[EngineSpec],
    folder: Path,
    console: Console,
    signals: StopSignals,
    startup_timeout_seconds: float,
) -> Iterator[System]:
    """Start a prefill and a decode engine with a router, or one engine; stop all at the end.

    Args:
        specs: specifications of the prefill engine and the decode engine, or of one engine.
        folder: folder for the engines' logs.
        console: console for the progress of starting engines.
        signals: handler of stop signals.
        startup_timeout_seconds: longest time from the start of an engine until it is ready, in seconds.

    Yields:
        The running system.

    Raises:
        LaunchError: an engine did not start.
        StopRequested: a signal was received.
    """
    with Fleet(specs, folder, startup_timeout_seconds=startup_timeout_seconds) as fleet:
        with startup_progress(console) as show:

            def on_progress(engines: Sequence[EngineProcess]) -> None:
                signals.check()
                show(engines)

            fleet.wait_ready(on_progress)

        def check() -> None:
            signals.check()
            for engine in fleet.engines:
                if engine.poll() is EngineState.DEAD:
                    raise LaunchError(death_notice(engine))

        last = specs[-1].url
        if len(specs) == 1:
            yield System(last, last, _served_model(last), check)
            return
        with routed(fleet.prefill_urls, fleet.decode_urls) as url:
            yield System(url, last, _served_model(url), check)


def _served_model(url: str) -> str:
    try:
        # trust_env: ignore a proxy set in the environment, because the engines are on this machine.
        answer = httpx.get(f"{url}/v1/models", trust_env=False, timeout=30).raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, LookupError, ValueError) as error:
        raise KVFerryError(f"{url}/v1/models gives no model: {error}") from error
