"""Traces in which each request lists identities of its blocks: one JSON object on each line.

There are four kinds of files:

- ``mooncake``: ``{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}``
  with 512 tokens per id. Source: https://github.com/kvcache-ai/Mooncake, FAST25-release/traces.
- ``bailian``: the same with ``chat_id`` and further keys, times in seconds, and 16 tokens per id. Source:
  https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon.
- ``blocks``: ``{"block_size": 64, "hash_ids": [2001, 2002], "input_length": 128}``, optionally with
  ``timestamp``, ``output_length``, and ``block_tokens``, the length of each block. Source: the package
  ``kvcache-simulator`` on PyPI.
- ``lmcache``: ``{"timestamp": 1711929600.1, "model_name": "m", "chunk_size": 256, "seq_len": 1024,
  "chunk_hashes": ["0xab", ...]}`` and further keys, look-ups that LMCache logs with
  ``--lookup-hash-log-dir``. An id stands for a whole chunk, and answers have no length. Source:
  https://github.com/LMCache/LMCache, ``lmcache/v1/mp_observability/subscribers/logging/lookup_hash.py``.

Times are in milliseconds, in ``bailian`` and ``lmcache`` in seconds. Without times, requests are one second
apart, so that each finds what the ones before it have left in caches. The last id of a request stands for an
incomplete block. If it is missing, the incomplete block is assumed to be equal to no other's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.common.errors import ConfigError
from kvferry.common.text import shown
from kvferry.tools.replay.trace.base import (
    MAX_TOKENS,
    SECOND,
    ArrivalTimes,
    FileTrace,
    Ids,
    OutputTokens,
    PromptTokens,
    TraceFile,
    TraceRequest,
    UnitTokens,
    batches,
    chained_each,
    decode,
    identity,
)

_MOONCAKE_UNIT_TOKENS = 512
_BAILIAN_UNIT_TOKENS = 16
_MAX_DIGITS = 20


class _Record(msgspec.Struct, gc=False, frozen=True):
    input_length: PromptTokens
    hash_ids: list[int | str]
    timestamp: float | None = None
    output_length: OutputTokens | None = None
    block_size: UnitTokens | None = None
    block_tokens: list[PromptTokens] | None = None
    model_name: str = ""


class _FirstRecord(_Record, frozen=True):
    chat_id: object = None


class _LookUp(
    msgspec.Struct,
    gc=False,
    frozen=True,
    rename={"input_length": "seq_len", "hash_ids": "chunk_hashes", "block_size": "chunk_size"},
):
    """A look-up of LMCache, with the names of `_Record`."""

    input_length: PromptTokens
    hash_ids: list[int | str]
    timestamp: float
    block_size: UnitTokens
    model_name: str
    output_length: OutputTokens = 0
    block_tokens: None = None


class _Draft(NamedTuple):
    """A request without identities, with the number of its line."""

    number: int
    arrival: float
    record: _Record | _LookUp


def check_count(
    file: TraceFile, number: int, ids: int, tokens: int, unit_tokens: int, states_units: bool
) -> None:
    """Raise `ConfigError` if a line does not have an id for each unit. An incomplete unit may lack it."""
    fewest, most = tokens // unit_tokens, -(-tokens // unit_tokens)
    if fewest <= ids <= most:
        return
    least, largest = -(-tokens // max(ids, 1)), (tokens - 1) // max(ids - 1, 1)
    remedy = "correct this line"
    if least <= largest and not states_units:
        remedy += f", or set --unit-tokens to {least} to {largest}"
    raise file.refusal(
        number,
        f"{ids:,} hash_ids for {tokens:,} prompt tokens; expected {most:,} of {unit_tokens:,} tokens each",
        remedy,
    )


class HashedTrace(FileTrace):
    """A trace with identities of blocks."""

    def __init__(self, file: TraceFile, unit_tokens: int | None) -> None:
        number, line = file.first_line()
        self._type: type[_Record | _LookUp] = _Record
        kind, default, self._times_per_second = "blocks", None, 1000
        if b'"chunk_hashes"' in line:
            self._type, kind, self._times_per_second = _LookUp, "lmcache", 1
            first: _FirstRecord | _LookUp = decode(msgspec.json.Decoder(_LookUp), line, number, file)
        else:
            first = decode(msgspec.json.Decoder(_FirstRecord), line, number, file)
            if first.chat_id is not None:
                kind, default, self._times_per_second = "bailian", _BAILIAN_UNIT_TOKENS, 1
            elif first.block_size is None and None not in (first.timestamp, first.output_length):
                kind, default = "mooncake", _MOONCAKE_UNIT_TOKENS
        unit = first.block_size or unit_tokens or default
        if unit is None:
            raise ConfigError(
                f"{file.name}: the first line has no block_size, so the number of tokens per hash id is "
                "unknown; give it with --unit-tokens"
            )
        super().__init__(file, kind, unit)
        self._model_name = first.model_name
        self._timed = first.timestamp is not None
        self._states_units = first.block_size is not None

    def notes(self) -> list[str]:
        untimed = "the trace has no times; its requests are replayed one second apart"
        return [*super().notes(), *[untimed] * (not self._timed)]

    def _requests(self, arrivals: ArrivalTimes) -> Iterator[TraceRequest]:
        for batch in batches(self._drafts(arrivals), lambda draft: len(draft.record.hash_ids)):
            counts = [len(draft.record.hash_ids) for draft in batch]
            own = identities(list(chain.from_iterable(draft.record.hash_ids for draft in batch)))
            prefixes = chained_each(own, np.array(counts))
            for draft, end, count in zip(batch, accumulate(counts), counts, strict=True):
                yield self._request(draft, prefixes[end - count : end])

    def _drafts(self, arrivals: ArrivalTimes) -> Iterator[_Draft]:
        decoder = msgspec.json.Decoder(self._type)
        for index, (number, line) in enumerate(self._file.lines()):
            record = decode(decoder, line, number, self._file)
            self._check(number, record)
            time = float(index) if record.timestamp is None else record.timestamp / self._times_per_second
            yield _Draft(number, arrivals.arrival(number, time), record)

    def _check(self, number: int, record: _Record | _LookUp) -> None:
        """Raise `ConfigError` if a record contradicts itself or the first record."""
        if (record.timestamp is not None) != self._timed:
            raise self._file.refusal(
                number, "only some requests have a timestamp", "give all requests a timestamp, or none"
            )
        if record.model_name != self._model_name:
            raise self._file.refusal(
                number,
                f"model_name is {shown(record.model_name)} after {shown(self._model_name)}",
                "replay the requests of each model alone, because models share no KV",
            )
        if record.block_size not in (None, self.unit_tokens):
            raise self._file.refusal(
                number, f"block_size is {record.block_size} after {self.unit_tokens}; all must be equal"
            )
        if record.block_tokens is not None:
            self._check_block_tokens(number, record.block_tokens, len(record.hash_ids))
            return
        ids, unit = len(record.hash_ids), self.unit_tokens
        check_count(self._file, number, ids, record.input_length, unit, self._states_units)

    def _check_block_tokens(self, number: int, block_tokens: Sequence[int], ids: int) -> None:
        if len(block_tokens) != ids or not block_tokens:
            raise self._file.refusal(
                number, f"{len(block_tokens)} block_tokens for {ids} hash_ids; expected one for each"
            )
        if sum(block_tokens) > MAX_TOKENS:
            raise self._file.refusal(
                number, f"{sum(block_tokens):,} tokens in block_tokens; expected at most {MAX_TOKENS:,}"
            )

    def _request(self, draft: _Draft, prefixes: Ids) -> TraceRequest:
        record, unit = draft.record, self.unit_tokens
        tokens = record.input_length
        if record.block_tokens is not None:
            ends = np.cumsum(record.block_tokens)
            tokens = int(ends[-1])
            prefixes = _at_units(prefixes, ends, unit)
        whole = tokens // unit
        known = len(prefixes) > whole
        return TraceRequest(
            arrival=draft.arrival,
            prompt_tokens=tokens,
            output_tokens=record.output_length or 0,
            unit_tokens=unit,
            prefix_ids=prefixes[:whole],
            prompt_id=int(prefixes[whole]) if known else identity(f"end of line {draft.number}"),
        )


def _at_units(prefixes: Ids, ends: npt.NDArray[np.int64], unit_tokens: int) -> Ids:
    """Return identities of the prefixes that end at each unit, and of a prompt that ends inside a unit.

    If a unit ends inside a block, its identity covers the tokens up to the end of that block. Two equal
    prefixes may then have different identities.
    """
    units = np.append(np.arange(unit_tokens, ends[-1], unit_tokens), ends[-1])
    blocks = np.searchsorted(ends, units)
    places = (ends[blocks] - units).astype(np.uint64)
    found: Ids = prefixes[blocks] + places * SECOND
    return found


def identities(values: Sequence[int | str]) -> Ids:
    """Return an identity for each hash id. An integer that fits is its own identity, also as a string."""
    if str not in set(map(type, values)):
        try:
            return np.array(values, np.uint64)
        except OverflowError:
            pass  # negative, or larger than 64 bits
    return np.array([_identity(value) for value in values], np.uint64)


def _identity(value: int | str) -> int:
    text = str(value)
    if len(text) <= _MAX_DIGITS and text.isdecimal() and text.isascii():
        number = int(text)
        if number < 1 << 64 and str(number) == text:
            return number
    return identity(text)
