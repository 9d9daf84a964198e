"""The settings of a replay: the model as an engine serves it, the engines, tiers, routing and speeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias, get_args

import msgspec

from kvferry.common.errors import ConfigError
from kvferry.common.units import counted, format_bytes, parse_size
from kvferry.geometry import GroupKind
from kvferry.geometry.canonical import CanonicalGroup
from kvferry.planning import attends_to_all, needed_chunks, widest_group
from kvferry.tiers import EVICTION_POLICIES, FLEET, HOST, Tenants
from kvferry.tools.models import ModelReading
from kvferry.tools.plan.contents import lay_out_engine
from kvferry.tools.plan.kept import KeptSettings, StoredForm, stored_form
from kvferry.tools.plan.side import EngineSide, shape
from kvferry.tools.replay.hints import HintSetting

# Capacity in bytes of a tier without a limit.
UNLIMITED = 1 << 62

# Memory of a rank for KV cache, if nothing says it: half of a GPU with 80 GB. Weights take the rest.
ASSUMED_KV_CACHE = "40GiB"

# Names of the ways to choose an engine for a request.
RouteName: TypeAlias = Literal["prefix", "session", "least-busy", "random"]

# Assumed speed of loads from each kind of tier. `kvferry bench` measures it.
BYTES_PER_SECOND: Mapping[str, float] = MappingProxyType(
    {"host": 20e9, "fleet": 10e9, "file": 3e9, "object": 1e9}
)


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """The block tables of an engine that hold the KV of one kind of layers."""

    kind: GroupKind
    attention_span: int
    block_tokens: int
    tables: int


@dataclass(frozen=True)
class ServedModel:
    """A model and the settings of the engine that serves it."""

    name: str
    form: StoredForm
    # The engine's block tables, in the order of the KV cache groups in `form`.
    block_groups: tuple[BlockGroup, ...]
    block_bytes: int  # bytes of a block of the engine's pool on one rank

    @cached_property
    def groups(self) -> tuple[CanonicalGroup, ...]:
        return self.form.canonical.groups

    @cached_property
    def chunk_tokens(self) -> int:
        return self.form.canonical.chunk_tokens

    @cached_property
    def state(self) -> int | None:
        """Index of the KV cache group with recurrent state; None if there is none."""
        return next((n for n, group in enumerate(self.groups) if group.kind is GroupKind.STATE), None)

    @cached_property
    def widest(self) -> int:
        """Index of the group that needs the most chunks to load a prefix."""
        return widest_group(self.groups)

    @cached_property
    def attention(self) -> tuple[int, ...]:
        return tuple(n for n, group in enumerate(self.groups) if attends_to_all(group.kind))

    @cached_property
    def has_only_attention(self) -> bool:
        return len(self.attention) == len(self.groups)

    @cached_property
    def has_one_row(self) -> bool:
        return len(self.groups) == 1 and self.has_only_attention

    @cached_property
    def has_cold_chunks(self) -> bool:
        """True if tiers evict some chunks of this model before others."""
        return any(some is not None for some in needed_chunks(self.groups, self.chunk_tokens, [1]))

    @cached_property
    def completes_prefixes(self) -> bool:
        """True if a load can bring the recurrent state after a prefix of the engine's own prefix cache."""
        # vLLM passes such a prefix to the connector if all other layers have full attention.
        return self.state is not None and len(self.groups) == 2 and len(self.attention) == 1

    @cached_property
    def block_tokens(self) -> int:
        return lcm(*(group.block_tokens for group in self.block_groups))


