"""Settings of a worker's transfers, and the file with the measured costs of this machine.

``kvferry doctor --calibrate`` writes the file. Everything that plans transfers reads it. Its format is JSON:

{"version": 1, "made": "2026-01-31T12:00:00+00:00", "machine": {...}, "costs": {"ask_seconds": ..., ...}}
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kvferry.common.errors import ConfigError
from kvferry.common.files import expanded, replace_file, user_cache
from kvferry.planning.strategy import LANE_BYTES, Costs, Strategy
from kvferry.transport.addresses import ANY_PEER, AllowedPeers, PortRange
from kvferry.transport.security import Keys, random_keys

logger = logging.getLogger(__name__)

VERSION = 1
_MAX_BYTES = 1 << 20


class CostsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of the file: `costs` by name, the time when they were `made` (ISO 8601), and the `machine`."""

    version: int
    made: str
    machine: dict[str, Any]
    costs: dict[str, float]


def default_costs_path(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the default path of the costs file. Raise ConfigError if the user has no home directory."""
    return user_cache(environment) / "costs.json"


def load_costs(path: str | None = None) -> Costs:
    """Load the costs from a file, from the default file if `path` is None, or else the built-in ones."""
    found = find_default_costs() if path is None else expanded(path)
    return Costs() if found is None else read_costs(found)


def find_default_costs() -> Path | None:
    """Return the path of the default file; None if it is missing or cannot be accessed."""
    try:
        found = default_costs_path()
        return found if found.exists() else None
    except (ConfigError, OSError):
        return None


def read_costs(path: Path) -> Costs:
    """Read a file that `write_costs` wrote. Raise ConfigError if it is none of this version."""
    remedy = "write it anew with `kvferry doctor --calibrate`"
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(
                f"costs: {path} is larger than {_MAX_BYTES} bytes, so it holds no costs; {remedy}"
            )
        held = msgspec.json.decode(path.read_bytes(), type=CostsFile)
    except OSError as error:
        said = os.strerror(error.errno or 0)
        raise ConfigError(f"costs: cannot read {path}: {said}; {remedy}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"costs: {path}: {error}; {remedy}") from error
    if held.version != VERSION:
        raise ConfigError(f"costs: {path} has version {held.version}, expected {VERSION}; {remedy}")
    # All fields, so that costs of an older release do not mix with defaults of this one.
    names = set(Costs.__slots__)
    if odd := sorted(names ^ set(held.costs)):
        raise ConfigError(f"costs: {path} must name {', '.join(sorted(names))}: {odd[0]} differs; {remedy}")
    try:
        return Costs(**held.costs)
    except ConfigError as error:
        raise ConfigError(f"costs: {path}: {error}; {remedy}") from error


def write_costs(path: Path, costs: Costs, made: str, machine: Mapping[str, Any]) -> None:
    """Write measured costs, made at a time in ISO 8601. Replace an existing file atomically."""
    held = CostsFile(VERSION, made, dict(machine), {name: getattr(costs, name) for name in Costs.__slots__})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(msgspec.to_builtins(held), indent=2) + "\n")
    except OSError as error:
        said = os.strerror(error.errno or 0)
        raise ConfigError(f"costs: cannot write {path}: {said}; let this user write there") from error


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """Settings of a worker's KV transfers, the same for all peers."""

    strategy: Strategy | None = None  # None to choose the cheapest for each read, by `costs`
    costs: Costs = field(default_factory=Costs)
    timed_read_bytes: int = 2 << 20  # size of the READs that measure the speed of a new peer; 0 for none
    staging_bytes: int = 64 << 20  # of each of the three staging areas; 0 for none
    host: str = "127.0.0.1"  # the gather channel listens on it
    advertise_host: str = "127.0.0.1"  # sent to readers
    keys: Keys = field(default_factory=random_keys)
    peers: AllowedPeers = ANY_PEER
    ports: PortRange | None = None  # that the gather channel and UCX may listen on; None for any
    lanes: int = 2
    lane_bytes: int = LANE_BYTES  # approximate minimum of a route that one lane reads
    verify: bool = False  # compare digests of what was read with those of the peer
