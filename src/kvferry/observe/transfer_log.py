"""Append one JSON line to a file for every KV load from a peer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kvferry.connector.events import Event, LoadBegan, LoadEnded
from kvferry.connector.load import LoadOutcome
from kvferry.connector.stream import MAX_ID_CHARACTERS
from kvferry.geometry import GroupKind, RankGeometry
from kvferry.observe.line_file import LineFile, open_line_file
from kvferry.terminal import shown
from kvferry.tiers.names import PEER

_LINE_BYTES = 2048
"""Memory of a line that waits to be written, at most about this."""


class TransferLog:
    """Listener that appends a line for each ended load from a peer. For the engine's thread alone."""

    def __init__(self, path: str, ranks: Sequence[RankGeometry]) -> None:
        """Open the log file for appending.

        Args:
            path: path of the log file; created if it does not exist.
            ranks: geometry of every rank of the engine.

        Raises:
            ConfigError: the file cannot be opened for appending.
        """
        self._labels = ranks[0].labels
        self._block_tokens, self._block_bytes = full_attention_block(ranks)
        self._lines = LineFile("transfer_log", path, open_line_file("transfer_log", path))

    def __call__(self, event: Event) -> None:
        """Write the line of a load that has ended."""
        if (
            isinstance(event, LoadEnded)
            and event.began.source == PEER
            and event.outcome is not LoadOutcome.DROPPED
        ):
            self._write(event)

    def close(self) -> None:
        """Write the lines that wait, and close the file. Later loads are not logged."""
        self._lines.close()

    def _write(self, ended: LoadEnded) -> None:
        began, figures = ended.began, ended.figures
        line = {
            # A client may choose the id.
            "request_id": shown(ended.request_id, MAX_ID_CHARACTERS),
            "outcome": ended.outcome,
            "reason": ended.failure or None,
            "peer": began.peer,
            "tokens": began.end - began.begin,
            "bytes": sum(figures.bytes_by_group),
            "bytes_by_group": dict(zip(self._labels, figures.bytes_by_group, strict=False)),
            "strategy_by_group": dict(zip(self._labels, figures.strategy_by_group, strict=False)),
            "full_attention_bytes": round(self._block_bytes * self._blocks(began)),
            "reads": figures.reads,
            "descriptors": figures.descriptors,
            "pages": figures.pages,
            "run_bytes": figures.run_bytes,
            "plan_seconds": figures.plan_seconds,
            "transfer_seconds": figures.transfer_seconds,
            "check_seconds": figures.check_seconds,
            "read_bytes_per_second": figures.read_bytes_per_second,
            "total_seconds": ended.seconds,
        }
        self._lines.add(partial(_encode, line), _LINE_BYTES)

    def _blocks(self, load: LoadBegan) -> int:
        """Return the number of blocks, of the largest attention layer, that contain tokens of a load."""
        # Partly filled blocks are read whole.
        return -(-load.end // self._block_tokens) - load.begin // self._block_tokens


def _encode(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line).encode() + b"\n"


def full_attention_block(ranks: Sequence[RankGeometry]) -> tuple[int, float]:
    """Return the size of a KV block if every layer stored as much as the largest attention layer.

    Returns:
        Number of tokens of a block, and number of bytes of a block over all layers and ranks.
    """
    per_layer = [
        (layer.page.content_bytes / layer.page.block_tokens, layer.page.block_tokens)
        for rank in ranks
        for group in rank.groups
        for layer in group.layers
        if group.kind is not GroupKind.STATE
    ]
    bytes_per_token, tokens = max(per_layer, default=(0.0, 1))
    layers = sum(len(group.layers) for rank in ranks for group in rank.groups)
    return tokens, bytes_per_token * tokens * layers
