"""Run several engines with a router in front of them, until a signal stops them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from kvferry.errors import KVFerryError
from kvferry.serving.engine import EngineProcess, EngineSpec, EngineState
from kvferry.serving.launch import Fleet, death_notice
from kvferry.serving.ports import url_of
from kvferry.serving.progress import startup_progress
from kvferry.serving.role import Role
from kvferry.serving.router.app import router_app
from kvferry.serving.router.settings import RouterSettings
from kvferry.serving.run import run_app
from kvferry.serving.signals import StopRequested, StopSignals


class FleetLost(KVFerryError):
    """Raised if all decode engines have ended."""


def serve_fleet(
    specs: Sequence[EngineSpec],
    sock: socket.socket,
    log_dir: Path,
    console: Console,
    signals: StopSignals,
    *,
    announce: Callable[[str], None],
    startup_timeout_seconds: float,
) -> None:
    """Start engines, and route requests to them until a signal arrives. Then stop the engines.

    Args:
        specs: specifications of the engines.
        sock: listening socket of the router.
        log_dir: folder for the engines' logs.
        console: console for the progress of starting engines, and for messages about engines that have ended.
        signals: handler of stop signals. The first signal stops the engines, and a second one kills them.
        announce: function that is called with one line about the router's endpoint when the endpoint can
            serve requests.
        startup_timeout_seconds: longest time from the start of an engine until it is ready, in seconds.

    Raises:
        LaunchError: an engine did not start.
        FleetLost: every decode engine ended.
        KeyboardInterrupt: a second signal was received.
    """
    with Fleet(specs, log_dir, startup_timeout_seconds=startup_timeout_seconds) as fleet:
        try:
            _wait_ready(fleet, console, signals)
            settings = RouterSettings(prefill=tuple(fleet.prefill_urls), decode=tuple(fleet.decode_urls))
            announce(f"kvferry: serving on {url_of(sock)}/v1")
            run_app(router_app(settings), sock, _KeepServing(fleet, console, signals))
        except StopRequested:
            pass
        except KeyboardInterrupt:
            fleet.kill()
            raise
        _say(console, "kvferry: stopping the engines; interrupt again to kill them")


def _wait_ready(fleet: Fleet, console: Console, signals: StopSignals) -> None:
    with startup_progress(console) as show:

        def on_progress(engines: Sequence[EngineProcess]) -> None:
            signals.check()
            show(engines)

        fleet.wait_ready(on_progress)


class _KeepServing:
    """Function object that returns whether to continue serving, and reports engines that have ended."""

    def __init__(self, fleet: Fleet, console: Console, signals: StopSignals) -> None:
        self._fleet = fleet
        self._console = console
        self._signals = signals
        self._dead: set[str] = set()

    def __call__(self) -> bool:
        """Return False if a signal was received, otherwise True.

        Print one line about each engine that has ended since the last call.

        Raises:
            FleetLost: no decode engine is left.
        """
        if self._signals.received is not None:
            return False
        for engine in self._fleet.engines:
            if engine.poll() is EngineState.DEAD and engine.spec.name not in self._dead:
                self._dead.add(engine.spec.name)
                self._announce(engine)
        return True

    def _announce(self, engine: EngineProcess) -> None:
        """Print that an engine has ended, and how many engines of its role still run.

        Raises:
            FleetLost: no decode engine is left.
        """
        peers = [one for one in self._fleet.engines if one.spec.role is engine.spec.role]
        left = sum(one.state is not EngineState.DEAD for one in peers)
        notice = death_notice(engine)
        if engine.spec.role is Role.DECODE and not left:
            raise FleetLost(f"no decode engine is left: {notice}")
        then = f"{left} of {len(peers)} {engine.spec.role} engines still run"
        if not left:
            then = "decode engines now compute prompts themselves"
        _say(self._console, f"kvferry: {notice}; {then}")


def _say(console: Console, text: str) -> None:
    with suppress(OSError):  # a message that cannot be printed must not stop the server
        console.print(text, markup=False, highlight=False, soft_wrap=True)
