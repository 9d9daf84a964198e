"""Content keys: equal content has equal keys in every process, on every node and in every Python version."""

from kvferry.keys.chunk import KEY_BYTES, ChunkKeys, Item, prompt_digest
from kvferry.keys.namespace import Namespace, differences
from kvferry.keys.tenant import TENANT_BYTES, tenant_of

__all__ = [
    "KEY_BYTES",
    "TENANT_BYTES",
    "ChunkKeys",
    "Item",
    "Namespace",
    "differences",
    "prompt_digest",
    "tenant_of",
]
