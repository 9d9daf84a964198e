"""Read a configuration, and check whether its tiers work here: host memory, directories, object stores."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvferry.common.errors import ConfigError
from kvferry.common.units import format_bytes, parse_size
from kvferry.connector import ConnectorConfig, Tiers
from kvferry.engines.vllm import TransferCheck, Verdict
from kvferry.memory import available_memory
from kvferry.tiers import (
    DEFAULT_CAPACITY_DIVISOR,
    FileSettings,
    HostSettings,
    StorageSettings,
    check_encryption,
    default_directory,
)
from kvferry.tools.doctor.finding import (
    Finding,
    ProcessResult,
    bad,
    from_error,
    note,
    ok,
    run_check,
    run_python,
)
from kvferry.tools.doctor.machine import Mount, list_mounts, mount_of
from kvferry.tools.doctor.probes import MODULE, parse_output

_PATH_SECONDS = 10.0
# Permissions of the group and of all others.
_OTHERS = 0o077
_LEAST_CAPACITY = 1 << 20
# Far more than any configuration has.
_MOST_BYTES = 1 << 20
_NETWORK = frozenset(
    ["nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "glusterfs", "beegfs", "9p", "afs", "wekafs"]
)
# By kinds of file systems, as the kernel names them.
_DRAWBACKS = (
    (
        ("tmpfs", "ramfs", "devtmpfs"),
        "it is memory, and lost when the machine restarts",
        "use a disk, or a larger host tier",
    ),
    # The root of a container is a stack of layers.
    (("overlay", "aufs"), "it is lost with the container", "use a separate volume"),
    (
        _NETWORK,
        "machines can share it if all engines run as one user; it hangs if its server does",
        "keep it if machines share the tier; otherwise a local disk is faster",
    ),
)
_LOCKS = "mount it so that locks work: processes that share it need them"
_REMEDIES = {
    errno.EROFS: "mount it for writing",
    errno.EACCES: "check its owner and mode",
    errno.ENOLCK: _LOCKS,
    errno.EOPNOTSUPP: _LOCKS,
    errno.ENOSYS: _LOCKS,
}

Probe = Callable[[str], ProcessResult]


def check(tiers: Tiers) -> Iterator[Finding]:
    """Check that all tiers work on this machine."""
    yield host(tiers.host)
    for number, one in enumerate(tiers.slow):
        subject = f"tier {number + 1}, {one.kind}"
        own_check = OWN_CHECKS.get(type(one))
        seconds = 2 * _PATH_SECONDS if own_check else one.trial_seconds
        yield from run_check(subject, seconds, partial(own_check or try_storage, subject, one))
    yield from run_check("tiers", 2 * _PATH_SECONDS, partial(duplicate_directories, tiers))


def host(settings: HostSettings, room: Callable[[], tuple[int, str] | None] = available_memory) -> Finding:
    """Check that memory suffices for the host tier. `room` returns (available bytes, name of the limit)."""
    subject = "host memory"
    found = room()
    if found is None:
        return note(subject, "the available memory cannot be read here", "check /proc/meminfo")
    available, where = found
    if settings.capacity is None:
        return ok(subject, f"an engine takes a tenth of the {format_bytes(available)} {where} when it starts")
    capacity = parse_size(settings.capacity)
    if capacity > available:
        return bad(
            subject,
            f"the tier needs {format_bytes(capacity)}, but only {format_bytes(available)} are {where}: the "
            "engine would not start",
            "lower the tier's capacity, unless a running engine holds that memory already",
        )
    return ok(subject, f"{format_bytes(capacity)} of the {format_bytes(available)} {where}")


def _probe(path: str) -> ProcessResult:
    return run_python(["-m", MODULE, "path", path], _PATH_SECONDS)


def file(
    subject: str,
    settings: FileSettings,
    probe: Probe = _probe,
    mounts: Callable[[], list[Mount]] = list_mounts,
) -> Iterator[Finding]:
    """Check the directory of a file tier: access, capacity and file system."""
    try:
        directory = os.path.abspath(settings.path or default_directory())  # noqa: PTH100 - same as in the tier
        encrypted = settings.read_keys() is not None
    except ConfigError as error:
        yield from_error(subject, error)
        return
    # The engine creates the default directory, but not one that is configured: its disk may not be mounted.
    path = directory
    if not settings.path:
        path = str(next(one for one in (Path(path), *Path(path).parents) if one.exists()))
    # In a process, because a dead network mount hangs whoever touches it, and cannot be interrupted.
    ended = probe(path)
    probed: dict[str, Any] = {name: value for line in parse_output(ended.out) for name, value in line.items()}
    mount = mount_of(probed.get("real", path), mounts())
    on = f" ({mount.kind} of {mount.source}, mounted on {mount.point})" if mount else ""
    try:
        _raise_refusal(path, probed, encrypted)
    except ConfigError as error:
        yield from_error(subject, error)
        return
    if "direct" not in probed and "failed" not in probed:
        silent = f"does not answer for {_PATH_SECONDS:g} s"
        why = silent if ended.code is None else f"cannot be checked: {ended.how}"
        yield bad(
            subject, f"{path}{on} {why}", "check the mount: it hangs, and the engine would hang at its start"
        )
        return
    if "failed" in probed:
        yield bad(
            subject,
            f"{path}{on}: cannot create, lock and write a file: {probed['failed']}",
            probed.get("advice") or _REMEDIES.get(probed["number"], "check its owner, mode and mount"),
        )
    yield from _check_capacity(subject, settings, probed)
    if mount is not None:
        yield _describe_mount(subject, path, mount)
    if probed.get("direct") is False:
        yield note(
            subject,
            "no direct I/O there: chunks go through the page cache, which costs memory and CPU time",
            "use another file system, if that matters",
        )
    if path == directory and probed["mode"] & _OTHERS:
        yield note(
            subject,
            f"{path} has mode {probed['mode']:o}: other users can access chunks, which reveal prompts",
            f"chmod 700 {path}, unless you want that",
        )


def duplicate_directories(tiers: Tiers) -> Iterator[Finding]:
    """Report file tiers whose paths lead to the same directory through links or mounts."""
    try:
        paths = {
            number: one.path or default_directory()
            for number, one in enumerate(tiers.slow, 1)
            if isinstance(one, FileSettings)
        }
    except ConfigError:
        return  # `file` reports it
    if len(paths) < 2:
        return
    ended = run_python(["-m", MODULE, "twins", *paths.values()], _PATH_SECONDS)
    for number, probed in zip(paths, parse_output(ended.out), strict=False):
        if probed["twin"] is not None:
            yield bad(
                f"tier {number}, file",
                f"{probed['path']} and {probed['twin']}, which is a tier already, are one directory: the "
                "engine would serve without this tier",
                "name another directory, or leave out one of the two",
            )


def _raise_refusal(path: str, probed: Mapping[str, Any], encrypted: bool) -> None:
    """Raise ConfigError if a file tier, encrypted or not, would refuse the directory."""
    if "refused" in probed:
        raise ConfigError(probed["refused"])
    if probed.get("encrypted") is not None:
        check_encryption(path, found=probed["encrypted"], expected=encrypted)


def _check_capacity(subject: str, settings: FileSettings, probed: Mapping[str, Any]) -> Iterator[Finding]:
    ledger = probed.get("ledger")
    free, used = probed["free"], ledger[1] if ledger else 0
    if settings.capacity is not None:
        capacity, why = parse_size(settings.capacity), "as configured"
    elif ledger:
        capacity, why = ledger[0], "as the directory was set to before"
    else:
        capacity, why = (free + used) // DEFAULT_CAPACITY_DIVISOR, "a tenth of what is free"
    room = f"{format_bytes(free)} free{f' and {format_bytes(used)} of cache' if used else ''}"
    what = f"a capacity of {format_bytes(capacity)}, {why}, and {room}"
    if capacity > free + used:
        without = "the engine would serve without this tier"
        yield bad(subject, f"{what}: {without}", "lower the capacity or free space")
    elif capacity < _LEAST_CAPACITY:
        yield bad(subject, f"{what}: too little for chunks", "raise the capacity or free space")
    else:
        yield ok(subject, f"{settings.path or default_directory()}: {format_bytes(capacity)}, {why}; {room}")


def _describe_mount(subject: str, path: str, mount: Mount) -> Finding:
    where = f"{path} is on {mount.kind} ({mount.source}, mounted on {mount.point})"
    for kinds, found, advice in _DRAWBACKS:
        if mount.kind in kinds or (kinds is _NETWORK and mount.kind.startswith("fuse")):
            return note(subject, f"{where}: {found}", advice)
    return ok(subject, where)


def try_storage(subject: str, settings: StorageSettings) -> list[Finding]:
    """Check that a test value can be written to the storage of a tier and removed again."""
    try:
        result = settings.try_out()
    except ConfigError as error:
        return [from_error(subject, error)]
    return [bad(subject, result.found, result.advice) if result.advice else ok(subject, result.found)]


OWN_CHECKS: Mapping[type[StorageSettings], Callable[[str, Any], Iterable[Finding]]] = {FileSettings: file}
"""Checks by class of storage settings. Other kinds of storage are checked with `try_storage`."""


_FINDINGS: Mapping[Verdict, Callable[[str, str], Finding]] = {
    Verdict.ACCEPTED: ok,
    Verdict.NOTED: lambda where, text: note(where, *text.split("; ", 1)),
    Verdict.REFUSED: lambda where, text: from_error(where, ConfigError(text)),
}


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The valid settings of each `KVFerryConnector` in a configuration file, and findings on all."""

    configs: tuple[ConnectorConfig, ...]
    findings: tuple[Finding, ...]


def read_file(path: str) -> ConfigFile:
    """Read and check a value of ``--kv-transfer-config``, or only its part ``kv_connector_extra_config``.

    Raises:
        ConfigError: the file cannot be read, or is not a JSON object.
    """
    checked = TransferCheck(_load_json(path))
    found = [_FINDINGS[one.verdict](one.where, one.text) for one in checked.remarks]
    return ConfigFile(tuple(checked.configs), tuple(found))


def _load_json(path: str) -> dict[str, Any]:
    try:
        with Path(path).open("rb") as file:
            text = file.read(_MOST_BYTES + 1)  # never all of a device or of a checkpoint
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise ConfigError(f"--config {path}: {why}; name the file with the settings") from error
    if len(text) > _MOST_BYTES:
        raise ConfigError(
            f"--config {path} is larger than 1 MiB, so it is no configuration; name another file"
        )
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"--config {path} is not JSON ({error}); `kvferry config` prints a configuration"
        ) from error
    if not isinstance(given, dict):
        raise ConfigError(
            f"--config {path} holds a JSON {type(given).__name__}; it must be an object, as "
            "`kvferry config` prints it"
        )
    return given
