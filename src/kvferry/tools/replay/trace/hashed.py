"""Traces in which each request lists identities of its blocks: one JSON object on each line.

There are three kinds of files:

- ``mooncake``: ``{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}``
  with 512 tokens per id. Source: https://github.com/kvcache-ai/Mooncake, FAST25-release/traces.
- ``bailian``: the same with ``chat_id`` and further keys, times in seconds, and 16 tokens per id. Source:
  https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon.
- ``blocks``: ``{"block_size": 64, "hash_ids": [2001, 2002], "input_length": 128}``, optionally with
  ``timestamp``, ``output_length``, and ``block_tokens``, the length of each block. Source: the package
  ``kvcache-simulator`` on PyPI.

Times are in milliseconds, except in ``bailian``. Without times, requests are one second apart, so that each
finds what the ones before it have left in caches. The last id of a request stands for an incomplete block. If
it is missing, the incomplete block is assumed to be equal to no other's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.common.errors import ConfigError
from kvferry.tools.replay.trace.base import (
    BATCH_REQUESTS,
    MAX_TOKENS,
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
    mixed,
    places_within,
)

_MOONCAKE_UNIT_TOKENS = 512
_BAILIAN_UNIT_TOKENS = 16
_MAX_DIGITS = 20
_PLACES = np.uint64(0x94D049BB133111EB)


class _Record(msgspec.Struct, gc=False, frozen=True):
    input_length: PromptTokens
    hash_ids: list[int | str]
    timestamp: float | None = None
    output_length: OutputTokens | None = None
    block_size: UnitTokens | None = None
    block_tokens: list[PromptTokens] | None = None


class _FirstRecord(_Record, frozen=True):
    chat_id: object = None


class _Draft(NamedTuple):
    """A request without identities, with the number of its line."""

    number: int
    arrival: float
    record: _Record


class HashedTrace(FileTrace):
    """A trace with identities of blocks.

    Raises:
        ConfigError: the first line cannot be used, or the number of tokens per id is unknown.
    """

    def __init__(self, file: TraceFile, unit_tokens: int | None) -> None:
        number, line = file.first_line()
        first = decode(msgspec.json.Decoder(_FirstRecord), line, number, file)
        kind, default = "blocks", None
        if first.chat_id is not None:
            kind, default = "bailian", _BAILIAN_UNIT_TOKENS
        elif first.block_size is None and first.timestamp is not None and first.output_length is not None:
            kind, default = "mooncake", _MOONCAKE_UNIT_TOKENS
        unit = first.block_size or unit_tokens or default
        if unit is None:
            raise ConfigError(
                f"{file.name}: the first line has no block_size, so the number of tokens per hash id is "
                "unknown; give it with --unit-tokens"
            )
        super().__init__(file, kind, unit)
        self._times_per_second = 1 if kind == "bailian" else 1000
        self._timed = first.timestamp is not None
        self._states_units = first.block_size is not None

    def notes(self) -> list[str]:
        untimed = "the trace has no times; its requests are replayed one second apart"
        return [*super().notes(), *[untimed] * (not self._timed)]

    def _requests(self, arrivals: ArrivalTimes) -> Iterator[TraceRequest]:
        for batch in batches(self._drafts(arrivals), lambda draft: len(draft.record.hash_ids)):
            counts = [len(draft.record.hash_ids) for draft in batch]
            own = _identities(list(chain.from_iterable(draft.record.hash_ids for draft in batch)))
            prefixes = chained_each(own, np.array(counts))
            for draft, end, count in zip(batch, accumulate(counts), counts, strict=True):
                yield self._request(draft, prefixes[end - count : end])

    def _drafts(self, arrivals: ArrivalTimes) -> Iterator[_Draft]:
        decoder = msgspec.json.Decoder(_Record)
        for index, (number, line) in enumerate(self._file.lines()):
            record = decode(decoder, line, number, self._file)
            self._check(number, record)
            time = float(index) if record.timestamp is None else record.timestamp / self._times_per_second
            yield _Draft(number, arrivals.arrival(number, time), record)

    def _check(self, number: int, record: _Record) -> None:
        """Raise `ConfigError` if a record contradicts itself or the first record."""
        if (record.timestamp is not None) != self._timed:
            raise self._file.refusal(
                number, "only some requests have a timestamp", "give all requests a timestamp, or none"
            )
        if record.block_size not in (None, self.unit_tokens):
            raise self._file.refusal(
                number, f"block_size is {record.block_size} after {self.unit_tokens}; all must be equal"
            )
        if record.block_tokens is not None:
            self._check_block_tokens(number, record.block_tokens, len(record.hash_ids))
            return
        ids, tokens, unit = len(record.hash_ids), record.input_length, self.unit_tokens
        fewest, most = tokens // unit, -(-tokens // unit)
        if not fewest <= ids <= most:
            least, largest = -(-tokens // max(ids, 1)), (tokens - 1) // max(ids - 1, 1)
            remedy = "correct this line"
            if least <= largest and not self._states_units:
                remedy += f", or set --unit-tokens to {least} to {largest}"
            raise self._file.refusal(
                number,
                f"{ids:,} hash_ids for {tokens:,} prompt tokens; expected {most:,} of {unit:,} tokens each",
                remedy,
            )

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

    Args:
        prefixes: identities of the prefixes that end at each block.
        ends: number of tokens up to the end of each block.
        unit_tokens: number of tokens per unit.
    """
    units = np.append(np.arange(unit_tokens, ends[-1], unit_tokens), ends[-1])
    blocks = np.searchsorted(ends, units)
    places = (ends[blocks] - units).astype(np.uint64)
    found: Ids = prefixes[blocks] + places * _PLACES
    return found


