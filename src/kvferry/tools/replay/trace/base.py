"""The contract of traces, and what their formats share: identities of content, files of lines, arrival times.

Each format has a module of its own with a subclass of `FileTrace`.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import sys
import zlib
from abc import ABC, abstractmethod
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, BinaryIO, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.common.errors import ConfigError
from kvferry.common.text import printable, shown
from kvferry.common.units import counted

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


# Identities of content, uint64. Equal identities mean equal tokens.
Ids: TypeAlias = npt.NDArray[np.uint64]

# Numbers of SplitMix64. Multiples of each are far apart.
GOLDEN, FIRST, SECOND = (
    np.uint64(value) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)

# A file without line breaks must not fill the memory.
MAX_LINE_BYTES = 64 << 20
_BUFFER_BYTES = 256 << 10
_GZIP = b"\x1f\x8b"

# A prompt or an output has at most this many tokens. It bounds the memory that a wrong number in a file can
# take.
MAX_TOKENS = 1 << 24
PromptTokens: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
OutputTokens: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
UnitTokens: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]

_MAX_LATE_SECONDS = 60.0
# A larger number of seconds is a time in another unit.
MAX_SECONDS = 1e11
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]

BATCH_REQUESTS = 512
_BATCH_UNITS = 1 << 16
_SHOWN_CHARACTERS = 100
_Item = TypeVar("_Item")

UNTIMED_SESSIONS = (
    "the trace does not say when its sessions begin; they begin one second apart, or as many at once as "
    "--concurrency says"
)
ONLY_LENGTHS = (
    "has only lengths, so it cannot tell which prompts share a prefix; give a trace with hash_ids, or a "
    "table with a column session"
)


@dataclass(frozen=True, slots=True)
class RecordedHits:
    """Prompt tokens that an engine found in its own prefix cache, and loaded from each tier by name."""

    local_tokens: int
    loaded_tokens: Mapping[str, int]


_NO_TURNS: Iterator[TraceRequest] = iter(())


class Branch(NamedTuple):
    """Turns that begin when a turn has ended, such as those of a sub-agent. Each waits for the one before."""

    turns: Iterator[TraceRequest]
    is_awaited: bool  # True if the session goes on only when the branch has ended


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceRequest:
    """A request of a trace. Its content is divided into units of equal length."""

    # Seconds from the start of the trace to the arrival of the request. Unknown in a later turn of a session,
    # which arrives `delay` seconds after all that it waits for has ended.
    arrival: float = 0.0
    delay: float = 0.0
    prompt_tokens: int
    output_tokens: int
    unit_tokens: int
    # Identity of the prefix that ends at each whole unit, uint64 of shape (units,). Equal identities mean
    # that all tokens so far are equal. The units may include generated tokens.
    prefix_ids: Ids
    prompt_id: int  # identity of the whole prompt. Used only if the prompt ends inside a unit.
    session: str = ""
    tenant: str = ""  # requests of different tenants share no content. Empty if the trace names none
    recorded: RecordedHits | None = None
    # Turns that follow the first one of a session. They can be iterated once.
    later: Iterator[TraceRequest] = _NO_TURNS
    branches: Sequence[Branch] = ()

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 0 or self.unit_tokens < 1:
            raise ConfigError(
                f"a request has {self.prompt_tokens} prompt tokens, {self.output_tokens} output tokens, units"
                f" of {self.unit_tokens} tokens; prompts and units have at least 1"
            )
        if len(self.prefix_ids) < self.prompt_tokens // self.unit_tokens:
            raise ConfigError(
                f"a prompt of {self.prompt_tokens} tokens has {len(self.prefix_ids)} identities for units of "
                f"{self.unit_tokens}; give one for each whole unit"
            )


def identity(text: str) -> int:
    """Return an identity for a name: the first 64 bits of its BLAKE2b digest."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def mixed(values: Ids) -> Ids:
    """Return a digest of each value: the finalizer of SplitMix64, a bijection without visible pattern.

    Source: Guy Steele, Doug Lea, Christine Flood, "Fast splittable pseudorandom number generators", OOPSLA
    2014.
    """
    found = values + GOLDEN
    found = (found ^ (found >> _SHIFTS[0])) * FIRST
    found = (found ^ (found >> _SHIFTS[1])) * SECOND
    return found ^ (found >> _SHIFTS[2])


def chained_each(ids: Ids, counts: npt.NDArray[np.int64]) -> Ids:
    """Return identities of prefixes, uint64, from the identity of each unit's own content.

    Each result depends on all units of its request up to its own, and on their order.

    >>> a, b, c, d = chained_each(np.array([7, 8, 7, 9], np.uint64), np.array([2, 2]))
    >>> a == c, b == d
    (np.True_, np.False_)

    Args:
        ids: identity of each unit's own content, of all requests one after the other, shape (units,).
        counts: number of units of each request, int64 of shape (requests,).
    """
    # One array for many short requests takes a tenth of the time.
    places = places_within(counts) + 1
    sums = mixed(mixed(ids) + places.astype(np.uint64) * FIRST).cumsum(dtype=np.uint64)
    earlier = np.concatenate([np.zeros(1, np.uint64), sums])[counts.cumsum() - counts]
    found: Ids = sums - np.repeat(earlier, counts)
    return found


