"""The command `python -m examples.transformers_engine`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from examples.transformers_engine.tiers import demonstrate
from kvferry.serving.tiny import tiny_checkpoint
from kvferry.serving.tiny.checkpoint import cache_directory

if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="kvferry-example-") as directory:
        as_expected = demonstrate(tiny_checkpoint("gemma3", cache_directory()), Path(directory))
    sys.exit(not as_expected)
