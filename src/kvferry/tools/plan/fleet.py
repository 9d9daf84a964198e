"""Forecast of a fleet: engines that read chunks in each other's host memory (`kvferry.tiers.fleet`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvferry.common.errors import ConfigError
from kvferry.common.units import parse_size
from kvferry.planning import ChunkedPrompt, Costs, chunks_to_load
from kvferry.tools.plan.kept import TierForecast

# Memory of a directory for a chunk of one engine, measured with 10 million (docs/scale.md).
DIRECTORY_BYTES = 127
# Seconds per byte of a reader's digest in one thread, measured (docs/performance.md).
_DIGEST_SECONDS = 5.7e-11
# Lengths in tokens of the prefixes whose reads are forecast.
_PREFIXES = (1024, 8192, 32_768, 131_072)


@dataclass(frozen=True, slots=True)
class PrefixRead:
    """The expected read of a prefix in another engine's host memory."""

    tokens: int
    bytes: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Speed of an engine that would compute the prefix in the same time."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetForecast:
    """A forecast of a fleet whose engines have equal host memory, and keep prompts as `TierForecast` says."""

    engines: int
    host_bytes: int  # of one engine
    tokens: int  # number of tokens that one engine's host memory keeps
    chunks: int  # number of chunks in the host memory of all engines
    reads: tuple[PrefixRead, ...]

    @property
    def directory_bytes(self) -> int:
        return self.chunks * DIRECTORY_BYTES


def forecast_fleet(kept: TierForecast, engines: int, host_memory: str, costs: Costs) -> FleetForecast | None:
    """Forecast a fleet; None if the model's KV cannot be kept in tiers.

    Args:
        host_memory: of each engine, such as ``64GiB``.
        costs: of reads between two engines.
    """
    if engines < 2:
        raise ConfigError(f"--engines is {engines}; a fleet has at least 2")
    host_bytes = parse_size(host_memory)
    if not kept.groups:
        return None
    stored = kept.choices[0]
    return FleetForecast(
        engines=engines,
        host_bytes=host_bytes,
        tokens=host_bytes * kept.prompt // stored.bytes,
        chunks=engines * host_bytes * stored.chunks // stored.bytes,
        reads=tuple(_reads(kept, costs)),
    )


def _reads(kept: TierForecast, costs: Costs) -> Iterator[PrefixRead]:
    groups = [one.group for one in kept.groups]
    for length in _PREFIXES:
        tokens = length // kept.chunk_tokens * kept.chunk_tokens
        if not tokens:
            continue
        cut = ChunkedPrompt(tokens, kept.chunk_tokens, tokens + 1)
        numbers = [len(chunks) for chunks in chunks_to_load(groups, cut, tokens)]
        size = sum(count * group.chunk_bytes for count, group in zip(numbers, groups, strict=True))
        # Chunk after chunk, as one thread reads them: a question, the READ, the digest, the copy to blocks.
        each = costs.read_byte_seconds + _DIGEST_SECONDS + costs.copy_byte_seconds
        yield PrefixRead(tokens, size, sum(numbers) * costs.ask_seconds + size * each)
