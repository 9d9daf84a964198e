"""Results of sections, stored in a folder: one JSON file for each section."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import psutil

from kvferry import __version__
from kvferry.common.errors import ConfigError
from kvferry.engines.vllm.version import installed, nixl_version, vllm_version
from kvferry.tools.measuring.rounds import machine_facts


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a section's command.

    Attributes:
        command: the command, as a user types it.
        seconds: time that the command took.
        date: day on which it ended, as YYYY-MM-DD in UTC.
        machine: properties of the machine, by name.
        versions: versions of the packages that were measured, by name.
        commit: Git commit of the checkout; None if there is none.
        document: what the command printed, as a JSON value; None if it failed.
        error: what the command said last, if it failed; otherwise None.
    """

    command: tuple[str, ...]
    seconds: float
    date: str
    machine: dict[str, str]
    versions: dict[str, str]
    commit: str | None
    document: Any
    error: str | None


def this_machine() -> dict[str, str]:
    """Return the properties of this machine that results depend on."""
    facts = machine_facts()
    memory = psutil.virtual_memory().total / (1 << 30)
    return {
        "cores": str(facts.cores),
        "processor": facts.cpu,
        "memory": f"{memory:.0f} GiB",
        "UCX_TLS": facts.transports or "not set",
    }


def these_versions() -> dict[str, str]:
    """Return the versions of the packages that results depend on."""
    return {
        "kvferry": __version__,
        "vLLM": vllm_version() or "none",
        "NIXL": nixl_version() or "none",
        "torch": installed("torch") or "none",
        "Python": platform.python_version(),
    }


def this_commit(checkout: Path) -> str | None:
    """Return the short name of the checkout's commit, with "-dirty" if files have changed; None without Git.

    Args:
        checkout: root folder of the checkout.
    """
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],  # noqa: S607 - Git is wherever it is
            cwd=checkout,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip() or None


def save(result: Result, folder: Path, name: str) -> None:
    """Store a section's result, replacing an older one in one step.

    Args:
        result: result to store.
        folder: folder of results. It is created if it does not exist.
        name: name of the section.

    Raises:
        ConfigError: the file cannot be written.
    """
    path = _path(folder, name)
    fresh = path.with_suffix(".new")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=0))
        fresh.replace(path)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; name another folder with --results"
        ) from error


def load(folder: Path, name: str, command: tuple[str, ...]) -> Result | None:
    """Return a section's stored result; None if there is none, or if its command failed.

    Args:
        folder: folder of results.
        name: name of the section.
        command: the section's command. A result of other arguments is refused.

    Raises:
        ConfigError: the result cannot be read, or is of another command, machine or version.
    """
    path = _path(folder, name)
    try:
        result = msgspec.json.decode(path.read_bytes(), type=Result)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; {_REMEDY}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is not the result of a section: {error}; {_REMEDY}") from error
    if result.error is not None:
        return None
    if result.command != command:
        raise ConfigError(f"{path} is of another command, `{' '.join(result.command)}`; {_REMEDY}")
    for kind, then, now in (
        ("machine", result.machine, this_machine()),
        ("version", result.versions, these_versions()),
    ):
        if different := [name for name in now if then.get(name) != now[name]]:
            which = different[0]
            raise ConfigError(
                f"{path} is of another {kind} ({which}: {then.get(which)}, here {now[which]}); {_REMEDY}"
            )
    return result


_REMEDY = "leave out --reuse to measure again, or name another folder with --results"


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"
