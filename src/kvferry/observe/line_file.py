"""A file of lines that a thread writes, so that a slow disk never delays the engine's steps.

`TransferLog` writes such a file, with a line for each load from a peer.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import FileIO
from queue import Empty, SimpleQueue
from typing import TypeAlias

from kvferry.common.errors import ConfigError
from kvferry.common.files import open_private
from kvferry.common.limited_log import LimitedLog
from kvferry.common.text import shown
from kvferry.common.threads import Thread
from kvferry.connector.events import MAX_ID_CHARACTERS, Event, LoadEnded, LoadOutcome
from kvferry.geometry import GroupKind, RankGeometry
from kvferry.tiers.names import PEER

logger = logging.getLogger(__name__)

MOST_QUEUED_BYTES = 64 << 20
"""Maximum memory of the lines that wait to be written. Further lines are left out."""

CLOSING_SECONDS = 5.0
"""Longest time for which closing a file waits for the disk, in seconds."""

_LINE_BYTES = 2048
"""Memory of a line of the transfer log that waits to be written, at most about this."""

Line: TypeAlias = Callable[[], bytes]
"""Function that returns a line, with its line feed. The thread that writes the file calls it."""


def open_line_file(setting: str, path: str) -> FileIO:
    """Open a file for appending, a new one for its owner alone. Raise ConfigError if that fails."""
    try:
        return open(path, "ab", buffering=0, opener=open_private)
    except (OSError, ValueError) as error:
        why = os.strerror(error.errno or 0) if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{setting} {path}: {why}; name a file that can be written") from error


def check_line_file(setting: str, path: str) -> None:
    """Check that `open_line_file` can open a file, and leave none behind. Raise ConfigError if it cannot."""
    target = os.path.realpath(path)  # a link may lead to a file that does not exist
    existed = os.path.lexists(target)
    open_line_file(setting, path).close()
    if not existed:
        os.unlink(target)  # noqa: PTH108 - a path of any text, as `open` takes it


class LineFile:
    """Writes lines to a file in a thread, in the order in which they were added.

    The engine's thread alone calls the methods, and none of them but `close` waits for the disk.
    """

    def __init__(
        self,
        setting: str,
        path: str,
        file: FileIO,
        *,
        most_queued_bytes: int = MOST_QUEUED_BYTES,
        closing_seconds: float = CLOSING_SECONDS,
    ) -> None:
        """Start the thread, which closes `file`.

        Args:
            file: opened for appending, without a buffer.
            most_queued_bytes: maximum memory of the lines that wait to be written.
            closing_seconds: longest time for which `close` waits.
        """
        self._setting, self._path, self._file = setting, path, file
        self._most, self._closing_seconds = most_queued_bytes, closing_seconds
        self._lines: SimpleQueue[tuple[Line, int] | None] = SimpleQueue()
        # Bytes of all lines so far. The engine's thread changes the first number, the other one the second.
        self._added = self._taken = 0
        self._left_out = 0
        self._warnings = LimitedLog(logger)
        self._is_open = True
        self._thread = Thread(self._write_lines, f"kvferry-{setting}")
        self._thread.start()

    def add(self, line: Line, size: int) -> None:
        """Add a line to the file, unless the file is closed or too many lines wait.

        Args:
            size: memory that `line` holds until it is called, in bytes.
        """
        if not self._is_open:
            return
        if self._added - self._taken > self._most:
            # Memory is the engine's. A log with gaps is better than an engine that is killed.
            self._left_out += 1
            slow = f"{self._setting}: {self._path} is written too slowly"
            self._warnings.say("slow", f"{slow}; lines are left out")
            return
        self._added += size
        self._lines.put((line, size))

    def close(self) -> None:
        """Wait until all lines are written, for at most `closing_seconds`, and close the file."""
        self._is_open = False
        self._lines.put(None)
        # A hung disk must not keep the engine from ending.
        self._thread.join(self._closing_seconds)
        if self._thread.is_alive():
            slow = f"{self._setting}: {self._path} is written too slowly"
            logger.warning("%s; its last lines may be lost", slow)
        if self._left_out:
            logger.warning("%s: %d lines were left out of %s", self._setting, self._left_out, self._path)
            self._left_out = 0

    def _write_lines(self) -> None:
        try:
            while (item := self._lines.get()) is not None:
                line, size = item
                # Lines are encoded here, so that this costs the engine's thread nothing.
                self._write(line())
                self._taken += size
        except OSError as error:
            logger.warning("%s: %s; no more lines are written", self._setting, os.strerror(error.errno or 0))
        except Exception:
            logger.exception("%s: no more lines are written; tell kvferry's authors", self._setting)
        finally:
            self._is_open = False
            self._file.close()
            # Nobody will read the queue any more, and its lines hold memory.
            with suppress(Empty):
                while True:
                    self._lines.get_nowait()

    def _write(self, line: bytes) -> None:
        rest = memoryview(line)
        while rest:
            # A write without a buffer may take only a part, for example if the disk fills up.
            rest = rest[self._file.write(rest) :]


class TransferLog:
    """Listener that appends a line for each ended load from a peer. For the engine's thread alone."""

    def __init__(self, path: str, ranks: Sequence[RankGeometry]) -> None:
        """Open the log file for appending. Raise ConfigError if that fails."""
        self._labels = ranks[0].labels
        self._block_tokens, self._block_bytes = _full_attention_block(ranks)
        self._lines = LineFile("transfer_log", path, open_line_file("transfer_log", path))

    def __call__(self, event: Event) -> None:
        if not isinstance(event, LoadEnded) or event.began.source != PEER:
            return
        if event.outcome is LoadOutcome.DROPPED:
            return
        began, figures = event.began, event.figures
        # The blocks, of the largest attention layer, that contain tokens. Partly filled ones are read whole.
        blocks = -(-began.end // self._block_tokens) - began.begin // self._block_tokens
        line = {
            # A client may choose the id.
            "request_id": shown(event.request_id, MAX_ID_CHARACTERS),
            "outcome": event.outcome,
            "reason": event.failure or None,
            "peer": began.peer,
            "tokens": began.end - began.begin,
            "bytes": sum(figures.bytes_by_group),
            "bytes_by_group": dict(zip(self._labels, figures.bytes_by_group, strict=False)),
            "strategy_by_group": dict(
                zip(self._labels, map("+".join, figures.strategies_by_group), strict=False)
            ),
            "full_attention_bytes": round(self._block_bytes * blocks),
            "reads": figures.reads,
            "descriptors": figures.descriptors,
            "pages": figures.pages,
            "run_bytes": figures.run_bytes,
            "plan_seconds": figures.plan_seconds,
            "transfer_seconds": figures.transfer_seconds,
            "check_seconds": figures.check_seconds,
            "read_bytes_per_second": figures.read_bytes_per_second,
            "total_seconds": event.seconds,
        }
        self._lines.add(lambda: json.dumps(line).encode() + b"\n", _LINE_BYTES)

    def close(self) -> None:
        """Write the lines that wait, and close the file. Later loads are not logged."""
        self._lines.close()


def _full_attention_block(ranks: Sequence[RankGeometry]) -> tuple[int, float]:
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
