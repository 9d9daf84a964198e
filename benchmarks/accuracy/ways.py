"""The ways in which a request gets KV that it did not compute."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from kvferry.errors import ConfigError
from kvferry.serving.engine import EngineSpec
from kvferry.serving.kv_config import kv_transfer_config
from kvferry.serving.ports import free_ports
from kvferry.serving.role import Role

PEER = "peer"
_TIERS = "tiers"
_ROOT = Path(__file__).parents[2]
_SPOILING = {
    "kv_connector": "SpoilingConnector",
    "kv_connector_module_path": "benchmarks.accuracy.spoiling",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to move KV.

    Attributes:
        name: name on the command line.
        title: name in the report.
        engines: function that returns the specifications of the engines to start. It takes those of a prefill
            engine and a decode engine, and a folder for files. Two engines get a router.
        source: source of the KV, as in kvferry's metrics.
        starts: number of times that the engines are started and asked all questions. The last time counts.
        spoiled: True if the KV is zeroed after it was loaded (negative control).
    """

    name: str
    title: str
    engines: Callable[[EngineSpec, EngineSpec, Path], Sequence[EngineSpec]]
    source: str = PEER
    starts: int = 1
    spoiled: bool = False


def alone(decode: EngineSpec) -> EngineSpec:
    """Return the specification of an engine without a connector that is otherwise like a decode engine."""
    return replace(decode, name="single", role=Role.BOTH, port=free_ports(1)[0], kv_transfer=None)


def spoiled(decode: EngineSpec) -> EngineSpec:
    """Return the specification of a decode engine that zeroes its KV cache whenever a load has ended."""
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    return replace(
        decode,
        kv_transfer={**(decode.kv_transfer or {}), **_SPOILING},
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


_ALL = (
    Way(name="pair", title="prefill/decode pair", engines=lambda prefill, decode, _: [prefill, decode]),
    Way(
        name="blocks",
        title="pair, blocks 64 to 128",
        engines=lambda prefill, decode, _: [with_blocks(prefill, 64), with_blocks(decode, 128)],
    ),
    Way(
        name="tiers",
        title="files, restarted",
        engines=lambda _, decode, folder: [with_files(decode, folder)],
        source=_TIERS,
        starts=2,
    ),
    Way(
        name="spoiled",
        title="pair, KV zeroed",
        engines=lambda prefill, decode, _: [prefill, spoiled(decode)],
        spoiled=True,
    ),
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
