"""A vLLM server as a process group: ask it, pause and resume it, and wait until it is idle."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.handover.client import Answer, get, post_all
from benchmarks.handover.engine import STEP_TOKENS, Setup
from kvferry.common.errors import TransferError
from kvferry.tools.serving.engine import EngineProcess, EngineSpec, EngineState, last_lines
from kvferry.tools.serving.launch import death_notice
from kvferry.tools.serving.role import Role
from kvferry.tools.serving.router.bodies import COMPLETIONS
from kvferry.tools.serving.specs import flag

_PATIENCE_SECONDS = 300.0
_SETTLE_SECONDS = 5e-3
_LOG_LINES = 5
_RESET, _METRICS = "/reset_prefix_cache", "/metrics"
_SOURCES, _LOADED = "vllm:prompt_tokens_by_source", "external_kv_transfer"
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # leaves a core to the threads that move KV
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # adds the path that clears the prefix cache
    "HF_HUB_OFFLINE": "1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
}


def server_spec(setup: Setup, role: Role, port: int, environment: dict[str, str]) -> EngineSpec:
    """Return the specification of a server.

    Args:
        setup: configuration of the engine.
        role: PREFILL or DECODE.
        port: TCP port of the endpoint.
        environment: further environment variables.
    """
    options = {
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": setup.longest,
        "kv_cache_memory_bytes": setup.cache_bytes,
        "max_num_seqs": setup.requests,
        "max_num_batched_tokens": STEP_TOKENS,
        **setup.engine,
    }
    return EngineSpec(
        name=f"{setup.connector}-{role}",
        role=role,
        model=str(setup.model),
        port=port,
        kv_transfer=setup.transfer(),
        arguments=tuple(flag(name, value) for name, value in options.items()),
        environment={**_ENVIRONMENT, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(setup.port), **environment},
    )


class Server:
    """A running server."""

    def __init__(self, process: EngineProcess) -> None:
        """Store the process of the server, which is ready."""
        self._process = process

    def complete(self, bodies: Sequence[bytes]) -> list[Answer]:
        """Send completion requests at once, and return the answer to each.

        Args:
            bodies: JSON body of each request.

        Raises:
            TransferError: the server failed to answer.
        """
        return self._post(COMPLETIONS, bodies)

    def settle(self) -> None:
        """Wait until no block is held, and clear the prefix cache.

        Raises:
            TransferError: the server failed to answer, or blocks are still held after several minutes.
        """
        until = time.monotonic() + _PATIENCE_SECONDS
        while not self._post(_RESET, [b""])[0].parsed()["success"]:
            if time.monotonic() > until:
                raise TransferError(f"{self._process.spec.name} kept blocks for minutes after the hand-over")
            time.sleep(_SETTLE_SECONDS)

    def loaded_tokens(self) -> int:
        """Return the number of prompt tokens whose KV was loaded since the server's start.

        Raises:
            TransferError: the server failed to answer.
        """
        try:
            text = get(self._process.spec.port, _METRICS, _PATIENCE_SECONDS)
        except TransferError as error:
            raise self._explained(error) from error
        return sum(
            int(sample.value)
            for family in text_string_to_metric_families(text)
            if family.name == _SOURCES
            for sample in family.samples
            if sample.name == f"{_SOURCES}_total" and sample.labels["source"] == _LOADED
        )

    def stand_still(self) -> None:
        """Pause all processes of the server until `go_on`, so that they take no processor time.

        The server's guard goes on, so that it can end the server if this process is killed.
        """
        self._signal(os.killpg, signal.SIGSTOP)
        self._signal(os.kill, signal.SIGCONT)

    def go_on(self) -> None:
        """Resume the paused processes of the server."""
        self._signal(os.killpg, signal.SIGCONT)

    def _signal(self, send: Callable[[int, int], None], number: signal.Signals) -> None:
        # Once the server is known to be dead, another process may have its id.
        if self._process.state is not EngineState.DEAD:
            with suppress(ProcessLookupError):
                send(self._process.pid, number)

    def _post(self, path: str, bodies: Sequence[bytes]) -> list[Answer]:
        try:
            return post_all(self._process.spec.port, path, bodies, _PATIENCE_SECONDS)
        except TransferError as error:
            raise self._explained(error) from error

    def _explained(self, error: TransferError) -> TransferError:
        """Return an error with the name of the server, and its last words if it has ended."""
        if self._process.poll() is EngineState.DEAD:
            return TransferError(f"{death_notice(self._process)}\n{log_end(self._process.log_path)}")
        return TransferError(f"{self._process.spec.name}: {error} (log: {self._process.log_path})")


def log_end(path: Path) -> str:
    """Return the last lines of a server's log as an indented text."""
    return "\n".join(f"  {line}" for line in last_lines(path, _LOG_LINES))
