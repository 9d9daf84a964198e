"""Lines of a trace file. Files compressed with gzip are decompressed, whatever their names are."""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO

from kvferry.errors import ConfigError
from kvferry.terminal import printable, shown

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

STANDARD_INPUT = "-"
# A file without line breaks must not fill the memory.
_MAX_LINE_BYTES = 64 << 20
_BUFFER_BYTES = 256 << 10
_GZIP = b"\x1f\x8b"


class TraceFile:
    """A trace file, or standard input (``-``).

    A regular file is opened anew for each reading. Standard input and pipes can be read once.

    Attributes:
        name: name of the file, safe to print on a terminal.
        size_bytes: size of the file, compressed if it is; None for standard input and pipes.
        read_bytes: number of bytes, compressed if the file is, that the latest reading has read so far.

    Raises:
        ConfigError: there is no such file, it cannot be examined, or it is a directory.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = None if str(path) == STANDARD_INPUT else Path(path)
        self.name = printable(self._path.name) if self._path else "standard input"
        self.size_bytes = None if self._path is None else self._size(self._path)
        self.read_bytes = 0
        self._is_compressed = self._is_marked = False
        # The rest of what can be read once.
        self._rest: Iterator[tuple[int, bytes]] | None = self._read()

    def first_line(self) -> tuple[int, bytes]:
        """Return the first line that is not blank, and its number. A later reading yields this line again.

        Raises:
            ConfigError: the file cannot be read, or has no such line.
        """
        lines = self.all_lines()
        read = []
        for number, line in lines:
            read.append((number, line))
            if not line.isspace():
                break
        else:
            raise ConfigError(f"{self.name} is empty; give a trace with at least one request")
        if self.size_bytes is None:
            self._rest = chain(read, lines)
        return read[-1]

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Read the lines that are not blank, with their line breaks, and their numbers from 1.

        Raises:
            ConfigError: the file cannot be read, or only once, and was read before. The iterator raises it
                too.
        """
        return (each for each in self.all_lines() if not each[1].isspace())

    def all_lines(self) -> Iterator[tuple[int, bytes]]:
        """Read the file as `lines` does, but return blank lines too."""
        if self.size_bytes is not None:
            return self._read()
        rest, self._rest = self._rest, None
        if rest is None:
            raise ConfigError(f"{self.name} can be read only once; save it to a file and give its path")
        return rest

    def open_seekable(self) -> IO[bytes] | None:
        """Open the file to read lines at any place. Call this after `first_line`.

        None if the file is compressed, begins with a byte-order mark, or is standard input or a pipe.

        Raises:
            ConfigError: the file cannot be opened.
        """
        if self._path is None or self.size_bytes is None or self._is_compressed or self._is_marked:
            return None
        try:
            return self._path.open("rb")
        except OSError as error:
            raise self.unreadable(error) from error

    def refusal(self, number: int, problem: str, remedy: str = "correct or remove this line") -> ConfigError:
        """Return the error for a line that cannot be used."""
        return ConfigError(f"{self.name}, line {number}: {problem}; {remedy}")

    def unreadable(self, error: Exception) -> ConfigError:
        """Return the error for a file that the operating system or the decompression refuses to read."""
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        return ConfigError(f"{self.name} cannot be read: {reason}; give a complete and readable file")

    def _size(self, path: Path) -> int | None:
        try:
            size = path.stat().st_size
        except OSError as error:
            raise self.unreadable(error) from error
        if path.is_dir():
            raise ConfigError(f"{shown(str(path))} is a directory; give the path of a trace file")
        return size if path.is_file() else None

    def _read(self) -> Iterator[tuple[int, bytes]]:
        with ExitStack() as stack:
            try:
                source = stack.enter_context(self._path.open("rb")) if self._path else sys.stdin.buffer
                self.read_bytes = 0
                stream = io.BufferedReader(_CountingReader(source, self), _BUFFER_BYTES)
                self._is_compressed = stream.peek(len(_GZIP)).startswith(_GZIP)
                if self._is_compressed:
                    stream = io.BufferedReader(gzip.GzipFile(fileobj=stream), _BUFFER_BYTES)  # type: ignore[arg-type]
                self._is_marked = stream.peek(len(BOM_UTF8)).startswith(BOM_UTF8)
                stream.read(len(BOM_UTF8) if self._is_marked else 0)
                yield from self._split(stream)
            except (EOFError, OSError, zlib.error) as error:
                raise self.unreadable(error) from error

    def _split(self, stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
        number = 1
        while line := stream.readline(_MAX_LINE_BYTES):
            if len(line) == _MAX_LINE_BYTES:
                raise self.refusal(
                    number,
                    f"the line has {_MAX_LINE_BYTES >> 20} MiB or more; a request has one shorter line",
                    "give a file of requests, one on each line",
                )
            yield number, line
            number += 1


class _CountingReader(io.RawIOBase):
    """A stream that counts the bytes read from it in a `TraceFile`."""

    def __init__(self, source: BinaryIO, file: TraceFile) -> None:
        self._source = source
        self._file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        with memoryview(buffer) as view:
            data = self._source.read1(len(view))  # type: ignore[attr-defined]
            view[: len(data)] = data
        self._file.read_bytes += len(data)
        return len(data)
