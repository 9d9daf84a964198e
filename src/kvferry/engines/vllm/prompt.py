"""The digest of a vLLM request's prompt."""

from __future__ import annotations

from typing import Any

from kvferry.keys import prompt_digest


def digest_of(request: Any, tokens: int) -> str:
    """Digest of the first `tokens` tokens and of whatever else decides their content.

    The cache salt does not count: it separates tenants' caches, it does not change what is computed.
    """
    extras = []
    if request.lora_request is not None:
        extras.append(f"lora {request.lora_request.lora_name}")
    for feature in request.mm_features:
        place = feature.mm_position
        if place.offset < tokens:
            extras.append(f"{feature.identifier} at {place.offset}+{place.length}")
    return prompt_digest(request.prompt_token_ids[:tokens], extras)