def places_within(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the place of each element in its group, counted from 0, for groups one after the other.

    >>> places_within(np.array([2, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    starts = counts.cumsum() - counts
    return np.arange(counts.sum(), dtype=np.int64) - np.repeat(starts, counts)


class TraceFile:
    """A trace file, or standard input (``-``).

    A regular file is opened anew for each reading. Standard input and pipes can be read once.

    Attributes:
        size_bytes: size of the file, compressed if it is; None for standard input and pipes.
        read_bytes: number of bytes, compressed if the file is, that the latest reading has read so far.

    Raises:
        ConfigError: there is no such file, it cannot be examined, or it is a directory.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = None if str(path) == "-" else Path(path)
        self.name = printable(self._path.name) if self._path else "standard input"
        self.size_bytes = self._size(self._path) if self._path else None
        self.read_bytes = 0
        self._is_compressed = self._is_marked = False
        # The rest of what can be read once.
        self._rest: Iterator[tuple[int, bytes]] | None = self._read()

    def first_line(self) -> tuple[int, bytes]:
        """Return the first line that is not blank, and its number. A later reading yields this line again."""
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
        """Read the lines that are not blank, with their line breaks, and their numbers from 1."""
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
        while line := stream.readline(MAX_LINE_BYTES):
            if len(line) == MAX_LINE_BYTES:
                raise self.refusal(
                    number,
                    f"the line has {MAX_LINE_BYTES >> 20} MiB or more; a request has one shorter line",
                    "give a file of requests, one on each line",
                )
            yield number, line
            number += 1


class _CountingReader(io.RawIOBase):
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


class Trace(ABC):
    """The first turns of sessions, or requests with times, in order of arrival.

    Each iteration begins with the first one.

    Attributes:
        tells_prefixes: False if only lengths are known, so that no prompts are known to share a prefix.
    """

    name: str
    unit_tokens: int
    length: float | None  # value of `position` at the end; None if the requests can be iterated only once
    header: Mapping[str, object]  # what is known about all requests; empty except for recorded traces
    tells_prefixes = True

    @abstractmethod
    def __iter__(self) -> Iterator[TraceRequest]: ...

    @abstractmethod
    def position(self) -> float:
        """Return how far the latest iteration is, for comparison with `length`."""

    def notes(self) -> list[str]:
        """Return what the latest iteration changed or assumed, so far, as sentences for the user."""
        return []


class FileTrace(Trace):
    """The requests of a trace file.

    Each iteration reads the file from its beginning, a small part at a time, and raises `ConfigError` at the
    first line that cannot be used. Standard input and pipes can be iterated once.

    Attributes:
        length: size of the file in bytes, compressed if it is; None for standard input and pipes.
    """

    def __init__(
        self, file: TraceFile, format_name: str, unit_tokens: int, header: Mapping[str, object] | None = None
    ) -> None:
        self.name = file.name
        self.format = format_name
        self.unit_tokens = unit_tokens
        self.length = file.size_bytes
        self.header = header or {}
        self._file = file
        self._arrivals = ArrivalTimes(file)

    def __iter__(self) -> Iterator[TraceRequest]:
        self._arrivals = ArrivalTimes(self._file)
        return self._requests(self._arrivals)

    def position(self) -> float:
        return self._file.read_bytes

    def notes(self) -> list[str]:
        found = [] if self.tells_prefixes else [f"it {ONLY_LENGTHS}"]
        if late := self._arrivals.late:
            found.insert(
                0,
                f"not in order of arrival: {counted(late, 'request')}, which arrive with the request before",
            )
        return found

    @abstractmethod
    def _requests(self, arrivals: ArrivalTimes) -> Iterator[TraceRequest]:
        """Read the file from its beginning."""


class ArrivalTimes:
    """Converts the times in a file to seconds since the file's first request, in ascending order."""

    def __init__(self, file: TraceFile) -> None:
        self.late = 0
        self._file = file
        self._first: float | None = None
        self._newest = 0.0

    def arrival(self, number: int, seconds: float) -> float:
        """Return the arrival of the next request of the file, from its time in seconds.

        Raises:
            ConfigError: the time is out of bounds, or more than 60 s before the latest one so far.
        """
        if not -MAX_SECONDS <= seconds <= MAX_SECONDS:
            raise self._file.refusal(
                number,
                f"the request arrives at {seconds:g} s; at most {MAX_SECONDS:g} s are expected",
                "convert the times of this trace to the unit of its format",
            )
        if self._first is None:
            self._first = seconds
        found = seconds - self._first
        if found >= self._newest:
            self._newest = found
        # Logs of busy servers are slightly unsorted. A file with larger steps back is not sorted by arrival,
        # or contains several traces.
        elif found >= self._newest - _MAX_LATE_SECONDS:
            self.late += 1
        else:
            raise self._file.refusal(
                number,
                f"the request arrives {self._newest - found:,.1f} s before an earlier line's; at most "
                f"{_MAX_LATE_SECONDS:g} s are expected",
                "sort the trace by arrival",
            )
        return self._newest


def batches(
    items: Iterable[_Item],
    units: Callable[[_Item], int],
    max_units: int = _BATCH_UNITS,
    max_items: int = BATCH_REQUESTS,
) -> Iterator[list[_Item]]:
    """Group consecutive items, so that the identities of many short requests are computed at once."""
    batch: list[_Item] = []
    total = 0
    for item in items:
        batch.append(item)
        total += units(item)
        if total >= max_units or len(batch) >= max_items:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def decode(decoder: msgspec.json.Decoder[_Item], line: bytes, number: int, file: TraceFile) -> _Item:
    """Decode a line of JSON. Raise ConfigError if it is not of the expected type."""
    try:
        return decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        text = shown(line.decode(errors="replace").strip(), _SHOWN_CHARACTERS)
        raise file.refusal(number, f"{error}, in {text}") from error
