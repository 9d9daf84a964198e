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

# The engine answers in its next step, and a step may take seconds.
_SECONDS = 15.0


class _Tokenized(msgspec.Struct, frozen=True):
    """The answer of vLLM's ``POST /tokenize``, as far as it is used here.

    Attributes:
        tokens: token ids.
    """

    tokens: list[int]


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
            trust_env=False,  # a proxy must not get the token
        )
        found = msgspec.json.decode(answer.content, type=dict[str, Any])
    except (httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError) as error:
        raise _no_admin_api(engine, str(error)) from error
    if answer.is_error:
        reason = found.get("error")
        if not isinstance(reason, str):  # vLLM's API, for example
            raise _no_admin_api(engine, f"status {answer.status_code}")
        raise ConfigError(f"{printable(engine)}: {printable(reason)}")
    return found


def _no_admin_api(engine: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{printable(engine)} is not an admin API ({printable(reason)}); give the host and port of the "
        "engine's setting admin, which are not those of its OpenAI endpoint"
    )


def read_tokens(file: str) -> list[int]:
    """Read token ids from a file: a JSON list, or the answer of vLLM's ``POST /tokenize``.

    Args:
        file: path of the file; ``-`` stands for standard input.

    Raises:
        ConfigError: the file cannot be read, or holds neither.
    """
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        found = msgspec.json.decode(data, type=list[int] | _Tokenized)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"--tokens {file}: {printable(str(error))}; give a JSON list of token ids, or the answer of "
            "vLLM's POST /tokenize"
        ) from error
    return found.tokens if isinstance(found, _Tokenized) else found
