"""Names of the content of a request's blocks, by which other engines find an earlier turn.

A turn is a finished request's KV, kept for the next turn of its conversation.
"""

from __future__ import annotations

import secrets
from array import array

from kvferry.connector.adapters import Adapters
from kvferry.connector.engine import Request
from kvferry.connector.prompt_content import keys_of
from kvferry.errors import Unnameable
from kvferry.transport.turns import TurnContent

CHUNK_TOKENS = 256
"""Number of tokens per key of a turn: the same for all engines, whatever chunk length their tiers use."""


class TurnNames:
    """Computes the names under which turns are kept and looked up."""

    def __init__(self, adapters: Adapters, *, prompts_only: bool = False) -> None:
        """Create the names of one engine.

        Args:
            adapters: the engine's LoRA adapters.
            prompts_only: True to name no generated tokens, because their KV differs from the KV of the same
                tokens in a prompt.
        """
        self._prompts_only = prompts_only
        self._adapters, self._epoch = adapters, ""

    def content(self, request: Request, tokens: int) -> TurnContent | None:
        """Return the content of a request's first `tokens` tokens; None if it has no certain name."""
        if self._prompts_only and tokens > request.num_prompt_tokens:
            return None
        ids = request.all_token_ids[:tokens]
        try:
            keys = keys_of(request, ids, CHUNK_TOKENS, self._adapters, self._epoch)
        except Unnameable:
            return None
        items = sorted(item.offset for item in request.items)
        return TurnContent(CHUNK_TOKENS, tuple(keys.chunks()), array("I", ids), tuple(items))

    def start_anew(self) -> None:
        """Change all names from now on, so that turns from before the reset are not found.

        The new names are random, so that no other engine finds later turns either. The blocks of these turns
        may still contain KV from before the reset.
        """
        self._epoch = f"{secrets.token_hex(16)} "