def served_model(reading: ModelReading, side: EngineSide, settings: KeptSettings) -> ServedModel:
    """Return a model with the settings of its engine and tiers. `KeptSettings.prompt` has no effect."""
    form = stored_form(reading, side, settings)
    layers = reading.cache.layers
    # Engines may divide layers of one kind among several block tables, and tiers store them in one group.
    tables: dict[tuple[GroupKind, int], list[int]] = {}
    engine = shape(reading, side, num_blocks=1)
    for group in engine.groups:
        cache = layers[group.layers[0]]
        tables.setdefault((cache.kind, cache.attention_span), []).append(group.block_tokens)
    block_groups = []
    for one in form.canonical.groups:
        sizes = tables[one.kind, one.attention_span]
        block_groups.append(BlockGroup(one.kind, one.attention_span, lcm(*sizes), len(sizes)))
    (pool,) = lay_out_engine(reading, side, num_blocks=1)[0].regions
    return ServedModel(reading.cache.name, form, tuple(block_groups), pool.length)


def with_blocks(model: ServedModel, block_tokens: int) -> ServedModel:
    """Return a model with the block size that an engine really had, in all its block tables."""
    # vLLM for CPUs chooses the blocks of models with recurrent state by other rules than on a GPU.
    groups = tuple(replace(group, block_tokens=block_tokens) for group in model.block_groups)
    steps = replace(model.form.steps, block_tokens=block_tokens)
    return replace(model, block_groups=groups, form=replace(model.form, steps=steps))


class BlockPool(NamedTuple):
    """The block pool of an engine."""

    blocks: int = 0  # number of blocks; 0 for an engine without prefix caching
    source: str = ""  # origin of this number, in words for the user; empty if the user gave it

    @property
    def text(self) -> str:
        """Words after "an engine"."""
        if not self.blocks:
            return "without a prefix cache"
        return f"with a prefix cache of {counted(self.blocks, 'block')}{self.source and f' ({self.source})'}"


# The pool of an engine without prefix caching.
NO_PREFIX_CACHE = BlockPool()


