"""Names of the content of a request's blocks, by which other engines find an earlier turn."""

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
    """Computes the names under which peers find turns.

    A name is a digest of tokens and of everything else that determines their KV, such as the LoRA adapter and
    images. Equal content has equal names in all engines.
    """

    def __init__(self, adapters: Adapters, *, prompts_only: bool = False) -> None:
        """Prepare to compute names for the content of one engine's requests.

        Args:
            adapters: the engine's LoRA adapters.
            prompts_only: True to give no names to generated tokens, because their KV differs from the KV of
                equal tokens in a prompt.
        """
        self._prompts_only = prompts_only
        self._adapters, self._epoch = adapters, ""

    def content(self, request: Request, tokens: int) -> TurnContent | None:
        """Return the names of a request's first `tokens` tokens; None if their KV has no certain name.

        That is so for a prompt of embeddings, for example, and with `prompts_only` for generated tokens.
        """
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
        """Give all content new names from now on, because the engine's cache was reset."""
        # Other engines do not know the number. So they find no KV from before the reset, nor KV that running
        # requests compute from it.
        self._epoch = f"{secrets.token_hex(16)} "
