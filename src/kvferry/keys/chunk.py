"""Keys of the chunks of one request, and the digest of a prompt.

A chunk's KV depends on every token before it, so its key does too. Each key is a digest of the previous
chunk's key and of the chunk's own tokens. Equal keys mean equal content for all engines, parallel sizes,
layouts and block sizes. The namespace (`kvferry.keys.namespace`) covers the model and the format.

The digest is BLAKE2b with 32 bytes of output. It is cryptographic because tenants choose tokens. A tenant who
finds two prompts with one key can cause an engine to answer one prompt with the KV of the other. With 16
bytes of output, a search takes about 2^64 digests. An output of 32 bytes costs no more time. With chunks of
256 tokens, the keys of 128k tokens take 16 KiB.

The digests have the following inputs. Integers are little-endian and unsigned. A ``text`` is its length in 8
bytes, then its UTF-8 encoding::

    root   person "kvferry-root-1"     chunk_tokens (8 bytes), lora (text), salt (text)
    chunk  person "kvferry-chunk-1"    the key before, or the root (32 bytes)
                                       count of tokens (8 bytes), their ids (4 bytes each)
                                       count of items that begin in it (8 bytes), then for each item:
                                       first token (8 bytes), tokens (8 bytes), identity (text)
    tail   person "kvferry-tail-1"     same as for a chunk, over the incomplete chunk at the end

Every part of variable length follows its length, so no two inputs give the same bytes. A tail never has the
key of a chunk.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from kvferry.common.errors import Unnameable
from kvferry.keys.tenant import NOBODY

KEY_BYTES = 32

_ID_BYTES = 4
_ROOT = blake2b(digest_size=KEY_BYTES, person=b"kvferry-root-1")
_CHUNK = blake2b(digest_size=KEY_BYTES, person=b"kvferry-chunk-1")
_TAIL = blake2b(digest_size=KEY_BYTES, person=b"kvferry-tail-1")


@dataclass(frozen=True, slots=True, order=True)
class Item:
    """Multimodal content in place of tokens: an image, a piece of audio, or embeddings."""

    start: int  # position of the first placeholder token in the request
    tokens: int  # number of placeholder tokens, at least 1
    identity: str  # digest of the content, computed by the engine

    def __post_init__(self) -> None:
        if self.start < 0 or self.tokens < 1:
            raise Unnameable(f"item {self.identity!r}: {self.tokens} tokens from token {self.start}")


class ChunkKeys:
    """The keys of one request's chunks, extended as the request grows. Not thread-safe.

    The object keeps the keys and the token ids, at 4 bytes per token. Tokens can only be appended.

    >>> keys = ChunkKeys(4, range(6))
    >>> len(keys.chunks()), keys.at(4) == keys.chunks()[0], keys.at(6) == keys.chunks()[0]
    (1, True, False)
    >>> keys.extend([6, 7])
    >>> len(keys.chunks()), keys.chunks() == ChunkKeys(4, range(8)).chunks()
    (2, True)

    Args:
        tokens: token ids, each below 2^32: a sequence or an integer array of shape (tokens,).
        items: multimodal items of the request, in any order. Items may lie beyond the tokens given so far. An
            item affects the key of the chunk in which it begins, and thus all later keys.
        lora: digest or other identity of the LoRA adapter's weights; empty without an adapter. A name is not
            enough, because two adapters can have equal names.
        salt: cache salt of the tenant; empty without a salt.
        tenant: result of `tenant_of`, which the keys of `PromptChunks` contain.

    Raises:
        Unnameable: a token id does not fit into 4 bytes, or `chunk_tokens` is below 1.
    """

    def __init__(
        self,
        chunk_tokens: int,
        tokens: Sequence[int] | npt.NDArray[np.integer] = (),
        *,
        items: Iterable[Item] = (),
        lora: str = "",
        salt: str = "",
        tenant: bytes = NOBODY,
    ) -> None:
        if chunk_tokens < 1:
            raise Unnameable(f"chunks of {chunk_tokens} tokens")
        self.chunk_tokens, self.tenant = chunk_tokens, tenant
        self._ids = bytearray()
        self._items_by_chunk: dict[int, list[Item]] = {}
        for item in sorted(items):
            self._items_by_chunk.setdefault(item.start // chunk_tokens, []).append(item)
        root = _ROOT.copy()
        root.update(_encode_count(chunk_tokens) + _encode_text(lora) + _encode_text(salt))
        self._keys = [root.digest()]  # the root, then the key of each complete chunk
        self._digests = bytearray()  # the keys of the chunks, concatenated
        self.extend(tokens)

    def __len__(self) -> int:
        """Number of tokens that the request has so far."""
        return len(self._ids) // _ID_BYTES

    def extend(self, tokens: Sequence[int] | npt.NDArray[np.integer]) -> None:
        """Append tokens, or raise Unnameable and change nothing. The keys of 256 tokens take 2 us."""
        self._ids += _encode_ids(tokens)
        complete = len(self._ids) // (self.chunk_tokens * _ID_BYTES)
        first, step = len(self._keys) - 1, self.chunk_tokens * _ID_BYTES
        if complete == first:
            return
        # What is the same for all chunks is encoded once: a long prompt has thousands.
        key, count, none = self._keys[-1], _encode_count(self.chunk_tokens), _encode_items(())
        for index in range(first, complete):
            starting = self._items_by_chunk.get(index)
            digest = _CHUNK.copy()
            digest.update(key + count + self._ids[index * step : (index + 1) * step])
            digest.update(_encode_items(starting) if starting else none)
            key = digest.digest()
            self._keys.append(key)
            self._digests += key

    def chunks(self, first: int = 0) -> list[bytes]:
        """Return the keys of the complete chunks from index `first` on."""
        return self._keys[first + 1 :]

    def digests(self, first: int = 0) -> npt.NDArray[np.uint8]:
        """Return the same keys as `chunks` as an array: uint8 of shape (chunks, KEY_BYTES)."""
        return np.frombuffer(self._digests[first * KEY_BYTES :], np.uint8).reshape(-1, KEY_BYTES)

    def at(self, tokens: int) -> bytes:
        """Return the key of the last chunk, maybe a tail, of the request's first `tokens` tokens."""
        if not 0 < tokens <= len(self):
            raise Unnameable(f"a key at token {tokens} of a request of {len(self)}")
        index, count = divmod(tokens, self.chunk_tokens)
        if not count:
            return self._keys[index]
        # A shorter prompt, which lacks the item, must have the same key.
        found = [item for item in self._items_by_chunk.get(index, ()) if item.start < tokens]
        ids = self._ids[(tokens - count) * _ID_BYTES : tokens * _ID_BYTES]
        digest = _TAIL.copy()
        digest.update(self._keys[index] + _encode_count(count) + ids + _encode_items(found))
        return digest.digest()


