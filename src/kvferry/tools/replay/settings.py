"""The settings of a replay: engines, tiers, routing and speeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, TypeAlias, get_args

import msgspec

from kvferry.common.errors import ConfigError
from kvferry.common.units import parse_size
from kvferry.tiers.eviction import EVICTION_POLICIES
from kvferry.tiers.names import HOST
from kvferry.tools.replay.lookup import UNLIMITED
from kvferry.tools.replay.model import NO_PREFIX_CACHE, BlockPool, ServedModel

# Names of the ways to choose an engine for a request.
RouteName: TypeAlias = Literal["prefix", "random", "session"]

# Assumed speed of loads from each kind of tier. `kvferry bench` measures it.
BYTES_PER_SECOND: Mapping[str, float] = MappingProxyType({"host": 20e9, "file": 3e9, "object": 1e9})

_NO_LIMIT = ("unlimited", "none")
_SHARED = "shared"


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSetting:
    """A tier of a replay.

    Attributes:
        kind: host, file or object.
        capacity_bytes: maximum bytes of its chunks, for each engine or for all engines together.
        shared: True if all engines share the tier, False if each engine has its own.
        bytes_per_second: speed of loads from the tier.
    """

    kind: str
    capacity_bytes: int
    shared: bool
    bytes_per_second: float


def parse_tier(text: str) -> TierSetting:
    """Parse a tier, as in ``file=2TiB``, ``object=unlimited`` or ``file=100TiB:shared``.

    An object store is always shared. Host memory never is.

    >>> tier = parse_tier("file=2TiB:shared")
    >>> tier.kind, tier.capacity_bytes >> 40, tier.shared
    ('file', 2, True)

    Raises:
        ConfigError: the text does not describe a tier.
    """
    kind, _, rest = text.partition("=")
    size, _, sharing = rest.partition(":")
    if kind not in BYTES_PER_SECOND or not size or sharing not in ("", _SHARED) or (kind == HOST and sharing):
        raise ConfigError(
            f"--tier {text!r} is not a tier; write host=SIZE, file=SIZE, file=SIZE:shared or object=SIZE, "
            "with a size such as 64GiB or unlimited"
        )
    capacity = UNLIMITED if size.lower() in _NO_LIMIT else parse_size(size)
    if capacity <= 0:
        raise ConfigError(f"--tier {text!r}: the size must be above 0")
    shared = bool(sharing) or kind == "object"
    return TierSetting(
        kind=kind, capacity_bytes=capacity, shared=shared, bytes_per_second=BYTES_PER_SECOND[kind]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """The settings of a replay.

    Attributes:
        tiers: tiers of each engine, host memory first.
        policy: name of the eviction policy of host memory. Storage evicts the least recently used chunks.
        prefill_tokens_per_second: tokens that an engine computes per second; 0 to assume that a request has
            ended before the next one arrives.
        skip: number of requests at the start of the trace that are replayed but not counted.
    """

    tiers: tuple[TierSetting, ...]
    engines: int = 1
    pool: BlockPool = NO_PREFIX_CACHE
    policy: str = "lru"
    route: RouteName = "prefix"
    prefill_tokens_per_second: float = 0.0
    seed: int = 0
    skip: int = 0

    def __post_init__(self) -> None:
        kinds = [tier.kind for tier in self.tiers]
        if kinds[:1] != [HOST] or kinds.count(HOST) > 1:
            raise ConfigError(
                f"the tiers are {', '.join(kinds) or 'none'}; begin with one --tier host=SIZE, because all "
                "chunks pass through host memory"
            )
        if self.policy not in EVICTION_POLICIES:
            known = ", ".join(EVICTION_POLICIES)
            raise ConfigError(f"--policy {self.policy!r} is not known; choose one of {known}")
        if self.route not in get_args(RouteName):
            known = ", ".join(get_args(RouteName))
            raise ConfigError(f"--route {self.route!r} is not known; choose one of {known}")
        for name, value, least in (
            ("engines", self.engines, 1),
            ("engine-blocks", self.pool.blocks, 0),
            ("prefill-tokens-per-second", self.prefill_tokens_per_second, 0),
            ("skip", self.skip, 0),
        ):
            if value < least:
                raise ConfigError(f"--{name} is {value}; it must be at least {least}")


class RecordedEngine(msgspec.Struct, frozen=True):
    """The settings of an engine that recorded a trace. A value is None if the header does not have it.

    Without tiers, the engine has no values of chunks and snapshots.

    Attributes:
        block_tokens: number of tokens per block, for each KV cache group.
        step_tokens: maximum number of tokens per step.
        snapshot_tokens: distance in tokens between kept windows and snapshots.
        first_snapshot_tokens: first position of a snapshot for shared prefixes; 0 for none.
        num_blocks: number of blocks in the engine's pool.
    """

    block_tokens: tuple[int, ...] | None = None
    step_tokens: int | None = None
    chunk_tokens: int | None = None
    snapshot_tokens: int | None = None
    first_snapshot_tokens: int | None = None
    num_blocks: int | None = None

    @property
    def common_block(self) -> int | None:
        """Number of tokens per block of all KV cache groups; None if unknown, or if the groups differ."""
        sizes = set(self.block_tokens or ())
        return sizes.pop() if len(sizes) == 1 else None


def recorded_engine(name: str, header: Mapping[str, object]) -> RecordedEngine:
    """Read the settings of an engine from the header of its trace, which is empty if no engine recorded it.

    Raises:
        ConfigError: a setting has another type.
    """
    try:
        return msgspec.convert(header, RecordedEngine)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: the header of the trace is damaged ({error}); record it again") from error


def with_blocks(model: ServedModel, block_tokens: int) -> ServedModel:
    """Return a model with the block size that an engine really had, in all its block tables."""
    # vLLM for CPUs chooses the blocks of models with recurrent state by other rules than on a GPU.
    groups = tuple(replace(group, block_tokens=block_tokens) for group in model.block_groups)
    steps = replace(model.form.steps, block_tokens=block_tokens)
    return replace(model, block_groups=groups, form=replace(model.form, steps=steps))