def block_pool(
    model: ServedModel, blocks: int | None, recorded: int | None, kv_cache_memory: str | None
) -> BlockPool:
    """Return the block pool that an engine has.

    Args:
        kv_cache_memory: size of the memory of each rank for KV cache, such as ``40GiB``; None for the
            recorded number of blocks, or else `ASSUMED_KV_CACHE`.

    Raises:
        ConfigError: both numbers are given, one of them is not valid, or the memory has no room for a block.
    """
    if blocks is not None and kv_cache_memory is not None:
        raise ConfigError(
            "--engine-blocks and --kv-cache-memory both give the size of the pool; leave one out"
        )
    if blocks is not None:
        return BlockPool(blocks)
    if kv_cache_memory is None and recorded is not None:
        return BlockPool(recorded, "as recorded")
    size = parse_size(kv_cache_memory or ASSUMED_KV_CACHE)
    found = size // model.block_bytes
    if not found:
        block = format_bytes(model.block_bytes)
        raise ConfigError(
            f"--kv-cache-memory {kv_cache_memory} has no room for a block of {block}; give more, or "
            "--engine-blocks 0 for an engine without a prefix cache"
        )
    assumed = "" if kv_cache_memory else ", assumed"
    return BlockPool(found, f"{format_bytes(size)} of KV cache per rank{assumed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSetting:
    """A tier of a replay.

    `capacity_bytes` limits its chunks, for each engine or for all together; 0 for a tier that stores nothing.
    """

    kind: str
    capacity_bytes: int
    shared: bool
    bytes_per_second: float


def parse_tier(text: str) -> TierSetting:
    """Parse a tier, as in ``file=2TiB``, ``object=unlimited`` or ``file=100TiB:shared``.

    An object store is always shared. Host memory never is. ``fleet`` is the host memory of other engines.

    >>> tier = parse_tier("file=2TiB:shared")
    >>> tier.kind, tier.capacity_bytes >> 40, tier.shared
    ('file', 2, True)
    """
    if text == FLEET:
        return TierSetting(
            kind=FLEET, capacity_bytes=0, shared=False, bytes_per_second=BYTES_PER_SECOND[FLEET]
        )
    kind, _, rest = text.partition("=")
    size, _, sharing = rest.partition(":")
    if (
        kind not in BYTES_PER_SECOND
        or kind == FLEET
        or not size
        or sharing not in ("", "shared")
        or (kind == HOST and sharing)
    ):
        raise ConfigError(
            f"--tier {text!r} is not a tier; write host=SIZE, fleet, file=SIZE, file=SIZE:shared or "
            "object=SIZE, with a size such as 64GiB or unlimited"
        )
    capacity = UNLIMITED if size.lower() in ("unlimited", "none") else parse_size(size)
    if capacity <= 0:
        raise ConfigError(f"--tier {text!r}: the size must be above 0")
    shared = bool(sharing) or kind == "object"
    return TierSetting(
        kind=kind, capacity_bytes=capacity, shared=shared, bytes_per_second=BYTES_PER_SECOND[kind]
    )


class AdmissionSetting(NamedTuple):
    """The settings of the tiers in storage that decide what is written to them, as in `StorageSettings`."""

    min_uses: int = 1
    min_prompt_tokens: int = 0
    write_per_day: int | None = None  # bytes per day and tier; None for no limit


# Every chunk is written.
ADMIT_ALL = AdmissionSetting()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """The settings of a replay."""

    tiers: tuple[TierSetting, ...]  # tiers of each engine, host memory first
    engines: int = 1
    pool: BlockPool = NO_PREFIX_CACHE
    # Name of the eviction policy of host memory. Storage evicts the least recently used chunks.
    policy: str = "lru"
    admission: AdmissionSetting = ADMIT_ALL
    hints: HintSetting | None = None  # None if clients send none
    tenants: Tenants | None = None  # weights, by the tenants in chunks' keys; None to let all use all
    route: RouteName = "prefix"
    # Tokens that an engine computes per second; 0 to assume that a request has ended before the next one
    # arrives.
    prefill_tokens_per_second: float = 0.0
    seed: int = 0
    skip: int = 0  # number of requests at the start of the trace that are replayed but not counted
    # Number of sessions at once, each of which begins when another has ended; 0 if they begin at their times.
    concurrency: int = 0

    def __post_init__(self) -> None:
        kinds = [tier.kind for tier in self.tiers]
        if kinds[:1] != [HOST] or kinds.count(HOST) > 1:
            raise ConfigError(
                f"the tiers are {', '.join(kinds) or 'none'}; begin with one --tier host=SIZE, because all "
                "chunks pass through host memory"
            )
        if kinds.count(FLEET) > 1:
            raise ConfigError("--tier fleet is given twice; there is one fleet, so give it once")
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
            ("concurrency", self.concurrency, 0),
            ("min-uses", self.admission.min_uses, 1),
            ("min-prompt-tokens", self.admission.min_prompt_tokens, 0),
        ):
            if value < least:
                raise ConfigError(f"--{name} is {value}; it must be at least {least}")


class RecordedEngine(msgspec.Struct, frozen=True):
    """The settings of an engine that recorded a trace. A value is None if the header does not have it."""

    block_tokens: tuple[int, ...] | None = None
    step_tokens: int | None = None
    chunk_tokens: int | None = None
    snapshot_tokens: int | None = None  # distance in tokens between kept windows and snapshots
    first_snapshot_tokens: int | None = None  # first position of a snapshot for shared prefixes; 0 for none
    num_blocks: int | None = None

    @property
    def common_block(self) -> int | None:
        """Number of tokens per block of all KV cache groups; None if unknown, or if the groups differ."""
        sizes = set(self.block_tokens or ())
        return sizes.pop() if len(sizes) == 1 else None


def recorded_engine(name: str, header: Mapping[str, object]) -> RecordedEngine:
    """Read the settings of an engine from the header of its trace; empty if no engine recorded it."""
    try:
        return msgspec.convert(header, RecordedEngine)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: the header of the trace is damaged ({error}); record it again") from error
