"""What names LoRA adapters: what their files hold, as long as that is what the engine computes with."""

from __future__ import annotations

import logging
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeAlias

from kvferry.cache.weights import weights_of
from kvferry.errors import ConfigError, Unnameable

logger = logging.getLogger(__name__)

_Seen: TypeAlias = tuple[tuple[str, int, int], ...]
"""Name, size and time of modification (ns) of the files of an adapter."""


class Adapters:
    """Adapters by their folder.

    The engine reads an adapter when it first needs it, and again when it has let it go. So files that are
    others than at first may or may not be what it computes with, and name nothing any more.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[str | None, _Seen]] = {}

    def name(self, lora: Any) -> str:
        """What names an adapter.

        Args:
            lora: vLLM's LoRARequest; None for none, which an empty name says.

        Raises:
            Unnameable: its weights are not on this machine's disk, or may change from step to step.
        """
        if lora is None:
            return ""
        if lora.load_inplace:
            raise Unnameable(f"LoRA {lora.lora_name} is loaded in place: its weights may change")
        folder = Path(lora.lora_path)
        seen = _files(folder)
        if lora.lora_path not in self._known:
            self._known[lora.lora_path] = _digest(lora.lora_name, folder), seen
        digest, first = self._known[lora.lora_path]
        if digest is None:
            raise Unnameable(f"the weights of LoRA {lora.lora_name} are not on this machine's disk")
        if seen != first:
            raise Unnameable(f"files of LoRA {lora.lora_name} have changed since it was first used")
        return digest


def _files(folder: Path) -> _Seen:
    try:
        stats = [(path.name, path.stat()) for path in sorted(folder.iterdir())]
    except OSError:
        return ()
    return tuple((name, status.st_size, status.st_mtime_ns) for name, status in stats)


def _digest(name: str, folder: Path) -> str | None:
    """Weights and configuration, which scales them; None if they are not on this machine's disk."""
    try:
        weights = weights_of(folder)
        config = (folder / "adapter_config.json").read_bytes()
    except (ConfigError, OSError) as error:
        logger.warning("LoRA %s: %s; its requests are not cached", name, error)
        return None
    return weights and f"{weights} {blake2b(config, digest_size=16).hexdigest()}"
