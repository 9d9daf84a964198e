"""A pair whose engines have tiers as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.vllm_engine.pair import Pair, Setup, connector
from support.vllm_engine.process import Engine


def loads(engine: Engine) -> list[int]:
    """Tokens that were to be loaded, per admission since the last call."""
    return [tokens for _, _, tokens in engine.call("admitted")]


def _settings(path: Path, more: dict[str, Any]) -> dict[str, Any]:
    path.mkdir(exist_ok=True)
    tiers = [
        {"type": "host", "capacity": "64MiB"},
        {"type": "file", "path": str(path), "capacity": "256MiB"},
    ]
    return {"kv_transfer_config": connector(transfer=True, chunk_tokens=64, tiers=tiers, **more)}


class Both(Pair):
    """A pair that settles its tiers before it forgets."""

    def __init__(self, folders: tuple[Path, Path], folder: Path, checkpoints: Path, **more: Any) -> None:
        """Start them.

        Args:
            folders: of each engine's file tier.
            folder: for logs.
            checkpoints: folder of checkpoints.
            more: settings of both connectors.
        """
        prefill, decode = (_settings(path, more) for path in folders)
        options = {"max_num_batched_tokens": 256, "block_size": 64}
        setup = Setup("gemma3", options=options, exact=True, prefill_options=prefill, decode_options=decode)
        super().__init__(setup, folder, checkpoints)
        self.folders, self.shared = folders, folders[0] == folders[1]
        self.free = [engine.call("free_blocks") for engine in self.engines]

    @property
    def engines(self) -> tuple[Engine, Engine]:
        return self.prefill, self.decode

    def forget(self, *, host: bool = False) -> None:
        for engine in self.engines:
            engine.call("settle_tiers")
            if host:
                engine.call("forget_host_memory")
        super().forget()

    def nothing_held(self) -> None:
        self.forget()
        for engine, free in zip(self.engines, self.free, strict=True):
            assert engine.call("held") == {}
            assert engine.call("free_blocks") == free
            counters = engine.call("counters")
            assert (counters["leases"], counters["pins"], counters["pulls"]) == (0, 0, 0)
