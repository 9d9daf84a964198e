"""Hand-overs during the prefill: the decode engine reads a prompt's KV while a prefill engine computes it.

The router then asks both engines at once. It draws the ticket that names the KV, and gives it to both. It
copies the rest of the decode engine's offer from the prefill engine's last answer.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

_IDENTITY = ("remote_engine_id", "remote_host", "remote_port")


@dataclass(frozen=True, slots=True)
class StreamSource:
    """A prefill engine whose KV can be read while it computes a prompt.

    Attributes:
        identity: the parameters of an offer that say which engine to read from.
        step_tokens: number of tokens of a prompt that the engine computes in one step. Only the KV of longer
            prompts can be read before the end.
    """

    identity: tuple[tuple[str, Any], ...]
    step_tokens: int

    @classmethod
    def of(cls, params: dict[str, Any]) -> StreamSource | None:
        """Return the engine that made an offer; None if its KV can only be read after its last step."""
        step_tokens = params.get("remote_step_tokens")
        if not isinstance(step_tokens, int) or step_tokens < 1 or not params.keys() >= set(_IDENTITY):
            return None
        return cls(tuple((key, params[key]) for key in _IDENTITY), step_tokens)

    def offer(self, ticket: str) -> dict[str, Any]:
        """Return the ``kv_transfer_params`` for the decode engine, with a ticket that both engines get."""
        # How many tokens the KV has is known only at its end.
        named = {"remote_request_id": ticket, "remote_num_tokens": None}
        known = {"remote_step_tokens": self.step_tokens, **dict(self.identity)}
        return {"do_remote_prefill": True, "do_remote_decode": False, **known, **named}


def new_ticket() -> str:
    """Return a new random ticket: 128 bits, as 32 hex digits."""
    return secrets.token_hex(16)
