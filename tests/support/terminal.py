"""A program in a terminal: a real pseudo-terminal, and an emulator that knows what is on its screen."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import termios
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import pyte

from support.waiting import wait_for


class Terminal:
    """What a person sees, and can type.

    Attributes:
        screen: of the emulator.
        said: every byte that the program has written.
    """

    def __init__(self, command: Sequence[str], columns: int = 80, rows: int = 24, **environment: str) -> None:
        self.screen = pyte.Screen(columns, rows)
        self.said = b""
        self._stream = pyte.ByteStream(self.screen)
        self._master, self._slave = os.openpty()
        self._shape(columns, rows)
        self.before = termios.tcgetattr(self._slave)
        env = {
            name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES", "NO_COLOR"}
        }
        self.process = subprocess.Popen(
            command,
            stdin=self._slave, stdout=self._slave, stderr=self._slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509  # one system call
            env=env | {"TERM": "xterm-256color"} | environment,
        )  # fmt: skip

    @property
    def lines(self) -> list[str]:
        """What is on the screen."""
        self._listen(0.0)
        return [line.rstrip() for line in self.screen.display]

    @property
    def text(self) -> str:
        """The same."""
        return "\n".join(self.lines)

    @property
    def modes(self) -> list[Any]:
        """How the terminal treats what is typed."""
        return termios.tcgetattr(self._slave)

    def press(self, keys: str) -> None:
        """Type."""
        os.write(self._master, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        """As a window is."""
        self._shape(columns, rows)
        self.screen.resize(rows, columns)

    def until(self, condition: Callable[[str], bool], seconds: float = 60.0) -> str:
        """Wait until the text on the screen meets a condition, and return it."""
        text = ""

        def is_shown() -> bool:
            nonlocal text
            self._listen(0.02)  # reading the emulator's screen is dear
            text = self.text
            shown = condition(text)
            assert shown or self.process.poll() is None, f"ended with {self.process.returncode}"
            return shown

        try:
            wait_for(is_shown, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}:\n{text}") from None
        return text

    def end(self, seconds: float = 30.0) -> int:
        """Wait until the program has ended, and return its exit code."""

        def has_ended() -> bool:
            self._listen(0.0)  # a program whose output nobody reads does not end
            return self.process.poll() is not None

        wait_for(has_ended, seconds)
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
