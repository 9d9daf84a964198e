"""Tiny random checkpoints of real architectures: real engines run them in seconds on a CPU.

`families` lists them with the engine options that they need, `tokenizer` trains their common tokenizer,
`checkpoint` writes them. The weights are random, but large enough that the output depends on the KV cache:
wrong bytes show in the tokens.
"""

from __future__ import annotations

from kvferry.serving.tiny.checkpoint import cache_directory, tiny_checkpoint
from kvferry.serving.tiny.families import FAMILIES, Family, family
from kvferry.serving.tiny.tokenizer import trained_tokenizer

__all__ = ["FAMILIES", "Family", "cache_directory", "family", "tiny_checkpoint", "trained_tokenizer"]
