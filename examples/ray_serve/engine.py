"""A replica of Ray Serve that runs one vLLM engine with kvferry's connector."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from kvferry.tools.serving.devices import free_ports
from kvferry.tools.serving.engine import EngineProcess, EngineSpec, EngineState
from kvferry.tools.serving.kv_config import kv_transfer_config
from kvferry.tools.serving.launch import death_notice
from kvferry.tools.serving.role import Role

STOP_SECONDS = 10.0
POLL_SECONDS = 0.2


class EngineReplica:
    """One engine. Ray Serve starts a new replica, with a new engine, if this one ends or is not healthy.

    The replica's process ends with its engine, so that Ray Serve sends no further request here. If the
    process ends in any other way, the guard of the engine ends the engine.
    """

    def __init__(
        self,
        role: str,
        model: str,
        arguments: tuple[str, ...] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the engine, and return when it can serve requests.

        Args:
            role: ``prefill`` or ``decode``.
            model: path or id that vLLM can load.
            arguments: further arguments of vLLM's API server.
            settings: connector settings; between machines ``{"host": "node", "secret_file": ...}``.

        Raises:
            RuntimeError: the engine ended while it started.
        """
        (port,) = free_ports(1)
        spec = EngineSpec(
            name=role,
            role=Role(role),
            model=model,
            port=port,
            kv_transfer=kv_transfer_config(Role(role), settings),
            arguments=arguments,
        )
        log = Path(tempfile.mkdtemp(prefix=f"kvferry-ray-{role}-")) / f"{role}.log"
        self._engine = EngineProcess(spec, log, STOP_SECONDS)
        while self._engine.poll() is EngineState.STARTING:
            time.sleep(POLL_SECONDS)
        self.check_health()
        self._stopping = False
        threading.Thread(target=self._end_with_engine, daemon=True).start()
        self._client = httpx.AsyncClient(base_url=spec.url, timeout=None, trust_env=False)  # noqa: S113

    def check_health(self) -> None:
        """Ray Serve calls this periodically.

        Raises:
            RuntimeError: the engine has ended or does not answer ``/health``.
        """
        if self._engine.poll() is not EngineState.READY:
            raise RuntimeError(death_notice(self._engine))
        if not self._engine.healthy():
            raise RuntimeError(f"{self._engine.spec.url} does not answer /health")

    async def answer(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Send a request to the engine, and return the status and the whole answer."""
        response = await self._client.post(path, content=body, headers=JSON)
        return response.status_code, response.content

    async def stream(self, path: str, body: bytes) -> AsyncIterator[tuple[int, bytes]]:
        """Send a request to the engine, and yield the status and each piece of the answer as it arrives."""
        async with self._client.stream("POST", path, content=body, headers=JSON) as response:
            async for piece in response.aiter_raw():
                yield response.status_code, piece

    def engine_pid(self) -> int:
        """Return the process id of the engine's guard, which leads the engine's process group."""
        return self._engine.pid

    def _end_with_engine(self) -> None:
        while self._engine.poll() is not EngineState.DEAD:
            time.sleep(POLL_SECONDS)
        if not self._stopping:
            os._exit(1)

    def __del__(self) -> None:
        """Stop the engine. Ray Serve calls this when it stops a replica."""
        self._stopping = True
        self._engine.begin_stop()
        self._engine.finish_stop()


JSON = {"content-type": "application/json"}
