"""The tenant of a request and of its chunks: a digest that keys of chunks contain.

A tenant is everybody who sends the same cache salt, or without a salt, everybody who uses the same LoRA
adapter. Requests with neither are one tenant, `NOBODY`.

A chunk's key names its tenant, so the tenant of every chunk is known wherever its key is: in host memory, in
the names of files and in other engines.
"""

from __future__ import annotations

from hashlib import blake2b

TENANT_BYTES = 6
NOBODY = bytes(TENANT_BYTES)
"""Tenant of all requests with neither a cache salt nor an adapter."""

# Neither the first bytes of a key nor the last ones: folders and hash tables use them.
_FIRST = 16
_END = _FIRST + TENANT_BYTES


def tenant_of(salt: str | None, adapter: str | None) -> bytes:
    """Return the tenant of a request with a cache salt, or else with an adapter of this name.

    >>> tenant_of("salt", "sql") == tenant_of("salt", None), tenant_of("sql", None) == tenant_of(None, "sql")
    (True, False)
    """
    text = salt or adapter
    if not text:
        return NOBODY
    person = b"kvferry-salt-1" if salt else b"kvferry-lora-1"
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=TENANT_BYTES, person=person).digest()


def tenant_of_key(key: bytes) -> bytes:
    """Return the tenant in the key of a chunk."""
    return key[_FIRST:_END]


def key_of_chunk(digest: bytes, tenant: bytes, group: int) -> bytes:
    """Return the key of a chunk in one KV cache group, below 256, from the digest of its content."""
    return digest[:_FIRST] + tenant + digest[_END:-1] + bytes((group,))
