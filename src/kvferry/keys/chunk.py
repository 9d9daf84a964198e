"""Keys of the chunks of one request.

A chunk's KV depends on every token before it, so its key does too. Each key is a digest of the previous
chunk's key and of the chunk's own tokens. Equal keys mean equal content for all engines, parallel sizes,
layouts and block sizes. The namespace (`kvferry.keys.namespace`) covers the model and the format.

The digest is BLAKE2b with 32 bytes of output. It is cryptographic because tenants choose tokens. A tenant who
finds two prompts with one key can cause an engine to answer one prompt with the KV of the other. With 16
bytes of output, a search takes about 2^64 digests. An output of 32 bytes costs no more time than one of 16.
With chunks of 256 tokens, the keys of 128k tokens take 16 KiB. BLAKE2b is in Python's standard library. Its
`person` parameter separates the three uses below.

The digests have the following inputs. Integers are little-endian and unsigned. A ``text`` is its length in 8
bytes, then its UTF-8 encoding::

    root   person "kvferry-root-1"     chunk_tokens (8 bytes), lora (text), salt (text)
    chunk  person "kvferry-chunk-1"    the key before, or the root (32 bytes)
                                       count of tokens (8 bytes), their ids (4 bytes each)
                                       count of items that begin in it (8 bytes), then for each item:
                                       first token (8 bytes), tokens (8 bytes), identity (text)
    tail   person "kvferry-tail-1"     same as for a chunk, over the incomplete chunk after the last boundary

A *boundary* is the end of a whole chunk. A *tail* is the incomplete chunk after the last boundary. Every part
of variable length follows its length, so no two inputs give the same bytes. A tail never has the key of a
chunk.
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
    """Multimodal content in place of tokens: an image, a piece of audio, or embeddings.

    Attributes:
        start: position of the first placeholder token in the request.
        tokens: number of placeholder tokens, at least 1.
        identity: digest of the content, computed by the engine.
    """

    start: int
    tokens: int
    identity: str

    def __post_init__(self) -> None:
        if self.start < 0 or self.tokens < 1:
            raise Unnameable(f"item {self.identity!r}: {self.tokens} tokens from token {self.start}")


class ChunkKeys:
    """The keys of one request's chunks, extended as the request grows. Not thread-safe.

    A chunk is a fixed number of tokens. A chunk's key is a digest of all tokens up to the end of the chunk
    and of everything else that determines their KV. The object keeps the keys and the token ids, at 4 bytes
    per token. Tokens can only be appended. If tokens of a request change, create a new object.

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
        """Compute the keys of the chunks in the known part of a request, usually its prompt.

        Args:
            chunk_tokens: number of tokens in a whole chunk, at least 1.
            tokens: token ids, each below 2^32: a sequence or an integer array of shape (tokens,).
            items: multimodal items of the request, in any order. Items may lie beyond the tokens given so
                far. An item affects the key of the chunk in which it begins, and thus all later keys.
            lora: digest or other identity of the LoRA adapter's weights; empty without an adapter. A name is
                not enough, because two adapters can have equal names.
            salt: cache salt of the tenant; empty without a salt. Different salts give different keys.

        Raises:
            Unnameable: a token id does not fit into 4 bytes, or `chunk_tokens` is below 1.
        """
        if chunk_tokens < 1:
            raise Unnameable(f"chunks of {chunk_tokens} tokens")
        self.chunk_tokens = chunk_tokens
        self._ids = bytearray()
        self._items_by_chunk: dict[int, list[Item]] = {}
        for item in sorted(items):
            self._items_by_chunk.setdefault(item.start // chunk_tokens, []).append(item)
        root = _ROOT.copy()
        root.update(_encode_count(chunk_tokens) + _encode_text(lora) + _encode_text(salt))
        self._root = root.digest()
        self._chunks: list[bytes] = []
        self._digests = bytearray()  # the keys of `_chunks`, concatenated
        self.extend(tokens)

    def __len__(self) -> int:
        """Return the number of tokens that the request has so far."""
        return len(self._ids) // _ID_BYTES

    def extend(self, tokens: Sequence[int] | npt.NDArray[np.integer]) -> None:
        """Append tokens, and compute the keys of the chunks that they complete.

        Each completed chunk takes one pass of a Python loop: 2 us for a chunk of 256 tokens.

        Args:
            tokens: token ids, each below 2^32.

        Raises:
            Unnameable: a token id does not fit into 4 bytes. The keys then stay unchanged.
        """
        self._ids += _encode_ids(tokens)
        complete = len(self._ids) // (self.chunk_tokens * _ID_BYTES)
        if complete == len(self._chunks):
            return
        first, step = len(self._chunks), self.chunk_tokens * _ID_BYTES
        key, count, none = self._parent_key(first), _encode_count(self.chunk_tokens), _encode_items(())
        for index in range(first, complete):
            starting = self._items_by_chunk.get(index)
            digest = _CHUNK.copy()
            digest.update(key + count + self._ids[index * step : (index + 1) * step])
            digest.update(_encode_items(starting) if starting else none)
            key = digest.digest()
            self._chunks.append(key)
            self._digests += key

    def chunks(self, first: int = 0) -> list[bytes]:
        """Return the keys of the complete chunks, the first chunk first, each `KEY_BYTES` bytes long.

        Use `digests` for the same keys in one array.

        Args:
            first: index of the first chunk to return.
        """
        return self._chunks[first:]

    def digests(self, first: int = 0) -> npt.NDArray[np.uint8]:
        """Return the keys of the complete chunks as an array: uint8 of shape (chunks, KEY_BYTES).

        Args:
            first: index of the first chunk to return.
        """
        return np.frombuffer(self._digests[first * KEY_BYTES :], np.uint8).reshape(-1, KEY_BYTES)

    def chunk(self, number: int) -> bytes:
        """Return the key of a complete chunk.

        Args:
            number: index of the chunk in the request.
        """
        return self._chunks[number]

    def at(self, tokens: int) -> bytes:
        """Return the key of the last chunk of the request's first `tokens` tokens.

        If `tokens` is a multiple of `chunk_tokens`, this is a whole chunk. Otherwise it is an incomplete
        chunk (*tail*). A tail with more tokens has another key.

        Args:
            tokens: number of tokens from the start of the request.

        Raises:
            Unnameable: `tokens` is below 1 or exceeds the tokens of the request.
        """
        if not 0 < tokens <= len(self):
            raise Unnameable(f"a key at token {tokens} of a request of {len(self)}")
        index, count = divmod(tokens, self.chunk_tokens)
        if not count:
            return self._chunks[index - 1]
        found = [item for item in self._items_by_chunk.get(index, ()) if item.start < tokens]
        ids = self._ids[(tokens - count) * _ID_BYTES : tokens * _ID_BYTES]
        digest = _TAIL.copy()
        digest.update(self._parent_key(index) + _encode_count(count) + ids + _encode_items(found))
        return digest.digest()

    def _parent_key(self, index: int) -> bytes:
        """Return the key from which the key of chunk `index` is derived.

        This is the key of the previous chunk. The key of the first chunk is derived from a digest of the
        chunk size, the LoRA adapter and the cache salt.
        """
        return self._chunks[index - 1] if index else self._root


def _encode_count(number: int) -> bytes:
    """Encode a number as 8 bytes, little-endian."""
    return number.to_bytes(8, "little")


def _encode_text(text: str) -> bytes:
    """Encode text as its length in bytes followed by its UTF-8 bytes. Lone surrogates are allowed."""
    data = text.encode("utf-8", "surrogatepass")
    return _encode_count(len(data)) + data


def _encode_items(items: Sequence[Item]) -> bytes:
    """Encode multimodal items as bytes for a digest: the number of items, then each item."""
    parts = [
        _encode_count(item.start) + _encode_count(item.tokens) + _encode_text(item.identity) for item in items
    ]
    return _encode_count(len(items)) + b"".join(parts)


def _encode_ids(tokens: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
    """Encode token ids as little-endian integers of 4 bytes each.

    Raises:
        Unnameable: a token id is not a whole number from 0 to 2^32 - 1.
    """
    if isinstance(tokens, np.ndarray):
        return _encode_array(tokens)
    try:
        # Three times as fast as an ndarray of a list. It also refuses all but integers from 0 to 2^32 - 1.
        ids = array("I", tokens if isinstance(tokens, list) else list(tokens))
    except (OverflowError, TypeError) as error:
        raise Unnameable(f"token ids must be whole numbers from 0 to 2^32 - 1: {error}") from error
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def _encode_array(tokens: npt.NDArray[np.integer]) -> bytes:
    """Encode an array of token ids as little-endian integers of 4 bytes each.

    Raises:
        Unnameable: the array is not one-dimensional or not of integers, or a token id does not fit into 4
            bytes.
    """
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise Unnameable(
            f"token ids must be one row of whole numbers, not {tokens.dtype} of shape {tokens.shape}"
        )
    if tokens.size and not (tokens.min() >= 0 and tokens.max() < 1 << 32):
        raise Unnameable(f"token ids from {tokens.min()} to {tokens.max()} do not fit into 4 bytes")
    return tokens.astype("<u4").tobytes()
