"""Content keys: equal content has equal keys in every process, on every node and in every Python version.

A *chunk* is a fixed number of tokens of one KV cache group, the unit in which KV is cached.

- `chunk`: the key of a chunk, a digest of all tokens up to its end and everything else that decides its KV.
- `namespace`: the scope in which keys are valid, made from all facts about model and format that affect the
  bytes of chunks.
- `settings_text`: a model's settings as flat text, so that two engines can compare them.
- `prompt`: one digest of a whole prompt, with which a consumer checks that a producer's KV is for its prompt.
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
