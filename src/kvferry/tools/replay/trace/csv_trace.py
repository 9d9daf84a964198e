"""Traces that are tables: CSV with a header, one request on each line.

The columns, with other names that are accepted in any case, with or without spaces and underscores:

- ``arrival``, ``arrival_seconds``, ``timestamp`` or ``time``: seconds, or ISO 8601 dates and times.
- ``prompt_tokens``, ``input_tokens``, ``input_length``, ``context_tokens`` or ``request_tokens``.
- ``output_tokens``, ``output_length``, ``generated_tokens`` or ``response_tokens``.
- ``session`` or ``session_id``, optional.
- ``tenant``, ``tenant_id`` or ``cache_salt``, optional.

The traces of Azure (https://github.com/Azure/AzurePublicDataset) and BurstGPT
(https://github.com/HPMLL/BurstGPT) have such columns.

A table does not tell what prompts contain. Without a session, a prompt has nothing in common with any other.
A request of a session continues the one before: its prompt begins with the prompt and the output of that
request, or with as much of them as it has room for. The rest is new.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from kvferry.common.text import shown
from kvferry.tools.replay.trace.base import (
    MAX_TOKENS,
    ArrivalTimes,
    FileTrace,
    TraceFile,
    TraceRequest,
    identity,
)
from kvferry.tools.replay.trace.workload import Outline, Passage, write_out

# Smaller units make the replay slower.
DEFAULT_UNIT_TOKENS = 256

_ARRIVAL, _PROMPT, _OUTPUT, _SESSION = "arrival", "prompt_tokens", "output_tokens", "session"
_TENANT = "tenant"
_NAMES = {
    _ARRIVAL: ("arrival", "arrivalseconds", "timestamp", "time"),
    _PROMPT: ("prompttokens", "inputtokens", "inputlength", "contexttokens", "requesttokens"),
    _OUTPUT: ("outputtokens", "outputlength", "generatedtokens", "responsetokens"),
    _SESSION: ("session", "sessionid"),
    _TENANT: ("tenant", "tenantid", "cachesalt"),
}


def csv_columns(line: bytes) -> dict[str, int]:
    """Return the places of the columns of requests in a header, by their names in kvferry.

    >>> csv_columns(b"TIMESTAMP,ContextTokens,GeneratedTokens")
    {'arrival': 0, 'prompt_tokens': 1, 'output_tokens': 2}
    """
    try:
        [cells] = csv.reader([_decode(line)])
    except (csv.Error, ValueError):
        return {}
    names = ["".join(filter(str.isalnum, cell)).lower() for cell in cells]
    found = {role: next((name for name in known if name in names), None) for role, known in _NAMES.items()}
    return {role: names.index(name) for role, name in found.items() if name is not None}


class CsvTrace(FileTrace):
    """A trace that is a table."""

    def __init__(self, file: TraceFile, unit_tokens: int | None) -> None:
        number, line = file.first_line()
        self._columns = csv_columns(line)
        missing = [role for role in (_ARRIVAL, _PROMPT, _OUTPUT) if role not in self._columns]
        if missing:
            raise file.refusal(
                number,
                f"no column {' and '.join(missing)} in the header {shown(_decode(line).strip())}",
                "add the column, or rename it",
            )
        self.tells_prefixes = _SESSION in self._columns
        super().__init__(file, "csv", unit_tokens or DEFAULT_UNIT_TOKENS)

    def _requests(self, arrivals: ArrivalTimes) -> Iterator[TraceRequest]:
        return write_out(self._outlines(arrivals), self.unit_tokens)

    def _outlines(self, arrivals: ArrivalTimes) -> Iterator[Outline]:
        conversations = Conversations()
        at_arrival, at_prompt, at_output = (self._columns[role] for role in (_ARRIVAL, _PROMPT, _OUTPUT))
        at_session, at_tenant = self._columns.get(_SESSION), self._columns.get(_TENANT)
        to_seconds: Callable[[str], float] | None = None
        for number, row in self._rows():
            try:
                to_seconds = to_seconds or _time_format(row[at_arrival])
                seconds = to_seconds(row[at_arrival])
                prompt_tokens = _count(row[at_prompt], 1)
                output_tokens = _count(row[at_output], 0)
                session, tenant = ("" if at is None else row[at] for at in (at_session, at_tenant))
            except (IndexError, OverflowError, ValueError) as error:
                raise self._file.refusal(
                    number,
                    f"found {shown(','.join(row))}; expected an arrival like the first request's, "
                    f"1 to {MAX_TOKENS:,} prompt tokens, and 0 to {MAX_TOKENS:,} output tokens",
                ) from error
            # Sessions of two tenants may have one name.
            owner = f"{tenant}\0{session}" if tenant and session else session
            passages = conversations.passages(owner, number, prompt_tokens, output_tokens)
            arrival = arrivals.arrival(number, seconds)
            yield Outline(arrival, prompt_tokens, output_tokens, passages, session, tenant)

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        """Yield all rows but the header, with the numbers of their last lines."""
        rows = csv.reader(_decode(line) for _, line in self._file.all_lines())
        filled = (row for row in rows if row and row != [""])
        try:
            next(filled)
            for row in filled:
                yield rows.line_num, row
        except csv.Error as error:
            raise self._file.refusal(rows.line_num, f"this is no CSV: {error}") from error


class Conversations:
    """The sessions of a trace that has only lengths: what their prompts contain."""

    # Names are kept as digests, so a session takes about 160 bytes. It takes more if one of its prompts was
    # shorter than the conversation before.
    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}
        self._passages: dict[int, tuple[Passage, ...]] = {}

    def passages(
        self, session: str, number: int, prompt_tokens: int, output_tokens: int
    ) -> tuple[Passage, ...]:
        """Return the content of the next request of a session, and remember it."""
        if not session:
            return (Passage(0, identity(f"line {number}")),)
        seed = identity(f"session {session}")
        found = self._passages.get(seed) or (Passage(0, seed),)
        if prompt_tokens < self._tokens.get(seed, 0):
            kept = (passage for passage in found if passage.first_token < prompt_tokens)
            found = (*kept, Passage(prompt_tokens, identity(f"line {number}")))
            self._passages[seed] = found
        self._tokens[seed] = prompt_tokens + output_tokens
        return found


def _decode(line: bytes) -> str:
    return line.decode("utf-8", "backslashreplace")


def _time_format(text: str) -> Callable[[str], float]:
    """Return the function that converts the times of a table to seconds, by the time of its first request."""
    try:
        float(text)
    except ValueError:
        return _from_date
    return float


def _from_date(text: str) -> float:
    date = datetime.fromisoformat(text)
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


def _count(text: str, least: int) -> int:
    try:
        count = int(text)
    except ValueError:
        # Tables of pandas have decimal points in whole numbers if the column has gaps.
        number = float(text)
        if not number.is_integer():
            raise
        count = int(number)
    if not least <= count <= MAX_TOKENS:
        raise ValueError(text)
    return count
