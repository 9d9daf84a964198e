"""A running vLLM server: ask it, and wait until it is idle."""

from __future__ import annotations

import time
from collections.abc import Sequence
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

PATIENCE_SECONDS = 300.0
_SETTLE_SECONDS = 5e-3
_LOG_LINES = 5
_RESET, _METRICS = "/reset_prefix_cache", "/metrics"
_SOURCES, _LOADED = "vllm:prompt_tokens_by_source", "external_kv_transfer"
_ENVIRONMENT = {
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
        role: role of the engine.
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
        tensor_parallel=setup.ranks,
        kv_transfer=setup.transfer(),
        arguments=tuple(flag(name, value) for name, value in options.items()),
        environment={
            **_ENVIRONMENT,
            "OMP_NUM_THREADS": str(setup.threads),
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(setup.port),
            **environment,
        },
    )


class Server:
    """A running server."""

    def __init__(self, process: EngineProcess) -> None:
        """Store the process of the server, which is ready."""
        self._process = process

    @property
    def port(self) -> int:
        """TCP port of the endpoint."""
        return self._process.spec.port

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
        until = time.monotonic() + PATIENCE_SECONDS
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
            text = get(self.port, _METRICS, PATIENCE_SECONDS)
        except TransferError as error:
            raise self._explained(error) from error
        return sum(
            int(sample.value)
            for family in text_string_to_metric_families(text)
            if family.name == _SOURCES
            for sample in family.samples
            if sample.name == f"{_SOURCES}_total" and sample.labels["source"] == _LOADED
        )

    def _post(self, path: str, bodies: Sequence[bytes]) -> list[Answer]:
        try:
            return post_all(self.port, path, bodies, PATIENCE_SECONDS)
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