def _identities(values: Sequence[int | str]) -> Ids:
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


class Passage(NamedTuple):
    """The tokens of a request from `first_token` on, up to the next passage or to the end of the request.

    They are the tokens of the text with this seed (uint64) at the same positions.
    """

    first_token: int
    seed: int


class Outline(NamedTuple):
    """A request with passages in place of identities.

    Attributes:
        arrival: seconds from the start of the trace to the arrival of the request.
        passages: content of prompt and output. The first passage begins at token 0.
        session: name of the conversation that the request belongs to; empty if unknown.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    passages: Sequence[Passage]
    session: str = ""


def write_out(
    outlines: Iterable[Outline], unit_tokens: int, batch_requests: int = BATCH_REQUESTS
) -> Iterator[TraceRequest]:
    """Give requests the identities of their content. They cover the generated tokens too.

    >>> first = Outline(0.0, 40, 8, [Passage(0, seed=1)])
    >>> longer = Outline(1.0, 64, 0, [Passage(0, seed=1)])
    >>> other = Outline(2.0, 64, 0, [Passage(0, seed=1), Passage(40, seed=2)])
    >>> ids = [request.prefix_ids.tolist() for request in write_out([first, longer, other], 16)]
    >>> ids[1][:3] == ids[0], ids[2][:2] == ids[0][:2], ids[2][2] in ids[1]
    (True, True, False)
    """
    for batch in batches(
        outlines,
        lambda each: (each.prompt_tokens + each.output_tokens) // unit_tokens,
        max_items=batch_requests,
    ):
        yield from _written(batch, unit_tokens)


def _written(batch: Sequence[Outline], unit_tokens: int) -> Iterator[TraceRequest]:
    # A text always follows the same passages, so the text at the end of a prefix identifies the whole prefix.
    seeds: list[int] = []
    first_units: list[int] = []
    counts: list[int] = []
    last_seeds: list[int] = []
    totals: list[int] = []
    for outline in batch:
        total = (outline.prompt_tokens + outline.output_tokens) // unit_tokens
        starts = [passage.first_token // unit_tokens for passage in outline.passages]
        first_units += starts
        counts += [end - start for start, end in pairwise([*starts, total])]
        seeds += [passage.seed for passage in outline.passages]
        last_seeds.append(_seed_at(outline.passages, outline.prompt_tokens - 1))
        totals.append(total)
    prefixes = _made_up_identities(seeds, first_units, np.array(counts))
    lengths = np.array([outline.prompt_tokens for outline in batch], np.uint64)
    # Mixed once more than those of prefixes, so that a number of tokens and a number of units never agree.
    prompts = mixed(mixed(mixed(np.array(last_seeds, np.uint64))) + lengths).tolist()
    for outline, prompt_id, end, total in zip(batch, prompts, accumulate(totals), totals, strict=True):
        yield TraceRequest(
            arrival=outline.arrival,
            prompt_tokens=outline.prompt_tokens,
            output_tokens=outline.output_tokens,
            unit_tokens=unit_tokens,
            prefix_ids=prefixes[end - total : end],
            prompt_id=prompt_id,
            session=outline.session,
        )


def _made_up_identities(seeds: list[int], first_units: list[int], counts: npt.NDArray[np.int64]) -> Ids:
    starts = mixed(np.array(seeds, np.uint64)) + np.array(first_units, np.uint64)
    return mixed(np.repeat(starts, counts) + places_within(counts).astype(np.uint64))


def _seed_at(passages: Sequence[Passage], token: int) -> int:
    return next(passage.seed for passage in reversed(passages) if passage.first_token <= token)
