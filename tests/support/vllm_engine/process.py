"""A real vLLM engine in a process of its own, driven by calls.

The engine lives in that process itself (no further processes for one rank), so that a test can look at,
and spoil, its cache. `Engine.call(name, ...)` runs the function of that name in `inside`, with the engine.
Its process is a copy of one that has imported what engines import, which takes longer than all the rest of a
start: see `imported`.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

from support import namespaces
from support.vllm_engine import backends, copied, imported, runners

ENVIRONMENT = {
    **runners.environment(),
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "UCX_LOG_LEVEL": "error",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # One small function behind logprobs would be compiled anew in every process.
    "TORCH_COMPILE_DISABLE": "1",
}


class EngineError(RuntimeError):
    """What went wrong inside the engine's process."""


def begin(
    pipe: Any, log: str, environment: dict[str, str], settings: dict[str, Any], host: str | None
) -> tuple[Any, Any]:
    """Start an engine in this process; return the module `inside` and the engine."""
    os.setsid()
    if host is not None:
        namespaces.enter(host)
    os.environ.clear()
    os.environ.update(environment)
    copied.settle()
    out = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if settings.pop("without_avx512", False):
        import torch

        torch.cpu._is_avx512_supported = lambda: False
    try:
        from support.vllm_engine import inside, no_amx, no_torchvision  # noqa: F401 - the import counts

        copied.inspect_models_here()
        runners.declare()
        backends.declare()
        engine = inside.start(settings)
        pipe.send(("ready", inside.about(engine)))
    except BaseException as error:  # noqa: BLE001 - told to the test
        traceback.print_exc()
        pipe.send(("error", f"{type(error).__name__}: {error}"))
        os._exit(1)
    return inside, engine


def serve(
    pipe: Any, log: str, environment: dict[str, str], settings: dict[str, Any], host: str | None = None
) -> None:
    """Start an engine, and do with it what comes through the pipe."""
    inside, engine = begin(pipe, log, environment, settings, host)
    while (message := pipe.recv()) is not None:
        name, args, kwargs = message
        try:
            pipe.send(("value", getattr(inside, name)(engine, *args, **kwargs)))
        except BaseException as error:  # noqa: BLE001 - told to the test
            traceback.print_exc()
            pipe.send(("error", f"{type(error).__name__}: {error}"))
    with mock.patch("gc.collect"):  # nobody is left to use what it would free
        inside.stop(engine)
    os._exit(0)


class Engine:
    """One engine process; `main` is what runs in it."""

    main = staticmethod(serve)

    def __init__(
        self,
        log: Path,
        environment: dict[str, str] | None = None,
        host: str | None = None,
        *,
        fresh: bool = False,
        **settings: Any,
    ) -> None:
        """Start it; `ready` waits for it.

        Args:
            log: file for what it prints.
            environment: on top of `ENVIRONMENT`.
            host: network namespace that it lives in, if not this process's.
            fresh: in a new interpreter, with its own seed of hashes.
            settings: of `vllm.LLM`.
        """
        self.log, self._parted = log, False
        context = mp.get_context("spawn") if fresh else imported.context(ENVIRONMENT)
        self._pipe, theirs = context.Pipe()
        told = {**os.environ, **ENVIRONMENT, **(environment or {})}
        self._process = context.Process(target=self.main, args=(theirs, str(log), told, settings, host))
        # A new interpreter reads PYTHONPATH as it starts.
        with mock.patch.dict(os.environ, ENVIRONMENT if fresh else {}):
            self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def ready(self, timeout: float = 280.0) -> dict[str, Any]:
        """Wait until the engine is up; what it says of itself."""
        return self._answer(timeout)

    def call(self, name: str, *args: Any, timeout: float = 180.0, **kwargs: Any) -> Any:
        """Run a function of `inside` with the engine."""
        self.begin(name, *args, **kwargs)
        return self._answer(timeout)

    def begin(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Like `call`, without waiting."""
        self._pipe.send((name, args, kwargs))

    def end(self, timeout: float = 180.0) -> Any:
        """The answer to what `begin` began."""
        return self._answer(timeout)

    def part(self) -> None:
        """Let the engine stop by itself, unless it is gone; `close` waits for it."""
        if not self._parted:
            self._parted = True
            with suppress(OSError):
                self._pipe.send(None)

    def close(self) -> None:
        """Stop the engine and its process group."""
        self.part()
        self._process.join(15)
        if self._process.is_alive():
            self.kill()
        self._process.join(5)

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            self._process.kill()
        self._process.join(5)

    def signal(self, number: int) -> None:
        """Send a signal; returns from SIGSTOP when every thread has stopped, which each does by itself."""
        os.kill(self.pid, number)
        until = time.monotonic() + 30.0
        while number == signal.SIGSTOP and not stopped(self.pid):
            assert time.monotonic() < until, "it does not stop"
            time.sleep(0.001)

    def _answer(self, timeout: float) -> Any:
        try:
            if not self._pipe.poll(timeout):
                raise EngineError(f"no answer within {timeout} s; see {self.log}")
            kind, value = self._pipe.recv()
        except EOFError:
            raise EngineError(f"the engine's process ended; see {self.log}:\n{_tail(self.log)}") from None
        if kind == "error":
            raise EngineError(f"{value}\nsee {self.log}")
        return value


def _tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def stopped(pid: int) -> bool:
    """Every thread of a process is stopped."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)
