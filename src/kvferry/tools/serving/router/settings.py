"""The settings of a router."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvferry.errors import ConfigError
from kvferry.observe.http_address import server_url


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """The engines and limits of a router.

    Attributes:
        prefill: base URLs of the prefill engines; empty if those of `decode` compute prompts.
        decode: base URLs of the other engines, at least one.
        silent_seconds: time without a good probe after which an engine is silent, in seconds. It is then
            down, and each request that has got nothing from it for as long ends or is sent to another engine.
            Also the longest time to connect.
        keep_connection_seconds: longest time that an idle connection to an engine is used again.
        probe_seconds: time between two probes of an engine, in seconds.
        max_body_bytes: size of the largest accepted request body, in bytes.
        api_keys: keys of which clients must send one; none to serve everybody.
        engine_key: key to send to engines instead of the client's; None to send no other.
        allowed_origins: origins whose web pages may use the router (CORS); ``*`` for all.
        engines_file: file of `engines_file`, whose changes replace the engines; None to keep them.
        min_prefill_tokens: least number of tokens of a prompt that goes to a prefill engine, apart from those
            that the decode engine has already; 0 to send every prompt to a prefill engine.
        introduce: True to hand a short prompt over between engines that come up, so that they are connected
            before the first request; False if they connect by themselves.
        trust_kv_params: True to keep ``kv_transfer_params`` that clients send; False to remove them.
        clock: function that returns monotonic seconds, for the time that engines rest.
    """

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    silent_seconds: float = 5.0
    # vLLM's server closes an idle connection after 5 seconds. A request that is sent just then fails.
    keep_connection_seconds: float = 2.0
    probe_seconds: float = 1.0
    max_body_bytes: int = 64 << 20
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    engine_key: str | None = field(default=None, repr=False)
    allowed_origins: tuple[str, ...] = ()
    engines_file: Path | None = None
    min_prefill_tokens: int = 0
    introduce: bool = False
    trust_kv_params: bool = False
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)

    def __post_init__(self) -> None:
        for role, urls in (("prefill", self.prefill), ("decode", self.decode)):
            if not urls and role == "decode":
                raise ConfigError(f"the router has no {role} engine; give at least one --{role} URL")
            object.__setattr__(self, role, tuple(_engine_url(role, text) for text in urls))


def engine_url(text: str) -> str | None:
    """Return the base URL of an engine, from a URL or from host and port; None if the text is neither.

    A name or password in it is refused: clients send their own keys, and the router may send one of its own.
    """
    url = server_url(text)
    return None if url is None or "@" in url or "?" in text or "#" in text else url


def _engine_url(role: str, text: str) -> str:
    if (url := engine_url(text)) is None:
        raise ConfigError(f"--{role} {text} is no address; give http://host:port or host:port")
    return url
