"""Run several engines with a router in front of them, until a signal stops them."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from kvferry.common.errors import KVFerryError
from kvferry.common.units import format_seconds
from kvferry.tools.serving.devices import url_of
from kvferry.tools.serving.engine import EngineProcess, EngineSpec, EngineState
from kvferry.tools.serving.launch import (
    Fleet,
    LaunchError,
    death_notice,
    show_notice,
    startup_progress,
    wait_ready,
)
from kvferry.tools.serving.processes import StopRequested, StopSignals
from kvferry.tools.serving.role import Role
from kvferry.tools.serving.router.app import RouterApp
from kvferry.tools.serving.router.settings import RouterSettings
from kvferry.tools.serving.run import run_app


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Limits of an engine's restarts.

    The wait doubles with each restart in a row. An engine that ran for `stable_seconds` begins a new row.

    >>> [RestartPolicy().wait_seconds(restart) for restart in (1, 2, 3, 8)]
    [1.0, 2.0, 4.0, 60.0]

    Attributes:
        limit: largest number of restarts in a row of one engine; 0 to restart none.
    """

    limit: int = 5
    first_seconds: float = 1.0
    longest_seconds: float = 60.0
    stable_seconds: float = 600.0

    def wait_seconds(self, restart: int) -> float:
        """Return the wait before a restart in seconds, by its number in its row, from 1."""
        # A power of 2 beyond 1023 overflows.
        return min(self.first_seconds * 2.0 ** min(restart - 1, 32), self.longest_seconds)


class Restarts:
    """The restarts of one engine.

    Attributes:
        in_row: number of restarts since the engine last ran for the policy's `stable_seconds`.
        due: monotonic seconds of the next start; None if the engine runs, or is not started again.
        starting: True from a restart until the engine is ready.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self.in_row = 0
        self.due: float | None = None
        self.starting = False
        self.given_up = False

    def on_ended(self, now: float, ran_seconds: float) -> float | None:
        """Plan the next start of an engine that has ended, and return the wait before it in seconds.

        Return None if the engine has used up its restarts.

        Args:
            now: monotonic seconds.
            ran_seconds: time from the engine's start to its end; 0 if it was never ready.
        """
        if ran_seconds >= self._policy.stable_seconds:
            self.in_row = 0
        self.starting = False
        if self.in_row >= self._policy.limit:
            self.given_up = True
            return None
        self.in_row += 1
        wait = self._policy.wait_seconds(self.in_row)
        self.due = now + wait
        return wait


class FleetLost(KVFerryError):
    """Raised if no engine that decodes is left: all have ended, and have no restarts left."""


class Supervisor:
    """Restarts engines that have ended, with a growing wait, and says so in one line each.

    An engine: RUNNING → ENDED, waiting for its restart → STARTING → RUNNING, or ENDED → GIVEN UP if it has no
    restarts left. An engine that is not ready in time after a restart is killed, and counts as ended.
    """

    def __init__(
        self,
        fleet: Fleet,
        say: Callable[[str], None],
        policy: RestartPolicy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet, self._say, self._policy, self._clock = fleet, say, policy, clock
        self._restarts = {engine.spec.name: Restarts(policy) for engine in fleet.engines}

    def check(self) -> None:
        """Report engines that ended or are ready again, and start those due.

        Raises:
            FleetLost: no engine that decodes is left.
        """
        for engine in self._fleet.engines:
            restarts = self._restarts[engine.spec.name]
            if restarts.given_up:
                continue
            if restarts.due is not None:
                if self._clock() >= restarts.due:
                    self._restart(engine, restarts)
                continue
            state = engine.poll()
            if state is EngineState.DEAD:
                # A start that never became ready must not begin a new row, however long it took.
                ran_seconds = 0.0 if restarts.starting else engine.seconds
                self._on_ended(engine, restarts, death_notice(engine), ran_seconds)
            elif state is EngineState.READY and restarts.starting:
                restarts.starting = False
                self._say(f"{engine.spec.name} is ready again after {format_seconds(engine.seconds)}")
            elif self._fleet.is_late(engine):
                engine.kill()

    def _restart(self, engine: EngineProcess, restarts: Restarts) -> None:
        restarts.due, restarts.starting = None, True
        try:
            self._fleet.restart(engine)
        except LaunchError as error:  # a full disk or too many open files; the other engines still serve
            self._on_ended(engine, restarts, str(error), 0.0)

    def _on_ended(self, engine: EngineProcess, restarts: Restarts, notice: str, ran_seconds: float) -> None:
        """Plan the restart of an engine that has ended, or give it up. Raise FleetLost if none is left."""
        earlier = restarts.in_row
        wait = restarts.on_ended(self._clock(), ran_seconds)
        if wait is None:
            after = f" after {earlier} restarts in a row" if earlier else ""
            text = (
                f"{notice}{after}, and has no restarts left; correct the cause that its log names, or raise "
                "--restarts"
            )
            decoding = [one for one in self._fleet.engines if one.spec.role is not Role.PREFILL]
            if all(self._restarts[one.spec.name].given_up for one in decoding):
                raise FleetLost(text)
            self._say(text)
            return
        peers = [one for one in self._fleet.engines if one.spec.role is engine.spec.role]
        left = sum(one.state is not EngineState.DEAD for one in peers)
        self._say(
            f"{notice}; restart {restarts.in_row} of {self._policy.limit} in {format_seconds(wait)}; "
            f"{left} of {len(peers)} engines with this role still run"
        )


def serve_fleet(
    specs: Sequence[EngineSpec],
    sock: socket.socket,
    log_dir: Path,
    console: Console,
    signals: StopSignals,
    *,
    announce: Callable[[str], None],
    startup_timeout_seconds: float,
    restart_policy: RestartPolicy = RestartPolicy(),
) -> None:
    """Start engines, and route requests to them until a signal arrives. Then stop the engines.

    An engine that ends while the router serves is started again.

    Args:
        signals: the first signal stops the engines, and a second one kills them.
        announce: function that is called with one line when the endpoint can serve requests.

    Raises:
        LaunchError: an engine did not start.
        FleetLost: no engine that decodes is left: all have ended, and have no restarts left.
        KeyboardInterrupt: a second signal was received.
    """
    with Fleet(specs, log_dir, startup_timeout_seconds=startup_timeout_seconds) as fleet:
        try:
            with startup_progress(console) as show:
                wait_ready(fleet, show, signals)
            settings = RouterSettings(prefill=tuple(fleet.prefill_urls), decode=tuple(fleet.decode_urls))
            announce(f"kvferry: serving on {url_of(sock)}/v1")
            supervisor = Supervisor(
                fleet, lambda text: show_notice(console, f"kvferry: {text}"), restart_policy
            )

            def keep_on() -> bool:
                supervisor.check()
                return signals.received is None

            run_app(RouterApp(settings), sock, keep_on, is_urgent=lambda: signals.repeated)
        except StopRequested:
            pass
        except KeyboardInterrupt:
            fleet.kill()
            raise
        show_notice(console, "kvferry: stopping the engines; interrupt again to kill them")
