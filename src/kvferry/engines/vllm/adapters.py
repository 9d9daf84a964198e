"""Names of LoRA adapters: digests of what their files hold, as long as the engine computes with just that.

Files are read by a thread: an adapter of half a gigabyte would hold up the engine's steps. Until its digest
is there an adapter has no name yet, and whoever needs one asks again.
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

logger = logging.getLogger(__name__)

_Seen: TypeAlias = tuple[tuple[str, int, int], ...]
"""Name, size and time of modification (ns) of the files of an adapter."""

_GRACE_SECONDS = 0.005
"""How long the first question waits: digests of files that were read before are remembered."""


@dataclass(slots=True)
class _Adapter:
    """An adapter's files.

    Attributes:
        seen: when it was first asked for.
        done: it was read.
        digest: of what was read; None if it could not be.
    """

    seen: _Seen
    done: threading.Event = field(default_factory=threading.Event)
    digest: str | None = None


class Adapters:
    """Adapters by their folder. The engine's thread calls it.

    The engine reads an adapter when it first needs it, and again when it has let it go. So files that are
    others than at first may or may not be what it computes with, and name nothing any more.
    """

    def __init__(self, settings: str = "") -> None:
        """Nothing was read yet.

        Args:
            settings: of the engine, by which an adapter's weights come to act; part of every name.
        """
        self._settings = settings
        self._known: dict[str, _Adapter] = {}
        self._reading = threading.Lock()

    def name(self, lora: Any) -> str:
        """The name of an adapter.

        Args:
            lora: vLLM's LoRARequest; None for none, which an empty name says.

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
        """Let a thread read an adapter; one at a time."""
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
    """Weights and configuration, which scales them; None if they are not on this machine's disk."""
    try:
        weights = weights_of(folder)
        config = (folder / "adapter_config.json").read_bytes()
    except (ConfigError, OSError) as error:
        logger.warning("LoRA %s: %s; its requests are not cached", name, error)
        return None
    return weights and f"{weights} {blake2b(config, digest_size=16).hexdigest()}"
