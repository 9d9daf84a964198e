"""Create secrets: the machine's key, and files for the setting ``secret_file``.

The machine's key is written to a temporary file and then hard-linked to its final name. So two engines that
start at the same time use the same key, and no engine reads a partial file.
"""

from __future__ import annotations

import base64
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvferry.errors import ConfigError
from kvferry.operating_system import require_posix
from kvferry.transport.security import SECRET_BYTES
from kvferry.whole_file import create_private_file

KEY_NAME = "key"
"""Name of the file with the machine's key: the secret that all engines of a user on a machine share."""

REMEDY = "set secret_file to a file with the engines' secret (kvferry keygen FILE makes one)"


def new_secret() -> str:
    """Return a new random secret, as one line of Base64 text."""
    return base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode() + "\n"


def write_secret(path: Path) -> None:
    """Create a file with a new random secret. Only the owner of the file can read it.

    Raises:
        ConfigError: the file exists, or cannot be written, or this system cannot close it to other users.
    """
    require_posix(f"closing {path} to other users")
    try:
        create_private_file(path, new_secret())
    except FileExistsError as error:
        raise ConfigError(
            f"{path} exists and is not overwritten, since engines may use it; give another name"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {os.strerror(error.errno or 0)}; give a file in a directory of yours"
        ) from error


@contextmanager
def private_directory(folder: Path, *, make: bool) -> Iterator[int]:
    """Open the directory that holds the machine's key, and yield its file descriptor.

    The machine's key is the secret that all engines of a user on a machine share. Check that only this user
    has access to the directory.

    Args:
        folder: path of the directory.
        make: True to create the directory if it does not exist.

    Raises:
        ConfigError: the directory cannot be created or opened, belongs to another user, or is accessible to
            other users.
        FileNotFoundError: the directory does not exist and `make` is false.
    """
    require_posix(f"closing {folder} to other users")
    try:
        if make:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not make:
            raise
        raise _unusable(folder, "it is a symbolic link" if _is_link(folder) else _why(error)) from error
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            raise _unusable(folder, f"it belongs to user {found.st_uid}, expected {os.geteuid()}")
        if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            mode = f"{stat.S_IMODE(found.st_mode):o}"
            raise _unusable(folder, f"others may use it (mode {mode}); chmod 700 {folder}")
        yield descriptor
    finally:
        os.close(descriptor)


def make_key(folder: Path, directory: int) -> None:
    """Create the file with the machine's key: the secret that all engines of a user on a machine share.

    Keep an existing file, because another engine may create the file at the same time.

    Args:
        folder: path of the directory, for error messages.
        directory: file descriptor of the directory.

    Raises:
        ConfigError: the file cannot be created.
    """
    name = f".{KEY_NAME}-{secrets.token_hex(8)}"
    try:
        try:
            _write_new(name, directory)
            with suppress(FileExistsError):
                os.link(name, KEY_NAME, src_dir_fd=directory, dst_dir_fd=directory)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=directory)
        os.fsync(directory)
    except OSError as error:
        raise _unusable(folder, _why(error)) from error


def _write_new(name: str, directory: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC  # O_EXCL also refuses symbolic links
    with os.fdopen(os.open(name, flags, 0o600, dir_fd=directory), "w", encoding="ascii") as file:
        file.write(new_secret())
        file.flush()
        os.fsync(file.fileno())


def _unusable(folder: Path, why: str) -> ConfigError:
    return ConfigError(
        f"no secret_file is set, and {folder} cannot hold the key of this user's engines: {why}; {REMEDY}"
    )


def _is_link(folder: Path) -> bool:
    return os.path.islink(folder)  # noqa: PTH114 - Path.is_symlink raises if access is denied


def _why(error: OSError) -> str:
    return os.strerror(error.errno or 0)
