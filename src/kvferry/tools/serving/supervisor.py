"""Watch the engines of a fleet that serves, and start those again that have ended."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvferry.errors import KVFerryError
from kvferry.tools.serving.engine import EngineProcess, EngineState
from kvferry.tools.serving.launch import Fleet, LaunchError, death_notice
from kvferry.tools.serving.restarts import RestartPolicy, Restarts
from kvferry.tools.serving.role import Role
from kvferry.units import format_seconds


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
        """Watch the engines of a fleet, all of which are ready."""
        self._fleet, self._say, self._policy, self._clock = fleet, say, policy, clock
        self._restarts = {engine.spec.name: Restarts(policy) for engine in fleet.engines}

    def check(self) -> None:
        """Look at every engine once. Report engines that have ended or are ready again, and start those due.

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
        restarts.on_started()
        try:
            self._fleet.restart(engine)
        except LaunchError as error:  # a full disk or too many open files; the other engines still serve
            self._on_ended(engine, restarts, str(error), 0.0)

    def _on_ended(self, engine: EngineProcess, restarts: Restarts, notice: str, ran_seconds: float) -> None:
        """Say that an engine has ended, and plan its restart, or give it up.

        Raises:
            FleetLost: no engine that decodes is left.
        """
        earlier = restarts.in_row
        wait = restarts.on_ended(self._clock(), ran_seconds)
        if wait is None:
            after = f" after {earlier} restarts in a row" if earlier else ""
            self._give_up(
                f"{notice}{after}, and has no restarts left; correct the cause that its log names, or raise "
                "--restarts"
            )
            return
        peers = [one for one in self._fleet.engines if one.spec.role is engine.spec.role]
        left = sum(one.state is not EngineState.DEAD for one in peers)
        self._say(
            f"{notice}; restart {restarts.in_row} of {self._policy.limit} in {format_seconds(wait)}; "
            f"{left} of {len(peers)} engines with this role still run"
        )

    def _give_up(self, notice: str) -> None:
        decoding = [one for one in self._fleet.engines if one.spec.role is not Role.PREFILL]
        if all(self._restarts[one.spec.name].given_up for one in decoding):
            raise FleetLost(notice)
        self._say(notice)
