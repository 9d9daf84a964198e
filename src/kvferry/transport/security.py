"""CURVE keys of the control and gather channels, which are always encrypted and authenticated.

All engines that may exchange KV share one secret. Each derives the same CURVE key pair from it. A listener
admits only clients that prove that they have this pair. A peer with an engine's transport metadata can read
the engine's memory, so no channel works without keys.
"""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from kvferry.common.errors import ConfigError
from kvferry.common.files import create_private_file, read_private
from kvferry.common.machine import has_posix, pwd, require_posix

SECRET_BYTES = 32  # size in bytes of the secrets that kvferry creates
MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 1 << 16
KEY_NAME = "key"  # name of the file with the machine's key
_REMEDY = "set secret_file to a file with the engines' secret (kvferry keygen FILE makes one)"
_NAME_ONE = "name a readable file with the secret (kvferry keygen FILE makes one)"


@dataclass(frozen=True, slots=True)
class Keys:
    """A CURVE key pair, Z85-encoded, with which engines encrypt and authenticate their connections."""

    public: bytes
    secret: bytes

    @property
    def fingerprint(self) -> str:
        """Eight hex digits that identify the key pair in messages, without revealing the keys."""
        return hashlib.blake2b(self.public, digest_size=4, person=b"kvferry-finger").hexdigest()


def derive_keys(secret: bytes) -> Keys:
    """Derive a key pair from a secret. Raise ConfigError if libzmq was built without CURVE."""
    own = z85.encode(hashlib.blake2b(secret, digest_size=32, person=b"kvferry-curve").digest())
    try:
        return Keys(zmq.curve_public(own), own)
    except zmq.ZMQError as error:
        raise ConfigError(
            "this pyzmq's libzmq cannot encrypt (CURVE), which channels between engines need; "
            "install pyzmq from its wheel"
        ) from error


def admin_token(keys: Keys) -> str:
    """Return the token of the admin API of engines with these keys: 64 hex digits."""
    # A digest, so that the keys cannot be computed from it. Operators send it over HTTP.
    return hashlib.blake2b(keys.secret, digest_size=32, person=b"kvferry-admin").hexdigest()


def random_keys() -> Keys:
    """Return a new key pair."""
    return derive_keys(secrets.token_bytes(SECRET_BYTES))


def secure_server(socket: zmq.Socket[Any], keys: Keys) -> None:
    """Encrypt the connections of a socket that is not bound yet. An `_Authenticator` checks the clients."""
    socket.curve_secretkey, socket.curve_publickey, socket.curve_server = keys.secret, keys.public, True


def secure_client(socket: zmq.Socket[Any], keys: Keys) -> None:
    """Encrypt the connection of a ZeroMQ socket that is not connected yet."""
    socket.curve_secretkey, socket.curve_publickey, socket.curve_serverkey = (
        keys.secret, keys.public, keys.public,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _KeyLocation:
    """The location of the file with an engine's secret: the setting ``secret_file``, or the machine's key."""

    path: Path
    configured: bool

    def __str__(self) -> str:
        return f"secret_file {self.path}" if self.configured else f"this machine's key {self.path}"


def key_location(secret_file: str | None, environment: Mapping[str, str] = os.environ) -> _KeyLocation:
    """Return the location of an engine's secret, by default the machine's key. It may not exist yet."""
    if secret_file is not None:
        return _KeyLocation(Path(secret_file), configured=True)
    for name, below in (("XDG_STATE_HOME", ""), ("HOME", ".local/state")):
        if os.path.isabs(environment.get(name, "")):  # noqa: PTH117 - an empty text is no path
            return _KeyLocation(Path(environment[name], below, "kvferry", KEY_NAME), configured=False)
    require_posix("this machine's key")
    try:
        home = pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        home = ""
    if not home:
        raise ConfigError(
            "no secret_file is set, and there is no place for a key of this machine: HOME and XDG_STATE_HOME "
            f"are not set, and user {os.geteuid()} has no home directory; {_REMEDY}"
        )
    return _KeyLocation(Path(home, ".local/state/kvferry", KEY_NAME), configured=False)


def read_keys(secret_file: str | None) -> Keys:
    """Read an engine's secret, or the machine's, which is created if it is missing; derive the key pair.

    Raise ConfigError if the file cannot be read or created, is open to others, or holds no valid secret.
    """
    place = key_location(secret_file)
    if place.configured:
        return derive_keys(_given_secret(place))
    with _private_directory(place.path.parent, make=True) as directory:
        if not _exists(directory):
            _make_key(place.path.parent, directory)
        return derive_keys(_machine_secret(place, directory))


def existing_keys(secret_file: str | None) -> Keys | None:
    """Return the keys as `read_keys` without creating a file; None if this machine has no key."""
    if secret_file is not None:
        return read_keys(secret_file)
    if not has_posix():
        return None
    place = key_location(None)
    try:
        with _private_directory(place.path.parent, make=False) as directory:
            return derive_keys(_machine_secret(place, directory)) if _exists(directory) else None
    except FileNotFoundError:
        return None


def _given_secret(place: _KeyLocation) -> bytes:
    require_posix(f"checking who may read {place.path}")
    try:
        descriptor = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"{place}: {_why(error)}; {_NAME_ONE}") from error
    # Kubernetes mounts secrets as symbolic links to files of root that the group may read.
    return _secret_in(descriptor, place, closed_to=stat.S_IRWXO, owners=(os.geteuid(), 0))


