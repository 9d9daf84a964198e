"""Run several engines with a router in front of them, until a signal stops them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from kvferry.tools.serving.engine import EngineSpec
from kvferry.tools.serving.launch import Fleet
from kvferry.tools.serving.ports import url_of
from kvferry.tools.serving.progress import show_notice, startup_progress, wait_ready
from kvferry.tools.serving.restarts import RestartPolicy
from kvferry.tools.serving.router.app import RouterApp
from kvferry.tools.serving.router.settings import RouterSettings
from kvferry.tools.serving.run import run_app
from kvferry.tools.serving.signals import StopRequested, StopSignals
from kvferry.tools.serving.supervisor import Supervisor


def serve_fleet(
    specs: Sequence[EngineSpec],
    sock: socket.socket,
    log_dir: Path,
    console: Console,
    signals: StopSignals,
    *,
    announce: Callable[[str], None],
    startup_timeout_seconds: float,
    restart_policy: RestartPolicy = RestartPolicy(),  # noqa: B008 - frozen
) -> None:
    """Start engines, and route requests to them until a signal arrives. Then stop the engines.

    An engine that ends while the router serves is started again.

    Args:
        sock: listening socket of the router.
        signals: the first signal stops the engines, and a second one kills them.
        announce: function that is called with one line when the endpoint can serve requests.
        startup_timeout_seconds: longest time from the start of an engine until it is ready.

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
