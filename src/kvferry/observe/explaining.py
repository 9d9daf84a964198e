"""Keep the events of an engine's latest requests, and serve them to `kvferry explain` over a Unix socket."""

from __future__ import annotations

import os

import kvferry
from kvferry.connector.stream import EventStream
from kvferry.observe.trace_server import TraceServer
from kvferry.observe.traces import TraceBuffer
from kvferry.observe.wire import EngineInfo


class RequestExplainer:
    """Recorder of the events of an engine's latest requests, for the command `kvferry explain`."""

    def __init__(
        self,
        events: EventStream,
        requests: int,
        *,
        engine_id: str,
        model: str,
        role: str,
        connector: str = "",
    ) -> None:
        """Start recording the connector's events. Call `start` to make them available to `kvferry explain`.

        Args:
            events: stream of the connector's events.
            requests: number of requests to remember; 0 to remember none and to serve nothing.
            engine_id: name of the engine.
            model: name of the engine's model.
            role: ``prefill``, ``decode`` or ``both``.
            connector: name of the connector if the engine has several; empty otherwise.
        """
        self._traces = TraceBuffer(requests) if requests else None
        self._max_requests = requests
        self._server: TraceServer | None = None
        self._engine = EngineInfo(
            kvferry=kvferry.__version__,
            engine_id=engine_id,
            model=model,
            pid=os.getpid(),
            role=role,
            connector=connector,
        )
        if self._traces is not None:
            events.subscribe(self._traces)

    def start(self) -> None:
        """Open the socket, and start the thread that answers. A failure is only logged."""
        if self._traces is not None:
            self._server = TraceServer(self._traces, self._engine, self._max_requests)

    def close(self) -> None:
        """Stop answering `kvferry explain`, and remove the socket."""
        if self._server is not None:
            self._server.close()
            self._server = None
