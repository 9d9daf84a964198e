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
    """Computes the names under which peers find the kept KV of finished requests.

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
        """Return the names (digests) of the content of a request's first `tokens` tokens.

        Return None if something that determines the KV is unknown, for example if the prompt consists of
        embeddings. Also return None if the tokens include generated ones and the object was created with
        `prompts_only`.
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
        """Give all content new names from now on, because the engine's cache was reset.

        The new names depend on a random number that other engines do not know. So other engines do not find
        KV from before the reset. They also do not find KV that running requests compute from it.
        """
        self._epoch = f"{secrets.token_hex(16)} "
