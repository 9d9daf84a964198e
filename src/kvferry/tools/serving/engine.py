"""One engine of a fleet: its specification, its process and its log."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from kvferry.common.files import open_private
from kvferry.tools.serving.guard import KILL, STOP
from kvferry.tools.serving.kv_config import kv_transfer_json
from kvferry.tools.serving.role import Role

_HEALTH_TIMEOUT_SECONDS = 2.0
# More than the guard takes after its own patience: it polls, and kills trackers last.
_GUARD_MARGIN_SECONDS = 8.0

# A log may have gigabytes, and the cause of an end stands near its end.
_TAIL_BYTES = 256 << 10
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
# Prefix of a log line: "(EngineCore pid=7) ERROR 09-30 12:00:00 [core.py:7] ". Each part is optional.
_PREFIX = re.compile(r"^(?:\([^)]*pid=\d+\) ?)?(?:[A-Z]+ \d\d-\d\d [\d:]+ \[[^\]]*\] ?)?")
_EXCEPTION = re.compile(r"^(?:\w+\.)*(\w*(?:Error|Exception|Incompatible|Exit)): *(.*)$")
_FATAL = re.compile(r"^Fatal Python error: (.*)$")  # of faulthandler, which names the signal
# How vLLM reports that one of its processes has ended.
_PROCESS_CODE = re.compile(r"(?:Failed core proc\(s\): \{.*?: |\(exit code: |died with exit code )(-?\d+)")
_USAGE_ERROR = re.compile(r"^\S+: error: (.*)$")
# Messages of a process about the failure of another process. The log has the cause further above.
_ECHOES = (
    "See root cause above",
    "initialization failed",
    "Failed core proc",
    "EngineDeadError",
    "cancelled",
)
_MAX_CHARS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """The specification of an engine to start.

    Attributes:
        name: unique in its fleet, for example ``prefill-0``. The log file has this name.
        kv_transfer: value of ``--kv-transfer-config``; None for an engine without KV transfer.
        environment: environment variables of the engine, in addition to those of this process.
    """

    name: str
    role: Role
    model: str
    port: int
    host: str = "127.0.0.1"
    tensor_parallel: int = 1
    kv_transfer: Mapping[str, Any] | None = None
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def command(self) -> list[str]:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", self.model, "--host", self.host, "--port", str(self.port)]
        command += ["--tensor-parallel-size", str(self.tensor_parallel)]
        if self.kv_transfer is not None:
            command += ["--kv-transfer-config", kv_transfer_json(self.kv_transfer)]
        return [*command, *self.arguments]


class EngineState(StrEnum):
    """State of an engine: STARTING → READY → DEAD, or STARTING → DEAD if the start fails."""

    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"


class EngineProcess:
    """A started engine and its guard, the process that starts the engine and ensures that it is stopped.

    The guard stops the engine when `begin_stop` or `kill` write to a pipe, and when the pipe closes because
    this process has ended for any reason.

    Attributes:
        log_path: path of the file with the engine's standard output and error; overwritten at the start.
        state: state of the engine when `poll` or `finish_stop` was last called; STARTING before that.
    """

    def __init__(
        self,
        spec: EngineSpec,
        log_path: Path,
        stop_timeout_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the guard. Raise OSError if the log file or the process cannot be created."""
        self.spec = spec
        self.log_path = log_path
        self.state = EngineState.STARTING
        self._stop_timeout_seconds = stop_timeout_seconds
        self._clock, self._started = clock, clock()
        read_end, self._lifeline = os.pipe()
        guard = [
            sys.executable,
            "-m",
            "kvferry.tools.serving.guard",
            str(read_end),
            str(stop_timeout_seconds),
        ]
        try:
            with open(log_path, "wb", opener=open_private) as log:
                self._guard = subprocess.Popen(
                    [*guard, *spec.command()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **spec.environment},
                    pass_fds=(read_end,),
                    # A Ctrl-C in the terminal must reach the launcher only, which stops the engines in order.
                    start_new_session=True,
                )
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(read_end)

    @property
    def seconds(self) -> float:
        return self._clock() - self._started

    @property
    def exit_code(self) -> int | None:
        """Exit code of the engine's main process; -n if signal n ended it, None while it runs."""
        code = self._guard.poll()
        return code if code is None or code < 128 else 128 - code

    @property
    def pid(self) -> int:
        """Process id of the guard, also of the engine's process group."""
        return self._guard.pid

    def poll(self) -> EngineState:
        """Check the engine, update the attribute `state`, and return it.

        The state becomes READY when ``/health`` first answers with status 200, and DEAD when the engine has
        ended. If the guard was killed, the engine's other processes are killed too.
        """
        if self._guard.poll() is not None:
            self._kill_if_unguarded()
            self.state = EngineState.DEAD
        elif self.state is EngineState.STARTING and self.healthy():
            self.state = EngineState.READY
        return self.state

    def healthy(self) -> bool:
        connection = http.client.HTTPConnection(
            self.spec.host, self.spec.port, timeout=_HEALTH_TIMEOUT_SECONDS
        )
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        # Nothing listens yet, or the server is too busy loading to answer.
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def begin_stop(self) -> None:
        """Ask the engine to end, and return at once. The guard kills it after the stop timeout."""
        self._tell_guard(STOP)

    def kill(self) -> None:
        self._tell_guard(KILL)

    def _tell_guard(self, request: bytes) -> None:
        if self._lifeline >= 0:
            # The pipe is broken if the guard has ended.
            with contextlib.suppress(BrokenPipeError):
                os.write(self._lifeline, request)

    def _kill_if_unguarded(self) -> None:
        # A signal ended the guard, which then left processes behind.
        if self._guard.returncode < 0 and self.state is not EngineState.DEAD:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._guard.pid, signal.SIGKILL)

    def finish_stop(self) -> None:
        """Wait until all processes of the engine have ended. Call `begin_stop` or `kill` first."""
        try:
            self._guard.wait(self._stop_timeout_seconds + _GUARD_MARGIN_SECONDS)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        self._kill_if_unguarded()
        self.state = EngineState.DEAD
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


