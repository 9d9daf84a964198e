"""Chunks of the same prompts that an engine with other weights has stored in the same directory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from support.vllm_engine.pair import connector
from support.vllm_engine.process import Engine

SALTS = tuple(f"other weights {number}" for number in range(3))
"""Under which it has stored every prompt."""


def checkpoint(model: Path, folder: Path) -> Path:
    """The same architecture with the rows of every projection turned round."""
    shutil.copytree(model, folder)
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    turned = {
        name: one.flip(0).contiguous() if one.ndim == 2 and ".layers." in name else one
        for name, one in weights.items()
    }
    save_file(turned, file, metadata={"format": "pt"})
    return folder


def store(
    model: Path,
    directory: Path,
    texts: list[list[int]],
    chunk_tokens: int,
    options: dict[str, Any],
    log: Path,
) -> str:
    """Have such an engine answer all texts under every salt; the name of its namespace.

    Args:
        model: the checkpoint whose weights it does not have.
        directory: of the file tier, empty.
        texts: prompts.
        chunk_tokens: of a chunk.
        options: of the engine.
        log: file for what it prints.
    """
    tiers = [
        {"type": "host", "capacity": "48MiB"},
        {"type": "file", "path": str(directory), "capacity": "1GiB"},
    ]
    other = checkpoint(model, log.parent / "other-weights")
    settings = connector(chunk_tokens=chunk_tokens, tiers=tiers)
    engine = Engine(log, model=str(other), **options, kv_transfer_config=settings)
    try:
        engine.ready()
        for salt in SALTS:
            engine.call("generate", texts, tokens=1, salt=salt)
            engine.call("settle_tiers")
    finally:
        engine.close()
    (namespace,) = (path.name for path in directory.iterdir() if len(path.name) == 64)
    return namespace
