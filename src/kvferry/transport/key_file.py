"""Read the secret that engines share from its file.

The setting ``secret_file`` names the file. Without that setting, all engines of a user on a machine share the
*machine's key*: a file in the user's state directory that the first engine creates.

Another user must not be able to plant a machine's key. So the directory and the file must belong to this
user, give no access to others, and not be symbolic links.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvferry.errors import ConfigError
from kvferry.operating_system import has_posix, pwd, require_posix
from kvferry.transport.key_creation import KEY_NAME, REMEDY, make_key, private_directory
from kvferry.transport.security import Keys, derive_keys

MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class KeyLocation:
    """The location of the file with an engine's secret.

    Attributes:
        path: path of the file.
        configured: True if the setting ``secret_file`` names the file. False for the machine's key, which all
            engines of a user on a machine share.
    """

    path: Path
    configured: bool

    def __str__(self) -> str:
        """Return a description of the file, for error messages."""
        return f"secret_file {self.path}" if self.configured else f"this machine's key {self.path}"


def key_location(secret_file: str | None, environment: Mapping[str, str] = os.environ) -> KeyLocation:
    """Return the location of the file with an engine's secret. The file may not exist yet.

    Args:
        secret_file: path from the setting ``secret_file``. None for the file of the machine's key: the secret
            that all engines of a user on a machine share.
        environment: environment variables, which determine the user's state directory.

    Raises:
        ConfigError: `secret_file` is None, and the user has no state directory.
    """
    if secret_file is not None:
        return KeyLocation(Path(secret_file), configured=True)
    for name, below in (("XDG_STATE_HOME", ""), ("HOME", ".local/state")):
        if os.path.isabs(environment.get(name, "")):  # noqa: PTH117 - an empty text is no path
            return KeyLocation(Path(environment[name], below, "kvferry", KEY_NAME), configured=False)
    require_posix("this machine's key")
    try:
        home = pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        home = ""
    if not home:
        raise ConfigError(
            "no secret_file is set, and there is no place for a key of this machine: HOME and XDG_STATE_HOME "
            f"are not set, and user {os.geteuid()} has no home directory; {REMEDY}"
        )
    return KeyLocation(Path(home, ".local/state/kvferry", KEY_NAME), configured=False)


def read_keys(secret_file: str | None) -> Keys:
    """Read an engine's secret from a file, and derive the CURVE key pair from it.

    Args:
        secret_file: path of the file, from the setting ``secret_file``. None for the default file, which all
            engines of one user on a machine share. The default file is created if it does not exist.

    Raises:
        ConfigError: the file cannot be read or created, other users can access it, or it holds no valid
            secret.
    """
    place = key_location(secret_file)
    if place.configured:
        return derive_keys(_given_secret(place))
    with private_directory(place.path.parent, make=True) as directory:
        if not _exists(directory):
            make_key(place.path.parent, directory)
        return derive_keys(_machine_secret(place, directory))


def existing_keys(secret_file: str | None) -> Keys | None:
    """Read an engine's secret from its file, and derive the CURVE key pair from it. Create no file.

    Args:
        secret_file: path from the setting ``secret_file``. None for the file of the machine's key: the secret
            that all engines of a user on a machine share.

    Returns:
        Key pair; None if `secret_file` is None and there is no machine's key: not yet, or not on this system.

    Raises:
        ConfigError: the file cannot be read, is accessible to other users, or holds no valid secret.
    """
    if secret_file is None and not has_posix():
        return None
    place = key_location(secret_file)
    if place.configured:
        return derive_keys(_given_secret(place))
    try:
        with private_directory(place.path.parent, make=False) as directory:
            return derive_keys(_machine_secret(place, directory)) if _exists(directory) else None
    except FileNotFoundError:
        return None


def _given_secret(place: KeyLocation) -> bytes:
    """Read an engine's secret from the file that the setting ``secret_file`` names.

    The path may be a symbolic link, and the file's group may have access to the file, because Kubernetes
    mounts secrets in this way. The owner must be this user or root.

    Args:
        place: location of the file.

    Raises:
        ConfigError: the file cannot be read, is not a regular file, has another owner, is accessible to users
            who are neither its owner nor in its group, or holds no valid secret.
    """
    require_posix(f"checking who may read {place.path}")
    try:
        descriptor = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(
            f"{place}: {_why(error)}; name a readable file with the secret (kvferry keygen FILE makes one)"
        ) from error
    return _secret_in(descriptor, place, closed_to=stat.S_IRWXO, owners=(os.geteuid(), 0))


def _machine_secret(place: KeyLocation, directory: int) -> bytes:
    try:
        descriptor = os.open(
            KEY_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory
        )
    except OSError as error:
        what = "it is a symbolic link" if _is_link(directory) else _why(error)
        raise ConfigError(f"{place}: {what}; remove it, or {REMEDY}") from error
    return _secret_in(descriptor, place, closed_to=stat.S_IRWXG | stat.S_IRWXO, owners=(os.geteuid(),))


def _secret_in(descriptor: int, place: KeyLocation, closed_to: int, owners: tuple[int, ...]) -> bytes:
    """Check owner and permissions of an open file, return the secret in it as bytes, and close the file.

    Args:
        descriptor: file descriptor.
        place: location of the file, for error messages.
        closed_to: permission bits that must not be set.
        owners: ids of the users that may own the file.

    Raises:
        ConfigError: the file is not a regular file, has a forbidden owner or permission, cannot be read, or
            holds no valid secret.
    """
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{place} is no regular file; name the file with the engines' secret")
        if found.st_uid not in owners:
            raise ConfigError(
                f"{place} belongs to user {found.st_uid}, expected {os.geteuid()}; "
                f"chown it to {os.geteuid()}, or {REMEDY}"
            )
        if found.st_mode & closed_to:
            raise ConfigError(
                f"{place} can be used by others than its owner (mode {stat.S_IMODE(found.st_mode):o}), who "
                f"would be peers of this engine; chmod 600 {place.path} (a Kubernetes Secret: defaultMode "
                "0400), and if others may have read it, make a new key"
            )
        text = os.read(descriptor, MAX_SECRET_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(
            f"{place}: {_why(error)}; name a readable file with the secret (kvferry keygen FILE makes one)"
        ) from error
    finally:
        os.close(descriptor)
    if not MIN_SECRET_BYTES <= len(text) <= MAX_SECRET_BYTES:
        size = f"more than {MAX_SECRET_BYTES}" if len(text) > MAX_SECRET_BYTES else f"{len(text)}"
        raise ConfigError(
            f"{place} holds {size} bytes, a secret has {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES}; "
            "kvferry keygen FILE makes one"
        )
    return text


def _exists(directory: int) -> bool:
    """Return whether the file with the machine's key exists. A dangling symbolic link counts as existing.

    Args:
        directory: file descriptor of the key's directory.
    """
    try:
        os.stat(KEY_NAME, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _is_link(directory: int) -> bool:
    return stat.S_ISLNK(os.stat(KEY_NAME, dir_fd=directory, follow_symlinks=False).st_mode)


def _why(error: OSError) -> str:
    return os.strerror(error.errno or 0)