def error_line(log_path: Path) -> str | None:
    """Return the text of the last error in an engine's log; None if the log has no error."""
    lines = [_PREFIX.sub("", _ANSI.sub("", line)).rstrip() for line in _tail(log_path)]
    echo = None
    for index in range(len(lines) - 1, -1, -1):
        error = _error_at(lines, index)
        if error and not any(mark in error for mark in _ECHOES):
            return error[:_MAX_CHARS]
        echo = echo or error
    return echo[:_MAX_CHARS] if echo else None


def process_code(log_path: Path) -> int | None:
    """Return the exit code of the vLLM process that failed first, as another one reports it, if any does."""
    codes = (found for line in _tail(log_path) for found in _PROCESS_CODE.findall(line))
    return next((int(code) for code in codes if code != "0"), None)


def last_line(log_path: Path) -> str:
    """Return the last line of an engine's log that has text, without its prefix; empty if there is none."""
    return next(iter(last_lines(log_path, 1)), "")


def last_lines(log_path: Path, count: int) -> list[str]:
    """Return the last lines of an engine's log that have text, without their prefixes, the oldest first."""
    lines = (_PREFIX.sub("", _ANSI.sub("", line)).strip() for line in _tail(log_path))
    return [line for line in lines if line][-count:]


def _error_at(lines: list[str], index: int) -> str | None:
    if usage := _USAGE_ERROR.match(lines[index]):
        return usage[1]
    if fatal := _FATAL.match(lines[index]):
        return fatal[1]
    if not (match := _EXCEPTION.match(lines[index])):
        return None
    name, text = match[1], match[2]
    # pydantic prints the number of errors on this line, and the first error one or two lines below.
    if "validation error" in text:
        below = [line.strip() for line in lines[index + 1 : index + 3]]
        text = next((line for line in below if line.startswith(("Value error", "Assertion"))), text)
        text = text.split(" [type=")[0]
    return f"{name}: {text}" if text else None


def _tail(log_path: Path) -> list[str]:
    try:
        with log_path.open("rb") as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - _TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()
    except OSError:
        return []
