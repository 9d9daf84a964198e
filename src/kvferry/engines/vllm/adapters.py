"""Names of LoRA adapters: digests of their files, while the files are those that the engine computes with.

A thread reads the files, because an adapter of half a gigabyte would delay the engine's steps. Until its
digest is known an adapter has no name, and the caller asks again later.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeAlias

from kvferry.cache.weights import weights_of
from kvferry.errors import ConfigError, NotYetNamed, Unnameable
from kvferry.terminal import shown

logger = logging.getLogger(__name__)

_Seen: TypeAlias = tuple[tuple[str, int, int], ...]
"""Name, size and time of modification (ns) of the files of an adapter."""

_GRACE_SECONDS = 0.005
"""How long the first call waits: digests of files that were read before are remembered."""


@dataclass(slots=True)
class _Adapter:
    """An adapter's files.

    Attributes:
        seen: its files when it was first asked for.
        done: set when its files have been read.
        digest: digest of the files; None if they could not be read.
    """

    seen: _Seen
    done: threading.Event = field(default_factory=threading.Event)
    digest: str | None = None


class Adapters:
    """Adapters by their folder. Only the engine's thread calls it.

    The engine reads an adapter when it first needs it, and again after evicting it. If the files have changed
    since the first time, nobody knows which version it computes with, so the adapter has no name any more.
    """

    def __init__(self, settings: str = "") -> None:
        """Begin without any adapter.

        Args:
            settings: the engine's LoRA settings that change what adapters compute; part of every name.
        """
        self._settings = settings
        self._known: dict[str, _Adapter] = {}
        self._reading = threading.Lock()

    def name(self, lora: Any) -> str:
        """Return the name of an adapter, empty for none.

        Args:
            lora: vLLM's LoRARequest, or None.

        Raises:
            NotYetNamed: its files are being read.
            Unnameable: its weights are not on this machine's disk, or may change from step to step.
        """
        if lora is None:
            return ""
        if lora.load_inplace:
            raise Unnameable(f"LoRA {lora.lora_name} is loaded in place: its weights may change")
        seen = _files(Path(lora.lora_path))
        known = self._known.get(lora.lora_path) or self._read(lora, seen)
        if not known.done.is_set():
            raise NotYetNamed(f"the files of LoRA {lora.lora_name} are still being read for their digest")
        if known.digest is None:
            raise Unnameable(f"the weights of LoRA {lora.lora_name} are not on this machine's disk")
        if seen != known.seen:
            raise Unnameable(f"files of LoRA {lora.lora_name} have changed since it was first used")
        return f"{known.digest} {self._settings}".rstrip()

    def _read(self, lora: Any, seen: _Seen) -> _Adapter:
        """Start a thread that reads an adapter; threads read one after the other."""
        adapter = self._known[lora.lora_path] = _Adapter(seen)

        def read() -> None:
            with self._reading:
                try:
                    adapter.digest = _digest(lora.lora_name, Path(lora.lora_path))
                finally:
                    adapter.done.set()

        threading.Thread(target=read, name="kvferry-adapter", daemon=True).start()
        adapter.done.wait(_GRACE_SECONDS)
        return adapter


def _files(folder: Path) -> _Seen:
    try:
        stats = [(path.name, path.stat()) for path in sorted(folder.iterdir())]
    except OSError:
        return ()
    return tuple((name, status.st_size, status.st_mtime_ns) for name, status in stats)


def _digest(name: str, folder: Path) -> str | None:
    """Digest weights and configuration, which scales them; None if they are not on this machine's disk."""
    try:
        weights = weights_of(folder)
        config = (folder / "adapter_config.json").read_bytes()
    except (ConfigError, OSError) as error:
        logger.warning("LoRA %s: %s; its requests are not cached", shown(name), shown(str(error), 300))
        return None
    return weights and f"{weights} {blake2b(config, digest_size=16).hexdigest()}"
