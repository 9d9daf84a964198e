"""Content keys that are equal in every process, restart, Python version and node.

- `chunk`: the key of a chunk, over all tokens up to its end and everything else that decides its content.
- `namespace`: the scope of keys, from all facts about model and format that affect the bytes of chunks.
- `settings_text`: settings of a model as flat text, by which engines compare them.
- `prompt`: one digest of a whole prompt, by which two engines agree on a handover.
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
