"""Record the requests of an engine as a trace for `kvferry replay`: lengths, times and keys, never tokens.

A recording is a file of JSON lines. docs/control.md describes them. The engine's thread only copies the
tokens of a request that has ended. Another thread computes the keys and writes the line.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from io import FileIO
from pathlib import Path
from typing import Any

from kvferry.common.errors import ConfigError, Unnameable
from kvferry.common.files import open_private
from kvferry.common.machine import fcntl
from kvferry.connector.content import Adapters, keys_of, tenant_of_request
from kvferry.connector.engine import EngineFacts, Request
from kvferry.connector.events import Arrived, Event, Finished, LoadBegan, Scheduled, log_errors, short_id
from kvferry.connector.hints import session_of
from kvferry.keys import ChunkKeys
from kvferry.keys.tenant import NOBODY
from kvferry.observe.line_file import LineFile

logger = logging.getLogger(__name__)

SMALLEST_UNIT_TOKENS = 16
"""Minimum number of tokens per key. Smaller units would make larger files."""
DIGEST_BYTES = 8
"""Number of bytes of a key in a recording: the first bytes of the digest."""
MOST_FILES = 100
"""Largest number of files with one name that recordings go to."""
# All keys depend on it, so that a recording has no key of a tier's chunk.
_EPOCH = "kvferry-recording-1 "
# Memory of a token that waits to be written: a pointer and a Python integer.
_TOKEN_BYTES = 40
_LONGEST_HEADER = 1 << 20
_PIECE_BYTES = 1 << 16


def open_recording(path: str, header: Mapping[str, Any], engine_index: int = 0) -> tuple[str, FileIO]:
    """Open a recording for appending, without a buffer, write the header, and return its path and the file.

    No other engine opens the file as long as this process has it open.

    Raises:
        ConfigError: each of `MOST_FILES` names has a file with another header, or is in use.
        OSError: the file cannot be opened or written, or cannot be locked.
        ValueError: no file can have this path.
    """
    line = json.dumps(header).encode() + b"\n"
    for candidate in _candidates(path, engine_index):
        file = open(candidate, "a+b", buffering=0, opener=open_private)  # noqa: SIM115 - the caller closes it
        try:
            # The lock comes first: another engine may be writing its header.
            if _lock(file) and _goes_on(file, line):
                file.write(line)
                return candidate, file
        except BaseException:
            file.close()
            raise
        file.close()
    raise ConfigError(
        f"{MOST_FILES} files beside {path} are recordings with other headers, or in use; name another file"
    )


def _candidates(path: str, engine_index: int) -> Iterator[str]:
    whole = Path(path)
    stem = whole.stem + (f"-dp{engine_index}" if engine_index else "")
    for number in range(1, MOST_FILES + 1):
        yield str(whole.with_name(f"{stem}{f'-{number}' if number > 1 else ''}{whole.suffix}"))


def _lock(file: FileIO) -> bool:
    """Lock a file until it is closed. Return False if another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _goes_on(file: FileIO, header: bytes) -> bool:
    """Return True if a locked file is empty or begins with this header. Removes half a last line from it."""
    if not os.fstat(file.fileno()).st_size:
        return True
    file.seek(0)
    if file.read(_LONGEST_HEADER).partition(b"\n")[:2] != (header[:-1], b"\n"):
        return False
    # An engine may have been killed while it wrote. Read from the end, because recordings are large.
    whole = end = file.seek(0, os.SEEK_END)
    while True:
        begin = max(0, end - _PIECE_BYTES)
        file.seek(begin)
        found = file.read(end - begin).rfind(b"\n")
        if found >= 0:
            break
        end = begin
    if begin + found + 1 < whole:
        file.truncate(begin + found + 1)
    return True


@dataclass(slots=True)
class _Known:
    """The history of a request that has not ended."""

    arrival: float  # monotonic seconds
    # Number of tokens that the engine's own prefix cache had when the request was first admitted; None before
    # that.
    local_tokens: int | None = None
    # Number of loaded tokens by place; None until the engine schedules the request.
    loaded: Counter[str] | None = None


def recording_header(
    engine: EngineFacts, *, labels: Sequence[str], chunking: tuple[int, int, int | None] | None, model: str
) -> dict[str, Any]:
    """Return the first line of a recording: facts about the engine, made of JSON types.

    Args:
        chunking: number of tokens per chunk of the tiers, between kept snapshots, and before the first
            snapshot for shared prefixes (0 for none); None without tiers.
    """
    chunk, snapshot, first = chunking or (None, None, None)
    blocks = [group.block_tokens for group in engine.groups]
    return {
        "kvferry_trace": 1,
        # The largest unit of which blocks and chunks are multiples.
        "unit_tokens": max(SMALLEST_UNIT_TOKENS, math.gcd(*blocks, chunk or 0)),
        "chunk_tokens": chunk,
        "block_tokens": blocks,
        "step_tokens": engine.step_tokens,
        "num_blocks": engine.num_blocks,
        "groups": list(labels),
        "snapshot_tokens": snapshot,
        "first_snapshot_tokens": first,
        "model": model,
    }


