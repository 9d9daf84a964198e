"""What one round found for one variant, and what all rounds found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantRound:
    """The times of one variant in one round, in seconds from a request's arrival; None where it has none.

    Attributes:
        new: first token of a new prompt.
        stored: the new prompt is stored.
        flushed: the new prompt is stored, and its files are on the disk. Only ExampleConnector has it.
        load: first token of the stored prompt.
        disk_load: the same, if its files are not in the page cache. Only variants with files have it.
        load_tokens: number of the stored prompt's tokens that were loaded.
        shared: first token of a prompt that shares the first half of the stored one.
        shared_tokens: number of that prompt's tokens that were loaded.
    """

    new: float
    stored: float | None = None
    flushed: float | None = None
    load: float | None = None
    disk_load: float | None = None
    load_tokens: int = 0
    shared: float
    shared_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PromptRounds:
    """All counted rounds with prompts of one length.

    Attributes:
        tokens: number of tokens of a prompt that can be loaded; `SPARE_TOKENS` more are computed.
        bytes: size of the KV of these tokens.
        rounds: times of each round, by variant.
    """

    tokens: int
    bytes: int
    rounds: tuple[Mapping[str, VariantRound], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The result of the benchmark.

    Attributes:
        prompts: rounds of each length of prompt.
        peers: error of each peer that was only tried, by name; None for one that works.
        direct_io: True if kvferry reads files that are not in the page cache past it.
    """

    prompts: tuple[PromptRounds, ...]
    peers: Mapping[str, str | None]
    direct_io: bool
