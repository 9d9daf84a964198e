"""The contract of traces. Each format has a module of its own with a subclass of `Trace`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from kvferry.tools.replay.trace.request import TraceRequest
from kvferry.tools.replay.trace.trace_file import TraceFile
from kvferry.terminal import shown
from kvferry.units import counted

# A prompt or an output has at most this many tokens. It bounds the memory that a wrong number in a file can
# take.
MAX_TOKENS = 1 << 24

ONLY_LENGTHS = (
    "has only lengths, so it cannot tell which prompts share a prefix; give a trace with hash_ids, or a "
    "table with a column session"
)

MAX_LATE_SECONDS = 60.0
# A larger number of seconds is a time in another unit.
MAX_SECONDS = 1e11

PromptTokens: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
OutputTokens: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
UnitTokens: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]

BATCH_REQUESTS = 512
_BATCH_UNITS = 1 << 16
_SHOWN_CHARACTERS = 100
_Item = TypeVar("_Item")


class Trace(ABC):
    """Requests in order of arrival. Each iteration begins with the first one.

    Attributes:
        name: name for the user, safe to print on a terminal.
        unit_tokens: number of tokens per unit of all requests.
        length: value of `position` at the end; None if the requests can be iterated only once.
        header: what is known about all requests; empty except for recorded traces.
        tells_prefixes: False if only lengths are known, so that no prompts are known to share a prefix.
    """

    name: str
    unit_tokens: int
    length: float | None
    header: Mapping[str, object]
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
        format: ``mooncake``, ``bailian``, ``blocks``, ``csv`` or ``recorded``.
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
        late = self._arrivals.late
        unsorted = (
            f"not in order of arrival: {counted(late, 'request')}, which arrive with the request before"
        )
        return [*[unsorted] * bool(late), *[f"it {ONLY_LENGTHS}"] * (not self.tells_prefixes)]

    @abstractmethod
    def _requests(self, arrivals: ArrivalTimes) -> Iterator[TraceRequest]:
        """Read the file from its beginning."""


class ArrivalTimes:
    """Converts the times in a file to seconds since the file's first request, in ascending order.

    Attributes:
        late: number of requests whose times were replaced so far.
    """

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
        elif found >= self._newest - MAX_LATE_SECONDS:
            self.late += 1
        else:
            raise self._file.refusal(
                number,
                f"the request arrives {self._newest - found:,.1f} s before an earlier line's; at most "
                f"{MAX_LATE_SECONDS:g} s are expected",
                "sort the trace by arrival",
            )
        return self._newest


def batches(
    items: Iterable[_Item],
    units: Callable[[_Item], int],
    max_units: int = _BATCH_UNITS,
    max_items: int = BATCH_REQUESTS,
) -> Iterator[list[_Item]]:
    """Group consecutive items, so that the identities of many short requests are computed at once.

    Args:
        units: returns the number of units of an item.
        max_units: number of units at which a group ends.
    """
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
    """Decode a line of JSON.

    Raises:
        ConfigError: the line is not of the expected type.
    """
    try:
        return decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        text = shown(line.decode(errors="replace").strip(), _SHOWN_CHARACTERS)
        raise file.refusal(number, f"{error}, in {text}") from error
