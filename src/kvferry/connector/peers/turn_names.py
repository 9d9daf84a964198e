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
"""Whatever the tiers have: peers need not have the same."""


class TurnNames:
    """Names under which blocks are kept and looked for."""

    def __init__(self, adapters: Adapters, *, prompts_only: bool = False) -> None:
        """Begin, with the engine's adapters; `prompts_only` as of `Prompts`."""
        self._prompts_only = prompts_only
        self._adapters, self._epoch = adapters, ""

    def content(self, request: Request, tokens: int) -> TurnContent | None:
        """Return the content of the first tokens of a request; None if it has no certain name."""
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
        """Rename everything: nothing from before is found, and nothing new either, as blocks may mix both."""
        self._epoch = f"{secrets.token_hex(16)} "
