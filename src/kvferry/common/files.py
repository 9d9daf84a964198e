"""Write files as a whole: a write that fails, for example on a full disk, leaves no part of a file behind."""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from kvferry.common.errors import ConfigError


def replace_file(path: Path, text: str) -> None:
    """Write a text to a file in UTF-8. An existing file keeps its permissions, and its content on a failure.

    A symbolic link is followed. A device or a pipe is written to directly.
    """
    path = path.resolve()
    mode = path.stat().st_mode if path.exists() else None
    if mode is not None and not stat.S_ISREG(mode):
        path.write_text(text, encoding="utf-8")
        return
    beside = _write_beside(path, text, 0o666)
    try:
        if mode is not None:
            beside.chmod(stat.S_IMODE(mode))
        beside.replace(path)
    except OSError:
        beside.unlink()
        raise


def create_private_file(path: Path, text: str) -> None:
    """Write a text to a new file in UTF-8 for its owner alone. Raise FileExistsError if the path is taken."""
    beside = _write_beside(path, text, 0o600)
    try:
        # An empty file takes the name first, because a rename would replace a file of somebody else.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        beside.replace(path)
    except OSError:
        beside.unlink()
        raise


def _write_beside(path: Path, text: str, mode: int) -> Path:
    beside = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            # Before the rename: after a crash, some file systems have the new name without the content.
            os.fsync(file.fileno())
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    return beside


# Permissions of a file's owner.
_OWNERS = 0o700


def open_private(path: str, flags: int) -> int:
    """Open a file, and if it is new, give it mode 0600: an `opener` for `open`."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def read_private(
    descriptor: int,
    where: str,
    path: str | os.PathLike[str],
    *,
    content: str,
    harm: str,
    remedy: str,
    owners: tuple[int, ...],
    closed_to: int,
    most: int,
) -> bytes:
    """Return the first `most` bytes of an open file with a secret, and close it.

    Args:
        where, content, harm, remedy: parts of messages: the setting with the path, what the file holds, what
            others could do with it, and what else to do.
        owners: user ids that may own the file.
        closed_to: permissions that the file must not have.

    Raises:
        ConfigError: it is no regular file, has another owner, or is open to others.
        OSError: it cannot be read.
    """
    try:
        # The open file is checked, not its name, which may lead to another file by now.
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{where} is no regular file; name the file with {content}")
        if found.st_uid not in owners:
            raise ConfigError(
                f"{where} belongs to user {found.st_uid}, expected {os.geteuid()}; "
                f"chown it to {os.geteuid()}, or {remedy}"
            )
        if found.st_mode & closed_to:
            raise ConfigError(
                f"{where} can be used by others than its owner (mode {stat.S_IMODE(found.st_mode):o}), who "
                f"{harm}; chmod 600 {path} (a Kubernetes Secret: defaultMode 0400), and if others may have "
                "read it, make a new key"
            )
        return os.read(descriptor, most)
    finally:
        os.close(descriptor)


def check_umask(status: str | None = None) -> None:
    """Raise ConfigError if the umask takes the owner's permissions from the files that this process creates.

    `status` is text in the format of ``/proc/self/status``; None to read that file.
    """
    if status is None:
        try:
            status = Path("/proc/self/status").read_text()  # os.umask cannot read without writing
        except OSError:
            return
    found = re.search(r"^Umask:\s+([0-7]+)$", status, re.MULTILINE)
    if found and int(found[1], 8) & _OWNERS:
        raise ConfigError(
            f"umask is {found[1]}, so engines could not use the files that they make; run umask 077 first"
        )


def user_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """Return kvferry's cache directory: ``$XDG_CACHE_HOME/kvferry``, or else ``~/.cache/kvferry``.

    Raises:
        ConfigError: ``XDG_CACHE_HOME`` is not set, and the user has no home directory.
    """
    try:
        return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvferry"
    except RuntimeError as error:
        # Containers may run as a user id without a name.
        raise ConfigError(
            "this user has no home directory; set XDG_CACHE_HOME to a directory that it may write"
        ) from error


def expanded(path: str) -> Path:
    """Replace a leading ``~`` of a path with the user's home directory, if there is one."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser raises
