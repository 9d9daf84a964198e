"""An object of object storage whose content arrives in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from kvferry.errors import ChunkError


@dataclass(slots=True)
class OpenObject:
    """An object whose content is being received: read its beginning, then fill memory with all the rest.

    Not thread-safe.

    >>> found = OpenObject(11, "", iter([b"head", b"er body"]))
    >>> body = bytearray(4)
    >>> found.read(0, 6)
    b'header'
    >>> found.fill(7, memoryview(body))  # the body begins at offset 7, after the space
    >>> body
    bytearray(b'body')
    """

    size: int  # length of the object in bytes
    etag: str  # tag that changes with the content; empty if the store has none
    # The content in order. It raises `Unavailable` if the request fails. A caller may stop early: then the
    # store sends no more than the data that is already on its way.
    pieces: Iterator[bytes]
    _start: bytearray = field(default_factory=bytearray, init=False, repr=False)

    def read(self, offset: int, size: int) -> bytes:
        """Return the `size` bytes at `offset`, or fewer if the object ends earlier.

        All bytes received so far stay in memory, so earlier offsets can be read again.
        """
        while len(self._start) < offset + size:
            piece = next(self.pieces, None)
            if piece is None:
                break
            self._start += piece
        return bytes(memoryview(self._start)[offset : offset + size])

    def fill(self, offset: int, into: memoryview) -> None:
        """Fill `into` with all bytes from `offset`, up to which `read` has received all. Do not `read` later.

        Raises:
            ChunkError: the number of remaining bytes is not the length of `into`.
        """
        done = 0
        received: list[bytes | memoryview] = [memoryview(self._start)[offset:]]
        for piece in chain(received, self.pieces):
            end = done + len(piece)
            if end > len(into):
                raise ChunkError(f"more than the {len(into)} bytes of a body")
            into[done:end] = piece
            done = end
        if done < len(into):
            raise ChunkError(f"a body that ends after {done} of {len(into)} bytes")
