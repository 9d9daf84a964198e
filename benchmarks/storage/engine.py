"""A vLLM engine that computes, stores and loads prompts with one connector, and says when each was done."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.served import FirstAnswer, SteppedEngine, tiered
from kvferry.common.errors import TransferError

COMPUTE, EXAMPLE, FILE, HOST = VARIANTS = ("compute", "example", "file", "host")
"""Names of the variants: no connector, vLLM's ExampleConnector, kvferry's file tier, and its host tier."""

_LIKELY = 20


@dataclass(frozen=True, slots=True)
class Setup:
    """The configuration of an engine.

    Attributes:
        model: folder of the checkpoint.
        variant: name of the variant, one of `VARIANTS`.
        longest: length of the longest request, in tokens. A step computes as many.
        cache_bytes: size of the KV cache, in bytes.
        prompt_bytes: size of the longest prompt's KV, in bytes.
        folder: folder for the stored KV.
    """

    model: Path
    variant: str
    longest: int
    cache_bytes: int
    prompt_bytes: int
    folder: Path


def _connector(setup: Setup) -> Mapping[str, Any] | None:
    # Room for a round's prompts: two of each length, of which the longest weighs most.
    host = {"type": "host", "capacity": 4 * setup.prompt_bytes}
    match setup.variant:
        case "example":
            return {
                "kv_connector": "ExampleConnector",
                "kv_connector_extra_config": {"shared_storage_path": str(setup.folder)},
            }
        case "file":
            file = {"type": "file", "path": str(setup.folder), "capacity": 8 * setup.prompt_bytes}
            return tiered([host, file])
        case "host":
            return tiered([host])
    return None


class StorageEngine:
    """An engine of one variant. Its methods leave it idle, without a request."""

    def __init__(self, setup: Setup) -> None:
        """Start the engine, which takes tens of seconds."""
        self._tier = setup.variant if setup.variant in (FILE, HOST) else None
        self._served = SteppedEngine(
            setup.model, setup.longest, 1, setup.cache_bytes, _connector(setup), setup.longest
        )

    def compute(self, prompt: Sequence[int]) -> tuple[FirstAnswer, float]:
        """Compute a new prompt. Return its first token, and the seconds until the prompt is stored too."""
        self._forget()
        began = time.perf_counter()
        answer = self._served.first_answer(prompt, logprobs=_LIKELY)
        self._served.settle()
        return answer, time.perf_counter() - began

    def load(self, prompt: Sequence[int]) -> FirstAnswer:
        """Return the first token of a prompt that is stored, or whose beginning is.

        The engine's prefix cache has nothing. With the file tier, host memory has nothing either.

        Raises:
            TransferError: chunks came from another of kvferry's tiers than the variant's.
        """
        self._forget()
        before = self._served.hits()
        answer = self._served.first_answer(prompt, logprobs=_LIKELY)
        self._served.settle()
        came = set(self._served.hits() - before)
        if came != ({self._tier} if self._tier else set()):
            raise TransferError(f"chunks came from {sorted(came)}, expected {self._tier}: please report this")
        return answer

    def refresh(self) -> None:
        """Let the file tier bring what it has stored into the page cache, if it has not yet."""
        self._served.refresh()

    def close(self) -> None:
        """Stop the engine."""
        self._served.close()

    def _forget(self) -> None:
        self._served.forget(host=self._tier == FILE)
        # Freed blocks keep their bytes, so a load that moved nothing could give the right token.
        self._served.zero_blocks()
