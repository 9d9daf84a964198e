"""Names for content: the same in every process, restart, Python version and node.

- `chunk`: the key of a chunk, over all tokens up to its end and whatever else decides its content.
- `namespace`: what keys live in, everything about model and format that makes bytes of another run wrong.
- `prompt`: one digest of a whole prompt, for two engines to agree on what is handed over.
"""

from kvferry.keys.chunk import KEY_BYTES, ChunkKeys, Item
from kvferry.keys.namespace import Namespace, differences
from kvferry.keys.prompt import prompt_digest

__all__ = [
    "KEY_BYTES",
    "ChunkKeys",
    "Item",
    "Namespace",
    "differences",
    "prompt_digest",
]
