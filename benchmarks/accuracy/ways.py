"""The ways in which a request gets KV that it did not compute."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from kvferry.common.errors import ConfigError
from kvferry.geometry import GroupKind
from kvferry.tools.serving.devices import free_ports
from kvferry.tools.serving.engine import EngineSpec
from kvferry.tools.serving.kv_config import kv_transfer_config
from kvferry.tools.serving.role import Role

PEER = "peer"
_TIERS = "tiers"
_ROOT = Path(__file__).parents[2]
MakeFleet = Callable[..., Sequence[EngineSpec]]
"""Returns the specifications of a prefill engine and a decode engine. It takes arguments of `fleet_specs`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to move KV.

    Attributes:
        name: name on the command line.
        title: name in the report.
        engines: function that returns the specifications of the engines to start. It takes a function that
            makes a pair of them, and a folder for files. Two engines get a router.
        source: source of the KV, as in kvferry's metrics.
        starts: number of times that the engines are started and asked all questions. The last time counts.
        spoils: kinds of KV cache groups that are zeroed after they were loaded (negative control).
    """

    name: str
    title: str
    engines: Callable[[MakeFleet, Path], Sequence[EngineSpec]]
    source: str = PEER
    starts: int = 1
    spoils: frozenset[GroupKind] = frozenset()


def alone(decode: EngineSpec) -> EngineSpec:
    """Return the specification of an engine without a connector that is otherwise like a decode engine."""
    return replace(decode, name="single", role=Role.BOTH, port=free_ports(1)[0], kv_transfer=None)


def spoiled(decode: EngineSpec, connector: str) -> EngineSpec:
    """Return the specification of a decode engine that zeroes the KV that it has loaded.

    Args:
        decode: specification of the decode engine.
        connector: name of a class in `spoiling`.
    """
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    spoiling = {"kv_connector": connector, "kv_connector_module_path": "benchmarks.accuracy.spoiling"}
    return replace(
        decode,
        kv_transfer={**(decode.kv_transfer or {}), **spoiling},
        environment={**decode.environment, "PYTHONPATH": path},
    )


def with_files(decode: EngineSpec, folder: Path) -> EngineSpec:
    """Return the specification of an engine that is like a decode engine, but keeps its KV in files.

    Args:
        decode: specification of the decode engine.
        folder: folder for the files.
    """
    tiers = [{"type": "file", "path": str(folder)}]
    return replace(alone(decode), name="tiers", kv_transfer=kv_transfer_config(Role.BOTH, {"tiers": tiers}))


def with_blocks(spec: EngineSpec, tokens: int) -> EngineSpec:
    """Return a specification with another block size, in tokens."""
    return replace(spec, arguments=(*spec.arguments, f"--block-size={tokens}"))


def _blocks(fleet: MakeFleet, _: Path) -> Sequence[EngineSpec]:
    prefill, decode = fleet()
    return [with_blocks(prefill, 64), with_blocks(decode, 128)]


def _spoiling(name: str, what: str, connector: str, *kinds: GroupKind) -> Way:
    def engines(fleet: MakeFleet, _: Path) -> Sequence[EngineSpec]:
        prefill, decode = fleet()
        return [prefill, spoiled(decode, connector)]

    return Way(name=name, title=f"pair, {what} zeroed", engines=engines, spoils=frozenset(kinds))


_ALL = (
    Way(name="pair", title="prefill/decode pair", engines=lambda fleet, _: fleet()),
    Way(
        name="tp-2-1",
        title="pair, TP 2 to 1",
        engines=lambda fleet, _: fleet(prefill_tensor_parallel=2, decode_tensor_parallel=1),
    ),
    Way(
        name="tp-1-2",
        title="pair, TP 1 to 2",
        engines=lambda fleet, _: fleet(prefill_tensor_parallel=1, decode_tensor_parallel=2),
    ),
    Way(name="blocks", title="pair, blocks 64 to 128", engines=_blocks),
    Way(
        name="tiers",
        title="files, restarted",
        engines=lambda fleet, folder: [with_files(fleet()[-1], folder)],
        source=_TIERS,
        starts=2,
    ),
    _spoiling("spoiled", "KV", "SpoilingConnector", *GroupKind),
    _spoiling("spoiled-full", "full attention", "FullSpoilingConnector", GroupKind.FULL, GroupKind.MLA),
    _spoiling("spoiled-window", "window", "WindowSpoilingConnector", GroupKind.SLIDING),
    _spoiling("spoiled-state", "state", "StateSpoilingConnector", GroupKind.STATE),
)
WAYS: Mapping[str, Way] = MappingProxyType({way.name: way for way in _ALL})


def read_ways(names: str) -> Sequence[Way]:
    """Return the ways of a list of names, separated by commas.

    Raises:
        ConfigError: a name is unknown.
    """
    given = [name.strip() for name in names.split(",")]
    for name in given:
        if name not in WAYS:
            raise ConfigError(f"--ways has {name!r}; it may have {', '.join(WAYS)}")
    return [WAYS[name] for name in dict.fromkeys(given)]
