"""One JSON line per finished load, for people and scripts."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from io import FileIO

from kvferry.connector.events import MAX_ID_CHARACTERS
from kvferry.connector.messages import Report
from kvferry.errors import ConfigError
from kvferry.planning.select import LoadSpan
from kvferry.private_file import open_private
from kvferry.terminal import shown

logger = logging.getLogger(__name__)


class TransferLog:
    """Appends to a file, or does nothing without one. A full disk stops the log, not the engine.

    Attributes:
        labels: name per group, with its number.
    """

    def __init__(
        self, path: str | None, labels: Sequence[str], block_tokens: int, block_bytes: float
    ) -> None:
        """Open the file.

        Args:
            path: the file, None for no log.
            labels: name per group.
            block_tokens, block_bytes: a block of all layers, if all layers were full attention.

        Raises:
            ConfigError: the file cannot be opened for appending.
        """
        self.labels = [f"{number} {label}" for number, label in enumerate(labels)]
        self._block_tokens, self._block_bytes = block_tokens, block_bytes
        self._file: FileIO | None = None
        if path is not None:
            try:
                self._file = open(path, "ab", buffering=0, opener=open_private)  # noqa: SIM115
            except OSError as error:
                raise ConfigError(
                    f"transfer_log {path}: {os.strerror(error.errno or 0)}; name a file that can be written"
                ) from error

    def write(self, request_id: str, peer: str, span: LoadSpan, report: Report, seconds: float) -> None:
        """Log one load."""
        if self._file is None:
            return
        line = {
            "request_id": shown(request_id, MAX_ID_CHARACTERS),
            "outcome": report.outcome,
            "reason": report.failure,
            "peer": peer,
            "tokens": span.ends - span.begins,
            "bytes": sum(report.bytes_by_group),
            "bytes_by_group": dict(zip(self.labels, report.bytes_by_group, strict=False)),
            "strategy_by_group": dict(zip(self.labels, report.strategy_by_group, strict=False)),
            "full_attention_bytes": round(self._block_bytes * self._blocks(span)),
            "descriptors": report.descriptors,
            "pages": report.pages,
            "run_bytes": report.run_bytes,
            "plan_seconds": report.plan_seconds,
            "transfer_seconds": report.transfer_seconds,
            "check_seconds": report.check_seconds,
            "total_seconds": seconds,
        }
        try:
            self._file.write(json.dumps(line).encode() + b"\n")
        except OSError as error:
            logger.warning("transfer_log: %s; no more lines are written", os.strerror(error.errno or 0))
            self._file.close()
            self._file = None

    def _blocks(self, span: LoadSpan) -> int:
        """Return the number of blocks that hold a span, the last one whole."""
        return -(-span.ends // self._block_tokens) - span.begins // self._block_tokens
