"""A router's view of the KV events that an engine publishes over ZMQ."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Self

import msgspec
import zmq

QUIET_SECONDS = 0.5


def endpoint(folder: Path) -> str:
    """Where an engine publishes, of a folder with a short path."""
    return f"ipc://{folder / 'kv'}"


def publishing(folder: Path) -> dict[str, Any]:
    """``kv_events_config`` of an engine that publishes there."""
    return {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint(folder)}


class Router:
    """Follows an engine's events. It knows blocks by (medium, tier, group); the engine's own have no tier.

    Attributes:
        blocks: hashes of the blocks that are in a place now.
        events: everything received, decoded, without a schema.
    """

    def __init__(self, at: str) -> None:
        self.blocks: defaultdict[tuple[str | None, str | None, int], set[bytes]] = defaultdict(set)
        self.events: list[dict[str, Any]] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(at)
        time.sleep(QUIET_SECONDS)  # a subscription takes a moment to arrive, and nothing tells when

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close(0)
        self._context.term()

    def follow(self) -> None:
        """Take all events, until none comes for a while."""
        while self._socket.poll(int(QUIET_SECONDS * 1000)):
            _, _, payload = self._socket.recv_multipart()
            for event in msgspec.msgpack.decode(payload)[1]:
                self.events.append(event)
                self._apply(event)

    def _apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.blocks.clear()
            return
        place = self.blocks[event["medium"], event.get("ownership"), event["group_idx"]]
        if event["type"] == "BlockStored":
            place.update(event["block_hashes"])
        else:
            place.difference_update(event["block_hashes"])
