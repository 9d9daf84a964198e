"""Entry point of the `kvferry` command. Ctrl-C ends it silently while it loads."""

from __future__ import annotations

import signal


def main() -> None:
    """Load the command and run it."""
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not where it is ignored
    if interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kvferry.cli.main import main as run

    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