def start_recording(
    path: str,
    header: Mapping[str, Any],
    adapters: Adapters,
    engine_index: int = 0,
    *,
    clock: Callable[[], float] = time.monotonic,
    unix_clock: Callable[[], float] = time.time,
) -> RequestRecorder | None:
    """Open the file of a recording and return its recorder. Log a warning and return None if that fails."""
    try:
        opened, file = open_recording(path, header, engine_index)
    except (OSError, ValueError, ConfigError) as error:
        why = os.strerror(error.errno or 0) if isinstance(error, OSError) else str(error)
        logger.warning("record %s: %s; no requests are recorded", path, why)
        return None
    logger.info("record: requests are recorded in %s", opened)
    return RequestRecorder(
        LineFile("record", opened, file), header["unit_tokens"], adapters, clock=clock, unix_clock=unix_clock
    )


def _session_digest(request: Request) -> str:
    """Return what stands for a request's session, 16 hex digits; empty without a session."""
    if (session := session_of(request)) is None:
        return ""
    # Salt and id, so that nobody without the salt can tell whose session it is.
    text = "\0".join((_EPOCH, *session)).encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=DIGEST_BYTES).hexdigest()


def _tenant_digest(request: Request) -> str:
    """Return the digest of a request's tenant in hex; empty with neither a salt nor an adapter."""
    tenant = tenant_of_request(request)
    return "" if tenant == NOBODY else tenant.hex()


class RequestRecorder:
    """Writes a line for each request that has ended. Only the engine's thread calls this class."""

    def __init__(
        self,
        lines: LineFile,
        unit_tokens: int,
        adapters: Adapters,
        *,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._lines, self._unit_tokens, self._adapters = lines, unit_tokens, adapters
        self._requests: dict[str, _Known] = {}
        self._unix_seconds = unix_clock() - clock()  # so that no clock step changes an interval
        self._handlers: Mapping[type[Event], Callable[[Any], None]] = {
            Arrived: self._arrived,
            LoadBegan: self._load_began,
            Scheduled: self._scheduled,
            Finished: self._forget,
        }

    def __len__(self) -> int:
        return len(self._requests)

    def __call__(self, event: Event) -> None:
        if (note := self._handlers.get(type(event))) is not None:
            note(event)

    @log_errors
    def finished(self, request: Request) -> None:
        """Write the line of a request that has ended, and forget the request.

        Call this before the scheduler half's `finished`, in addition to the events, which have no tokens.
        """
        known = self._requests.pop(short_id(request.request_id), None)
        # The prompt of a refused request is unknown.
        if known is None or request.was_rejected:
            return
        prompt, total = request.num_prompt_tokens, request.num_tokens
        line = {
            "arrival": self._unix(known.arrival),
            "end": self._unix(self._clock()),
            "prompt_tokens": prompt,
            "output_tokens": total - prompt,
            "session": _session_digest(request),
            "tenant": _tenant_digest(request),
            "local_tokens": known.local_tokens or 0,
            "loaded": dict(known.loaded or {}),
        }
        keys = self._root_keys(request)
        tokens = () if keys is None else request.all_token_ids[:total]
        # Digests take long, so the thread of the file computes them.
        self._lines.add(partial(self._encode, line, keys, tokens), total * _TOKEN_BYTES)

    def close(self) -> None:
        self._lines.close()

    def _arrived(self, event: Arrived) -> None:
        self._requests[event.request_id] = _Known(event.at)

    def _load_began(self, event: LoadBegan) -> None:
        known = self._requests.get(event.request_id)
        if known is not None and known.local_tokens is None:
            # A load begins where the engine's own prefix ends.
            known.local_tokens = event.begin

    def _scheduled(self, event: Scheduled) -> None:
        known = self._requests.get(event.request_id)
        if known is None or known.loaded is not None:
            return
        known.loaded = Counter()
        for load in event.loads:
            for part in load.parts:
                known.loaded[part.place] += part.tokens
        if known.local_tokens is None:
            known.local_tokens = event.cached_tokens - event.other_connector_tokens

    def _forget(self, event: Finished) -> None:
        self._requests.pop(event.request_id, None)

    def _unix(self, monotonic_seconds: float) -> float:
        return round(monotonic_seconds + self._unix_seconds, 6)

    def _root_keys(self, request: Request) -> ChunkKeys | None:
        """Return the keys of a request without tokens; None if its content cannot be identified."""
        try:
            return keys_of(request, (), self._unit_tokens, self._adapters, _EPOCH)
        except Unnameable:
            return None

    def _encode(self, line: dict[str, Any], keys: ChunkKeys | None, tokens: Sequence[int]) -> bytes:
        """Return a line with the keys of its request. Mutates `line`. The thread of the file calls this."""
        prompt, unit = line["prompt_tokens"], self._unit_tokens
        try:
            if keys is None:
                raise Unnameable("the content of the request cannot be identified")
            keys.extend(tokens)
            digests, whole = keys.digests()[:, :DIGEST_BYTES].tobytes(), keys.at(prompt)[:DIGEST_BYTES]
        except Unnameable:
            # The content cannot be identified for certain, so its keys equal those of no other request.
            digests = os.urandom((prompt + line["output_tokens"]) // unit * DIGEST_BYTES)
            last = prompt // unit * DIGEST_BYTES
            whole = os.urandom(DIGEST_BYTES) if prompt % unit else digests[last - DIGEST_BYTES : last]
        line["keys"], line["prompt_key"] = (b64encode(each).decode("ascii") for each in (digests, whole))
        return json.dumps(line, separators=(",", ":")).encode() + b"\n"