def _encode_count(number: int) -> bytes:
    return number.to_bytes(8, "little")


def _encode_text(text: str) -> bytes:
    # A cache salt from JSON may have a lone surrogate.
    data = text.encode("utf-8", "surrogatepass")
    return _encode_count(len(data)) + data


def _encode_items(items: Sequence[Item]) -> bytes:
    data = _encode_count(len(items))
    for item in items:
        data += _encode_count(item.start) + _encode_count(item.tokens) + _encode_text(item.identity)
    return data


def _encode_ids(tokens: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
    """Encode token ids as little-endian integers of 4 bytes each, or raise Unnameable."""
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
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise Unnameable(
            f"token ids must be one row of whole numbers, not {tokens.dtype} of shape {tokens.shape}"
        )
    if tokens.size and not (tokens.min() >= 0 and tokens.max() < 1 << 32):
        raise Unnameable(f"token ids from {tokens.min()} to {tokens.max()} do not fit into 4 bytes")
    return tokens.astype("<u4").tobytes()


def prompt_digest(tokens: Sequence[int], extras: Sequence[str] = ()) -> str:
    """Return the digest of token ids and of other inputs that determine the KV: BLAKE2b, 32 hex digits.

    `extras` are the other inputs in order, such as LoRA adapter, multimodal hashes or cache salt.

    >>> prompt_digest([1, 2, 3]) == prompt_digest((1, 2, 3))
    True
    >>> prompt_digest([1, 2, 3]) == prompt_digest([1, 2])
    False
    """
    digest = blake2b(digest_size=16, person=b"kvferry-prompt")
    # Each part follows its length. So tokens cannot be read as an extra, nor two extras as one.
    digest.update(_encode_count(len(tokens)) + _encode_ids(tokens))
    for extra in extras:
        digest.update(_encode_text(extra))
    return digest.hexdigest()