def _machine_secret(place: _KeyLocation, directory: int) -> bytes:
    try:
        descriptor = os.open(
            KEY_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory
        )
    except OSError as error:
        found = os.stat(KEY_NAME, dir_fd=directory, follow_symlinks=False)
        what = "it is a symbolic link" if stat.S_ISLNK(found.st_mode) else _why(error)
        raise ConfigError(f"{place}: {what}; remove it, or {_REMEDY}") from error
    return _secret_in(descriptor, place, closed_to=stat.S_IRWXG | stat.S_IRWXO, owners=(os.geteuid(),))


def _secret_in(descriptor: int, place: _KeyLocation, closed_to: int, owners: tuple[int, ...]) -> bytes:
    """Check the permissions (bits to be closed) and owners of a file, return its secret, and close it."""
    try:
        text = read_private(
            descriptor,
            str(place),
            place.path,
            content="the engines' secret",
            harm="would be peers of this engine",
            remedy=_REMEDY,
            owners=owners,
            closed_to=closed_to,
            most=MAX_SECRET_BYTES + 1,
        ).strip()
    except OSError as error:
        raise ConfigError(f"{place}: {_why(error)}; {_NAME_ONE}") from error
    if not MIN_SECRET_BYTES <= len(text) <= MAX_SECRET_BYTES:
        size = f"more than {MAX_SECRET_BYTES}" if len(text) > MAX_SECRET_BYTES else f"{len(text)}"
        raise ConfigError(
            f"{place} holds {size} bytes, a secret has {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES}; "
            "kvferry keygen FILE makes one"
        )
    return text


def _exists(directory: int) -> bool:
    try:
        # A dangling symbolic link exists, too: a key must not be created through it.
        os.stat(KEY_NAME, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _why(error: OSError) -> str:
    return os.strerror(error.errno or 0)


def new_secret() -> str:
    """Return a new random secret, as one line of Base64."""
    return base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode() + "\n"


def write_secret(path: Path) -> None:
    """Create a file with a new random secret, which only its owner can read, or raise ConfigError."""
    require_posix(f"closing {path} to other users")
    try:
        create_private_file(path, new_secret())
    except FileExistsError as error:
        raise ConfigError(
            f"{path} exists and is not overwritten, since engines may use it; give another name"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {_why(error)}; give a file in a directory of yours"
        ) from error


@contextmanager
def _private_directory(folder: Path, *, make: bool) -> Iterator[int]:
    """Yield a descriptor of the folder of the machine's key. Raise FileNotFoundError without `make`."""
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
        is_link = os.path.islink(folder)  # noqa: PTH114 - Path.is_symlink raises if access is denied
        raise _unusable(folder, "it is a symbolic link" if is_link else _why(error)) from error
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


def _make_key(folder: Path, directory: int) -> None:
    """Create the machine's key, or raise ConfigError. Another engine may create it at the same time."""
    name = f".{KEY_NAME}-{secrets.token_hex(8)}"
    try:
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC  # O_EXCL also refuses symbolic links
            with os.fdopen(os.open(name, flags, 0o600, dir_fd=directory), "w", encoding="ascii") as file:
                file.write(new_secret())
                file.flush()
                os.fsync(file.fileno())
            # A link, and not a rename, which would replace the key that another engine has just read.
            with suppress(FileExistsError):
                os.link(name, KEY_NAME, src_dir_fd=directory, dst_dir_fd=directory)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=directory)
        os.fsync(directory)
    except OSError as error:
        raise _unusable(folder, _why(error)) from error


def _unusable(folder: Path, why: str) -> ConfigError:
    return ConfigError(
        f"no secret_file is set, and {folder} cannot hold the key of this user's engines: {why}; {_REMEDY}"
    )
