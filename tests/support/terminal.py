"""A program in a terminal: a real pseudo-terminal, and an emulator that keeps its screen."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import termios
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import pyte

from support.waiting import wait_for


class ForkedProcess:
    """A fork of this process that runs a function, as `subprocess.Popen` runs a command."""

    def __init__(self, function: Callable[[], object], terminal: int, environment: dict[str, str]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            os.setsid()
            fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
            for number in range(3):
                os.dup2(terminal, number)
            # A child that listens where its parent does would keep the parent's ports in use.
            os.closerange(3, 4096)
            # pytest has put its own objects there.
            sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w", buffering=1)
            sys.stderr = os.fdopen(2, "w", buffering=1)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.environ.clear()
            os.environ.update(environment)
            function()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:  # noqa: BLE001 - shown as an interpreter shows it
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    def poll(self) -> int | None:
        """Return the exit code, or minus the number of the signal; None while the process runs."""
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if found else None
        return self.returncode

    def wait(self) -> int:
        """Wait for the end, and return the exit code."""
        return wait_for(lambda: None if self.poll() is None else [self.poll()])[0]

    def send_signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process at once."""
        self.send_signal(signal.SIGKILL)


class Terminal:
    """A terminal for one program, which it starts.

    Attributes:
        screen: screen of the emulator.
        said: every byte that the program has written.
        before: modes of the terminal before the program started.
    """

    def __init__(
        self,
        program: Sequence[str] | Callable[[], object],
        columns: int = 80,
        rows: int = 24,
        **environment: str,
    ) -> None:
        """Start the program.

        Args:
            program: command, or a function to call in a fork of this process.
            columns, rows: size of the terminal.
            environment: environment variables, added to those of this process.
        """
        self.screen = pyte.Screen(columns, rows)
        self.said = b""
        self._stream = pyte.ByteStream(self.screen)
        self._master, self._slave = os.openpty()
        self._shape(columns, rows)
        self.before = termios.tcgetattr(self._slave)
        env = {
            name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES", "NO_COLOR"}
        }
        env |= {"TERM": "xterm-256color"} | environment
        self.process: Any
        if callable(program):
            self.process = ForkedProcess(program, self._slave, env)
            return
        self.process = subprocess.Popen(
            program,
            stdin=self._slave, stdout=self._slave, stderr=self._slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509  # one system call
            env=env,
        )  # fmt: skip

    @property
    def lines(self) -> list[str]:
        """Lines of the screen."""
        self._listen(0.0)
        return [line.rstrip() for line in self.screen.display]

    @property
    def text(self) -> str:
        """Lines of the screen, joined."""
        return "\n".join(self.lines)

    @property
    def modes(self) -> list[Any]:
        """Modes of the terminal, as of `termios.tcgetattr`."""
        return termios.tcgetattr(self._slave)

    def press(self, keys: str) -> None:
        """Type."""
        os.write(self._master, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        """Change the size of the terminal."""
        self._shape(columns, rows)
        self.screen.resize(rows, columns)

    def until(self, condition: Callable[[str], bool], seconds: float = 60.0) -> str:
        """Wait until the text of the screen fulfils a condition, and return it."""

        def found() -> str | None:
            self._listen(0.02)  # reading the emulator's screen is dear
            if condition(text := self.text):
                return text
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{text}"
            return None

        try:
            return wait_for(found, seconds)
        except AssertionError as error:
            error.add_note(f"On the screen:\n{self.text}")
            raise

    def end(self, seconds: float = 60.0) -> int:
        """Wait for the program's end, and return its exit code."""

        def ended() -> bool:
            self._listen(0.0)  # or the program waits for room to write
            return self.process.poll() is not None

        wait_for(ended, seconds)
        self._listen(0.0)
        return self.process.returncode

    def _shape(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _listen(self, seconds: float) -> None:
        while select.select([self._master], [], [], seconds)[0]:
            said = os.read(self._master, 1 << 16)
            self.said += said
            self._stream.feed(said)
            seconds = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self._slave)
