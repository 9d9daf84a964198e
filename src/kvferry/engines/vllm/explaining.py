"""What `kvferry explain` asks an engine's scheduler for."""

from __future__ import annotations

import os
from typing import Any

import kvferry
from kvferry.observe.stream import EventStream
from kvferry.observe.trace_server import TraceServer
from kvferry.observe.traces import TraceBuffer
from kvferry.observe.wire import EngineInfo

_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode"}


class Explaining:
    """Remembers the last requests, and answers who asks for them; nothing if it is to remember none."""

    def __init__(self, vllm_config: Any, requests: int, events: EventStream, name: str = "") -> None:
        """Begin to remember.

        Args:
            vllm_config: the engine's.
            requests: how many.
            events: what is remembered.
            name: of the connector among several.
        """
        self._traces = TraceBuffer(requests) if requests else None
        self._most = requests
        self._answering: TraceServer | None = None
        transfer = vllm_config.kv_transfer_config
        self._engine = EngineInfo(
            kvferry=kvferry.__version__,
            engine_id=str(transfer.engine_id),
            model=str(vllm_config.model_config.model),
            pid=os.getpid(),
            role=_ROLES.get(transfer.kv_role, "both"),
            connector=name,
        )
        if self._traces is not None:
            events.subscribe(self._traces)

    def start(self) -> None:
        """Answer from now on."""
        if self._traces is not None:
            self._answering = TraceServer(self._traces, self._engine, self._most)

    def close(self) -> None:
        """Answer no more."""
        if self._answering is not None:
            self._answering.close()
            self._answering = None
