"""Try connectors of vLLM that may not run on this machine, and say in one line why they do not.

Each one starts an engine in a process of its own, computes a prompt, and asks for it again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import VOCABULARY, write_checkpoint
from benchmarks.engine_process import EngineProcess
from benchmarks.served import SteppedEngine
from kvferry.common.errors import ConfigError, TransferError

PEERS: Mapping[str, Mapping[str, Any]] = {
    "OffloadingConnector": {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 256 << 20},
    },
    "LMCacheConnectorV1": {"kv_connector": "LMCacheConnectorV1"},
}
"""Transfer configuration of each connector, by name."""

_LONGEST, _PROMPT_TOKENS, _CACHE_BYTES = 1024, 600, 64 << 20
_SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
_SECONDS = 90.0
_WIDEST = 200


@dataclass(frozen=True, slots=True)
class _PeerSetup:
    name: str
    model: Path


class _PeerEngine:
    """An engine with a peer's connector that has computed a prompt and loaded it again."""

    def __init__(self, setup: _PeerSetup) -> None:
        """Start the engine and try the connector.

        Raises:
            ConfigError: the connector does not work here; the message is its error, in one line.
        """
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the traceback is not for the report
        try:
            self._served = SteppedEngine(setup.model, _LONGEST, 1, _CACHE_BYTES, PEERS[setup.name])
            prompt = [1 + at * 31 % (VOCABULARY - 1) for at in range(_PROMPT_TOKENS)]
            self._served.first_answer(prompt)
            self._served.forget(host=True)
            hits = self._served.first_answer(prompt).hit_tokens
        except Exception as error:
            raise ConfigError(one_line(error)) from error
        if not hits:
            raise ConfigError("starts, and loads nothing")

    def close(self) -> None:
        """Stop the engine."""
        self._served.close()


def try_peers(folder: Path, progress: Callable[[str], None]) -> dict[str, str | None]:
    """Try all peers at once, and return the error of each, by name; None for one that works.

    Args:
        folder: folder for the checkpoint.
        progress: function that is called with a line of text.
    """
    progress(f"trying {' and '.join(PEERS)}")
    model = write_checkpoint(folder / "small", _LONGEST, _SMALL)
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(EngineProcess(name, _PeerEngine, _PeerSetup(name, model)))
            for name in PEERS
        }
        return {name: _error(name, one) for name, one in started.items()}


def one_line(error: BaseException) -> str:
    """Return an exception's message as one line of limited length, or its type if it has no message."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."


def _error(name: str, process: EngineProcess) -> str | None:
    try:
        process.wait_ready(_SECONDS)
    except TransferError as error:
        return str(error).removeprefix(f"the engine {name}: ")
    return None
