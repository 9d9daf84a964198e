"""Client of an engine's admin API, for `kvferry cache`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec

from kvferry.errors import ConfigError
from kvferry.terminal import printable
from kvferry.transport.key_file import existing_keys, key_location
from kvferry.transport.security import admin_token

_SECONDS = 15.0


def ask(engine: str, secret_file: str | None, call: str, body: Mapping[str, object]) -> dict[str, Any]:
    """Call the admin API of an engine, and return its answer.

    Args:
        engine: URL of the API.
        secret_file: the engine's setting ``secret_file``; None for this machine's key.
        call: name of the call.
        body: its arguments.

    Raises:
        ConfigError: the key cannot be read, the engine does not answer, or it refuses the call.
    """
    keys = existing_keys(secret_file)
    if keys is None:
        raise ConfigError(
            f"there is no key at {key_location(secret_file).path}; start the engine first, or give its "
            "--secret-file"
        )
    try:
        answer = httpx.post(
            f"{engine.rstrip('/')}/v1/{call}",
            content=msgspec.json.encode(body),
            headers={"Authorization": f"Bearer {admin_token(keys)}"},
            timeout=_SECONDS,
            trust_env=False,
        )
        found = msgspec.json.decode(answer.content, type=dict[str, Any])
    except (httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{printable(engine)} does not answer as an admin API ({printable(str(error))}); give the host "
            "and port of the engine's setting admin"
        ) from error
    if answer.is_error:
        raise ConfigError(f"{printable(engine)}: {printable(str(found.get('error', answer.status_code)))}")
    return found


def read_tokens(file: str) -> list[int]:
    """Read a JSON list of token ids from a file; ``-`` stands for standard input.

    Raises:
        ConfigError: the file cannot be read, or holds no such list.
    """
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return msgspec.json.decode(data, type=list[int])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"--tokens {file}: {printable(str(error))}; give a JSON list of token ids, such as vLLM's "
            "POST /tokenize returns"
        ) from error
