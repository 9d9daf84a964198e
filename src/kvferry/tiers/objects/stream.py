"""A stream of the bytes of an object, which arrives in pieces."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.errors import ChunkError


class ObjectStream:
    """A reader for the content of an object that arrives in pieces.

    First read from the beginning of the content, then fill memory with the rest. Not thread-safe.

    Args:
        pieces: iterator over the pieces of the content, in order.

    >>> stream = ObjectStream(iter([b"head", b"er body"]))
    >>> body = bytearray(4)
    >>> stream.read(0, 6)
    b'header'
    >>> stream.fill(7, memoryview(body))  # the body begins at offset 7, after the space
    >>> body
    bytearray(b'body')
    """

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._start = bytearray()

    def read(self, offset: int, size: int) -> bytes:
        """Return the `size` bytes at `offset` of the object, or fewer if the object ends earlier.

        All bytes received so far stay in memory, so earlier offsets can be read again.
        """
        while len(self._start) < offset + size:
            piece = next(self._pieces, None)
            if piece is None:
                break
            self._start += piece
        return bytes(memoryview(self._start)[offset : offset + size])

    def fill(self, offset: int, into: memoryview) -> None:
        """Fill `into` with all bytes of the object from `offset` to the end.

        `read` must not be called afterwards.

        Args:
            offset: byte offset in the object. All bytes before it must have been received by `read`.
            into: writable memory for the remaining bytes.

        Raises:
            ChunkError: the number of remaining bytes is not the length of `into`.
        """
        done = 0
        for piece in self._after(offset):
            end = done + len(piece)
            if end > len(into):
                raise ChunkError(f"more than the {len(into)} bytes of a body")
            into[done:end] = piece
            done = end
        if done < len(into):
            raise ChunkError(f"a body that ends after {done} of {len(into)} bytes")

    def _after(self, offset: int) -> Iterator[bytes | memoryview]:
        """Yield the bytes of the object from `offset` to the end, in pieces."""
        yield memoryview(self._start)[offset:]
        yield from self._pieces
