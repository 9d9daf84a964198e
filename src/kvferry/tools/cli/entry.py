"""The entry point of the `kvferry` command. Ctrl-C ends the command silently while modules are loaded."""

from __future__ import annotations

import signal


def main() -> None:
    """Load the command-line application and run it."""
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # False if it is ignored
    # Python would print where the import was interrupted.
    if interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kvferry.tools.cli.main import main as run

    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
