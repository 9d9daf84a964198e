"""The file with the keys that a storage tier encrypts its chunks with: the setting `key_file`.

Each line is one key: an id, a space, and 32 random bytes in Base64. The first line encrypts.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat

from kvferry.common.errors import ConfigError
from kvferry.common.files import read_private
from kvferry.common.machine import require_posix
from kvferry.tiers.format.encryption import SECRET_BYTES, EncryptionKey, EncryptionKeys, is_key_id

_MAX_BYTES = 1 << 16
_LINE = f"a line is an id, a space, and {SECRET_BYTES} random bytes in Base64"


def read_key_file(path: str) -> EncryptionKeys:
    """Return the keys in a file.

    Raise ConfigError if the file is missing, open to all users or another user's, has no key, or a line is
    not valid.
    """
    require_posix(f"checking who may read {path}")
    where = f"key_file {path}"
    try:
        # Kubernetes mounts secrets as symbolic links to files of root that the group may read.
        data = read_private(
            os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK),
            where,
            path,
            content="the tier's keys",
            harm="could decrypt what the tier stores",
            remedy="name another file",
            owners=(os.geteuid(), 0),
            closed_to=stat.S_IRWXO,
            most=_MAX_BYTES + 1,
        )
    except (OSError, ValueError) as error:
        why = os.strerror(error.errno or 0) if isinstance(error, OSError) else "no file has such a name"
        raise ConfigError(f"{where}: {why}; name a readable file with the tier's keys; {_LINE}") from error
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"{where} has more than {_MAX_BYTES} bytes; name the file with the tier's keys")
    lines = enumerate(data.decode("latin-1").splitlines(), 1)
    keys = [_key(where, number, line) for number, line in lines if line.strip()]
    if not keys:
        raise ConfigError(f"{where} is empty; write a key into it: {_LINE}")
    for number, key in enumerate(keys):
        if key.id in {one.id for one in keys[:number]}:
            raise ConfigError(f"{where} has two keys with the id {key.id!r}; give each key an id of its own")
    return EncryptionKeys(tuple(keys))


def _key(where: str, number: int, line: str) -> EncryptionKey:
    # No message repeats a line: it may be a secret.
    words = line.split()
    if len(words) != 2 or not is_key_id(words[0]):
        raise ConfigError(
            f"{where}: line {number} is not valid; {_LINE}; an id has 1 to 31 printable ASCII characters"
        )
    try:
        secret = base64.b64decode(words[1], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ConfigError(f"{where}: the key in line {number} is not Base64; {_LINE}") from error
    if len(secret) != SECRET_BYTES:
        raise ConfigError(
            f"{where}: the key in line {number} has {len(secret)} bytes, expected {SECRET_BYTES}; make one "
            "with: openssl rand -base64 32"
        )
    return EncryptionKey(words[0], secret)
