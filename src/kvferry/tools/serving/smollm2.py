"""SmolLM2-135M-Instruct: a small model with real weights, so that a reader can judge its answers.

`make smollm2` in a checkout fetches it and writes the checkpoint (`scripts/smollm2.py`).
"""

from __future__ import annotations

from pathlib import Path

from kvferry.tools.serving.tiny import cache_directory

SMOLLM2 = "smollm2"
TITLE = "SmolLM2-135M-Instruct"
# Raise the number if the files are written in another way.
_NAME = "smollm2-135m-instruct-1"


def smollm2_checkpoint() -> Path:
    """Return the folder of the checkpoint, which may not exist. Raise ConfigError without a cache folder."""
    return cache_directory() / _NAME


def missing_smollm2() -> str | None:
    """Return why the model cannot be used, and what to do; None if its checkpoint exists."""
    folder = smollm2_checkpoint()
    if folder.is_dir():
        return None
    return f"{TITLE} is not in {folder.parent}; `make {SMOLLM2}` in a checkout of kvferry fetches it"
