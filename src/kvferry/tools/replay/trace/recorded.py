"""Traces that kvferry records in an engine.

The first line is a header, ``{"kvferry_trace": 1, "unit_tokens": 16, ...}``. Each further line is a request::

    {"arrival": 1764240000.25, "end": 1764240003.5, "prompt_tokens": 40, "output_tokens": 12,
     "keys": "AAAAAAAAAAEAAAAAAAAAAgAAAAAAAAAD", "prompt_key": "AAAAAAAAAAQ=", "session": "9f3c51d07b2e6a84",
     "tenant": "5f0c2a9b11de", "local_tokens": 16, "loaded": {"host": 16}}

Times are seconds since 1970. ``keys`` has 8 bytes, little-endian, for each whole unit of prompt and output,
in base64. ``prompt_key`` is the same for the whole prompt. An engine that is started again repeats the header
and adds its requests. If an engine is killed, the last line may be incomplete, and is left out.

Requests are in order of their ends, and a request may take any time, so the first to arrive can be the last
in the file. Therefore the file is read twice: first all arrivals, with 20 bytes of memory for each request,
then each request at its place. A compressed file or standard input is first copied to a temporary file.
"""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO

import msgspec
import numpy as np

from kvferry.common.errors import ConfigError
from kvferry.tools.replay.trace.base import (
    ArrivalTimes,
    FileTrace,
    OutputTokens,
    PromptTokens,
    RecordedHits,
    TraceFile,
    TraceRequest,
    UnitTokens,
    decode,
)

VERSION = 1
_HEADER = b'{"kvferry_trace"'
_KEY_BYTES = 8


class _Header(msgspec.Struct, frozen=True):
    kvferry_trace: int
    unit_tokens: UnitTokens


class _Arrival(msgspec.Struct, gc=False, frozen=True):
    arrival: float


class _Request(msgspec.Struct, gc=False, frozen=True):
    arrival: float
    prompt_tokens: PromptTokens
    output_tokens: OutputTokens
    keys: bytes
    prompt_key: bytes
    local_tokens: OutputTokens
    loaded: dict[str, OutputTokens]
    session: str = ""
    tenant: str = ""


class _Index:
    """The places of the requests of a file: times, and offsets (decompressed) and numbers of their lines."""

    def __init__(self) -> None:
        self.arrivals, self.offsets, self.numbers = array("d"), array("q"), array("I")

    def add(self, arrival: float, offset: int, number: int) -> None:
        self.arrivals.append(arrival)
        self.offsets.append(offset)
        self.numbers.append(number)


class RecordedTrace(FileTrace):
    """A trace that kvferry recorded."""

    def __init__(self, file: TraceFile) -> None:
        number, line = file.first_line()
        unit_tokens = _read_header(file, number, line)
        fields = decode(msgspec.json.Decoder(dict[str, object]), line, number, file)
        super().__init__(file, "recorded", unit_tokens, fields)
        self._is_torn = False
        self._share_done = 0.0

    def position(self) -> float:
        return self._file.read_bytes * self._share_done

    def notes(self) -> list[str]:
        torn = "the last line is incomplete and was left out; the engine was writing it"
        return [*super().notes(), *[torn] * self._is_torn]

    def _requests(self, arrivals: ArrivalTimes) -> Iterator[TraceRequest]:
        self._is_torn, self._share_done = False, 0.0
        decoder = msgspec.json.Decoder(_Request)
        with ExitStack() as stack:
            stream = self._file.open_seekable()
            copy = None
            if stream is None:
                with self._needs_room():
                    stream = copy = stack.enter_context(tempfile.TemporaryFile())
            else:
                stack.enter_context(stream)
            index = self._read_index(copy)
            order = np.argsort(np.frombuffer(index.arrivals), kind="stable")
            for done, place in enumerate(order, 1):
                number = index.numbers[place]
                record = decode(decoder, self._line_at(stream, index.offsets[place]), number, self._file)
                self._share_done = done / len(order)
                yield self._request(number, record, arrivals.arrival(number, record.arrival))

    def _read_index(self, copy: IO[bytes] | None) -> _Index:
        """Read all arrivals, and copy the decompressed trace to `copy` if it is given."""
        index = _Index()
        decoder = msgspec.json.Decoder(_Arrival)
        offset = 0
        for number, line in self._file.all_lines():
            if copy is not None:
                with self._needs_room():
                    copy.write(line)
            if line.startswith(_HEADER):
                self._check_header(number, line)
            elif not line.isspace():
                try:
                    index.add(decode(decoder, line, number, self._file).arrival, offset, number)
                except ConfigError:
                    # The engine was killed while it wrote the last line.
                    if line.endswith(b"\n"):
                        raise
                    self._is_torn = True
            offset += len(line)
        return index

    def _check_header(self, number: int, line: bytes) -> None:
        unit_tokens = _read_header(self._file, number, line)
        if unit_tokens != self.unit_tokens:
            raise self._file.refusal(
                number,
                f"the engine was started again with units of {unit_tokens} tokens, after {self.unit_tokens}",
                "divide the file before this line, and replay each trace by itself",
            )

    @contextmanager
    def _needs_room(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"{self.name} cannot be copied to a temporary file: {error.strerror}; free space, set TMPDIR "
                "to another directory, or save the trace to a file without compression"
            ) from error

    def _line_at(self, stream: IO[bytes], offset: int) -> bytes:
        try:
            stream.seek(offset)
            return stream.readline()
        except OSError as error:
            raise self._file.unreadable(error) from error

    def _request(self, number: int, record: _Request, arrival: float) -> TraceRequest:
        whole, rest = divmod(record.prompt_tokens, self.unit_tokens)
        most = (record.prompt_tokens + record.output_tokens) // self.unit_tokens
        units, more_bytes = divmod(len(record.keys), _KEY_BYTES)
        if more_bytes or not whole <= units <= most:
            raise self._file.refusal(
                number, f"keys has {len(record.keys)} bytes; expected {_KEY_BYTES} for each of {most} units"
            )
        if len(record.prompt_key) != _KEY_BYTES and rest:
            raise self._file.refusal(
                number, f"prompt_key has {len(record.prompt_key)} bytes; expected {_KEY_BYTES}"
            )
        return TraceRequest(
            arrival=arrival,
            prompt_tokens=record.prompt_tokens,
            output_tokens=record.output_tokens,
            unit_tokens=self.unit_tokens,
            prefix_ids=np.frombuffer(record.keys, "<u8").astype(np.uint64, copy=False),
            prompt_id=int.from_bytes(record.prompt_key[:_KEY_BYTES], "little"),
            session=record.session,
            tenant=record.tenant,
            recorded=RecordedHits(record.local_tokens, record.loaded),
        )


def _read_header(file: TraceFile, number: int, line: bytes) -> int:
    """Return the number of tokens per unit."""
    header = decode(msgspec.json.Decoder(_Header), line, number, file)
    if header.kvferry_trace != VERSION:
        raise file.refusal(
            number,
            f"the trace has version {header.kvferry_trace}; this release of kvferry reads version {VERSION}",
            "replay it with the release that recorded it",
        )
    return header.unit_tokens
