"""Tiny checkpoints of real architectures with random weights. Real engines run them in seconds on a CPU.

`families` lists the architectures and the engine options that they need, `tokenizer` trains the tokenizer
that they share, and `checkpoint` writes the files. The weights are large enough that the output depends on
the KV cache, so wrong bytes in the cache change the output tokens.
"""

from __future__ import annotations

from kvferry.tools.serving.tiny.checkpoint import cache_directory, tiny_checkpoint
from kvferry.tools.serving.tiny.families import FAMILIES, Family, family
from kvferry.tools.serving.tiny.tokenizer import trained_tokenizer

__all__ = ["FAMILIES", "Family", "cache_directory", "family", "tiny_checkpoint", "trained_tokenizer"]
