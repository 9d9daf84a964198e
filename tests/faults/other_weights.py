"""Chunks of the same prompts that an engine with other weights has stored in the same directory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from faults.references import References
from support.vllm_engine.pair import connector
from support.vllm_engine.process import Engine

FOLDER = "other-weights"
"""Of the checkpoint, in that of the log."""
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
    references: References, directory: Path, chunk_tokens: int, options: dict[str, Any], log: Path
) -> str:
    """Have such an engine answer all prompts under every salt; the name of its namespace.

    Args:
        references: the prompts, their adapters, and the checkpoint whose weights it does not have.
        directory: of the file tier, empty.
        chunk_tokens: of a chunk.
        options: of the engine.
        log: file for what it prints.
    """
    tiers = [
        {"type": "host", "capacity": "48MiB"},
        {"type": "file", "path": str(directory), "capacity": "1GiB"},
    ]
    other = checkpoint(Path(references.model), log.parent / FOLDER)
    settings = connector(chunk_tokens=chunk_tokens, tiers=tiers)
    engine = Engine(log, model=str(other), **options, kv_transfer_config=settings)
    try:
        engine.ready()
        for salt in SALTS:
            for adapter in references.adapters or [""]:
                texts = [one for one in references.texts if references.adapter_of(one) == adapter]
                engine.call("generate", texts, tokens=1, salt=salt, adapter=adapter or None)
            engine.call("settle_tiers")
    finally:
        engine.close()
    (namespace,) = (path.name for path in directory.iterdir() if len(path.name) == 64)
    return namespace
