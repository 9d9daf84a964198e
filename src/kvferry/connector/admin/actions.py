"""The calls of the admin API: their JSON bodies, and what they do to the parts of the connector.

| call | body | answer |
|---|---|---|
| ``status`` | | state of draining, leases, loads, chunks still to be written |
| ``lookup`` | `Prompt` | tokens of the prompt that each tier has |
| ``pin`` | `Prompt` with a name | tokens that stay in host memory |
| ``unpin`` | `Name` | whether there was such a pin |
| ``drop`` | `Drop` | |
| ``drain`` | | as ``status`` |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from kvferry.connector.plain import PlainRequest
from kvferry.connector.tiers.tiering import Tiering
from kvferry.errors import ConfigError

DRAINED = "an operator drains this engine"


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt of the base model, without images.

    Attributes:
        tokens: token ids.
        salt: ``cache_salt`` of its requests; None without one.
        name: name of the pin; only for ``pin``.
    """

    tokens: list[int]
    salt: str | None = None
    name: str = ""


class Name(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The name of a pin."""

    name: str


class Drop(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to drop.

    Attributes:
        salt: ``cache_salt`` whose chunks this engine must not find again, in any tier; None for all chunks in
            host memory, whatever their salt.
    """

    salt: str | None = None


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An empty body."""


class Drainable(Protocol):
    """The part of the scheduler half that exchanges KV with other engines."""

    def drain(self) -> None:
        """Offer no KV and read no KV of other engines from now on. Leases and loads under way go on."""
        ...

    def drain_state(self) -> dict[str, Any]:
        """Return ``draining``, ``leases``, ``loads``."""
        ...


class AdminActions:
    """Executes the calls of the admin API. Only the engine's thread calls the methods."""

    def __init__(self, engine: Drainable, tiering: Tiering | None, longest_prompt: int) -> None:
        """Create the actions of one engine.

        Args:
            engine: the part that exchanges KV with other engines.
            tiering: the engine's tiers; None if it has none.
            longest_prompt: maximum number of tokens of a prompt.
        """
        self._engine, self._tiering, self._longest = engine, tiering, longest_prompt
        self._calls: Mapping[str, tuple[type[Any], Callable[[Any], Any]]] = {
            "status": (Nothing, lambda _: self._status()),
            "lookup": (Prompt, self._look_up),
            "pin": (Prompt, self._pin),
            "unpin": (Name, self._unpin),
            "drop": (Drop, self._drop),
            "drain": (Nothing, lambda _: self._drain()),
        }

    def prepare(self, name: str, body: bytes) -> Callable[[], Any]:
        """Return the call of a name and JSON body, for the engine's thread. Any thread may prepare one.

        Args:
            name: name of the call.
            body: body of the HTTP request; empty stands for an empty object.

        Raises:
            KeyError: there is no call of this name.
            ConfigError: the body does not fit the call.
        """
        schema, action = self._calls[name]
        try:
            value = msgspec.json.decode(body or b"{}", type=schema)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"the body of {name} does not fit: {error}") from error
        return lambda: action(value)

    def _status(self) -> dict[str, Any]:
        state = self._engine.drain_state()
        owed = self._tiering.owed_chunks if self._tiering is not None else 0
        drained = state["draining"] and not (state["leases"] or state["loads"] or owed)
        return {**state, "owed_chunks": owed, "drained": bool(drained)}

    def _drain(self) -> dict[str, Any]:
        self._engine.drain()
        return self._status()

    def _look_up(self, prompt: Prompt) -> dict[str, Any]:
        found = self._tiers().look_up(self._request(prompt))
        return {"tokens": len(prompt.tokens), "tiers": found}

    def _pin(self, prompt: Prompt) -> dict[str, Any]:
        if not prompt.name:
            raise ConfigError("a pin needs a name, by which it is removed again")
        chunks, in_host, pinned = self._tiers().pin(prompt.name, self._request(prompt))
        return {"chunks": chunks, "host_chunks": in_host, "pinned_chunks": pinned}

    def _unpin(self, pin: Name) -> dict[str, Any]:
        return {"unpinned_chunks": self._tiers().unpin(pin.name)}

    def _drop(self, drop: Drop) -> dict[str, Any]:
        if drop.salt is None:
            return {"dropped_chunks": self._tiers().drop_host_memory()}
        self._tiers().forget_salt(drop.salt)
        return {}

    def _tiers(self) -> Tiering:
        if self._tiering is None:
            raise ConfigError("this engine has no tiers; give it some with the setting tiers")
        return self._tiering

    def _request(self, prompt: Prompt) -> PlainRequest:
        if not 0 < len(prompt.tokens) <= self._longest:
            raise ConfigError(
                f"the prompt has {len(prompt.tokens)} tokens; this engine takes 1 to {self._longest}"
            )
        return PlainRequest(request_id="admin", prompt_token_ids=prompt.tokens, cache_salt=prompt.salt)
