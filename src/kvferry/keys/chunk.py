"""Keys of the chunks of one request.

A chunk's KV depends on every token before it, so its key does too: each key is a digest of the key before it
and of the chunk's own tokens. Equal keys mean equal content, whoever computed it, under which parallel sizes,
layouts and block sizes; what the model and the format add is the namespace (`kvferry.keys.namespace`).

The digest is BLAKE2b of 32 bytes. It is cryptographic because tenants choose tokens: whoever could make two
prompts with one key could have one answered with the KV of the other. With 16 bytes, two such prompts are
2^64 digests away; 32 cost no time (a message of 256 tokens is as many BLAKE2b blocks) and 16 KiB per 128k
tokens. It is in every Python's standard library, and its `person` parameter separates the three uses below.

What is digested; integers are little-endian and unsigned, ``text`` is its length in 8 bytes, then UTF-8::

    root   person "kvferry-root-1"     chunk_tokens (8 bytes), lora (text), salt (text)
    chunk  person "kvferry-chunk-1"    the key before, or the root (32 bytes)
                                       count of tokens (8 bytes), their ids (4 bytes each)
                                       count of items that begin in it (8 bytes), of each:
                                       first token (8 bytes), tokens (8 bytes), identity (text)
    tail   person "kvferry-tail-1"     as of a chunk: what follows the last boundary, not a whole chunk

Every variable part follows its length, so no two inputs spell the same bytes; a tail is never a chunk, of
whatever length.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from kvferry.errors import Unnameable

KEY_BYTES = 32

_ID_BYTES = 4
_ROOT = blake2b(digest_size=KEY_BYTES, person=b"kvferry-root-1")
_CHUNK = blake2b(digest_size=KEY_BYTES, person=b"kvferry-chunk-1")
_TAIL = blake2b(digest_size=KEY_BYTES, person=b"kvferry-tail-1")


@dataclass(frozen=True, slots=True, order=True)
class Item:
    """What stands in place of tokens: an image, a piece of audio, embeddings.

    Attributes:
        start: position of its first token.
        tokens: how many placeholder tokens it takes.
        identity: digest of its content, as the engine gives it.
    """

    start: int
    tokens: int
    identity: str

    def __post_init__(self) -> None:
        if self.start < 0 or self.tokens < 1:
            raise Unnameable(f"item {self.identity!r}: {self.tokens} tokens from token {self.start}")


class ChunkKeys:
    """The keys of one request, extended as it grows. Not thread-safe.

    What was digested once is remembered, and so are the token ids (4 bytes each), for `at`. Tokens are only
    ever added: a request whose tokens change needs a new one of these.

    >>> keys = ChunkKeys(4, range(6))
    >>> len(keys.chunks()), keys.at(4) == keys.chunks()[0], keys.at(6) == keys.chunks()[0]
    (1, True, False)
    >>> keys.extend([6, 7])
    >>> len(keys.chunks()), keys.chunks() == ChunkKeys(4, range(8)).chunks()
    (2, True)
    """

    def __init__(
        self,
        chunk_tokens: int,
        tokens: Sequence[int] | npt.NDArray[np.integer] = (),
        *,
        items: Iterable[Item] = (),
        lora: str = "",
        salt: str = "",
    ) -> None:
        """Begin with what is known of a request, usually its prompt.

        Args:
            chunk_tokens: tokens of a chunk.
            tokens: token ids, each below 2^32.
            items: what stands in place of tokens, in any order; also what lies beyond the tokens so far. An
                item counts from the chunk on in which it begins: the chain carries it into all that follow.
            lora: identity of the adapter, empty without one. A name says as little here as a model's name.
            salt: the tenant's cache salt, empty without one: nobody else finds these keys.

        Raises:
            Unnameable: a token id that has no place in 4 bytes, or chunks of no tokens.
        """
        if chunk_tokens < 1:
            raise Unnameable(f"chunks of {chunk_tokens} tokens")
        self.chunk_tokens = chunk_tokens
        self._ids = bytearray()
        self._beginning: dict[int, list[Item]] = {}
        for item in sorted(items):
            self._beginning.setdefault(item.start // chunk_tokens, []).append(item)
        root = _ROOT.copy()
        root.update(_count(chunk_tokens) + _text(lora) + _text(salt))
        self._root = root.digest()
        self._chunks: list[bytes] = []
        self._digests = bytearray()  # the same in one piece
        self.extend(tokens)

    def __len__(self) -> int:
        """Tokens so far."""
        return len(self._ids) // _ID_BYTES

    def extend(self, tokens: Sequence[int] | npt.NDArray[np.integer]) -> None:
        """Add tokens that follow, and digest the chunks that they complete.

        A chain cannot be computed all at once: this takes one pass of Python per *completed* chunk, 2 us each
        of 256 tokens.

        Raises:
            Unnameable: a token id that has no place in 4 bytes; nothing is added then.
        """
        self._ids += _little_endian(tokens)
        whole = len(self._ids) // (self.chunk_tokens * _ID_BYTES)
        if whole == len(self._chunks):
            return
        first, step = len(self._chunks), self.chunk_tokens * _ID_BYTES
        key, count, none = self._before(first), _count(self.chunk_tokens), _items(())
        for index in range(first, whole):
            begin = self._beginning.get(index)
            digest = _CHUNK.copy()
            digest.update(key + count + self._ids[index * step : (index + 1) * step])
            digest.update(_items(begin) if begin else none)
            key = digest.digest()
            self._chunks.append(key)
            self._digests += key

    def chunks(self, first: int = 0) -> list[bytes]:
        """Keys of the complete chunks from number `first` on, `KEY_BYTES` each, in order.

        Bytes, since that is what mappings, file names and messages take: a lookup of all is
        ``[key in index for key in keys.chunks()]``.
        """
        return self._chunks[first:]

    def digests(self, first: int = 0) -> npt.NDArray[np.uint8]:
        """As `chunks`: uint8 of shape (chunks, KEY_BYTES)."""
        return np.frombuffer(self._digests[first * KEY_BYTES :], np.uint8).reshape(-1, KEY_BYTES)

    def chunk(self, number: int) -> bytes:
        """Key of a complete chunk."""
        return self._chunks[number]

    def at(self, tokens: int) -> bytes:
        """Key of what lies between the last boundary before `tokens` and `tokens`.

        On a boundary, that is a chunk's key; elsewhere that of a tail. A tail is named for exactly these
        tokens: a longer one has another key.

        Raises:
            Unnameable: there are not as many tokens, or none are asked for.
        """
        if not 0 < tokens <= len(self):
            raise Unnameable(f"a key at token {tokens} of a request of {len(self)}")
        index, count = divmod(tokens, self.chunk_tokens)
        if not count:
            return self._chunks[index - 1]
        found = [item for item in self._beginning.get(index, ()) if item.start < tokens]
        ids = self._ids[(tokens - count) * _ID_BYTES : tokens * _ID_BYTES]
        digest = _TAIL.copy()
        digest.update(self._before(index) + _count(count) + ids + _items(found))
        return digest.digest()

    def _before(self, index: int) -> bytes:
        """What chunk `index` chains from."""
        return self._chunks[index - 1] if index else self._root


def _count(number: int) -> bytes:
    return number.to_bytes(8, "little")


def _text(text: str) -> bytes:
    """Any `str`: a lone surrogate, which JSON can carry into a salt, gets bytes that are no other text's."""
    data = text.encode("utf-8", "surrogatepass")
    return _count(len(data)) + data


def _items(items: Sequence[Item]) -> bytes:
    parts = [_count(item.start) + _count(item.tokens) + _text(item.identity) for item in items]
    return _count(len(items)) + b"".join(parts)


def _little_endian(tokens: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
    """Token ids, 4 bytes each."""
    if isinstance(tokens, np.ndarray):
        return _of_array(tokens)
    try:
        # Three times as fast as an ndarray of a list, and it refuses what is no integer or has no room.
        ids = array("I", tokens if isinstance(tokens, list) else list(tokens))
    except (OverflowError, TypeError) as error:
        raise Unnameable(f"token ids must be whole numbers from 0 to 2^32 - 1: {error}") from error
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def _of_array(tokens: npt.NDArray[np.integer]) -> bytes:
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise Unnameable(
            f"token ids must be one row of whole numbers, not {tokens.dtype} of shape {tokens.shape}"
        )
    if tokens.size and not (tokens.min() >= 0 and tokens.max() < 1 << 32):
        raise Unnameable(f"token ids from {tokens.min()} to {tokens.max()} do not fit into 4 bytes")
    return tokens.astype("<u4").tobytes()
