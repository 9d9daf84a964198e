"""Digests of everything that the KV of a prompt is computed from, and of whose it is.

A ticket is exchanged only for a prompt of the same content (`transport.redeem`).
"""

from __future__ import annotations

from typing import Any

from kvferry.engines.vllm import items
from kvferry.engines.vllm.adapters import Adapters
from kvferry.errors import Unnameable
from kvferry.keys import prompt_digest
from kvferry.transport.redeem import MAX_ADAPTER, PromptContent


def content_of(request: Any, tokens: int, adapters: Adapters) -> PromptContent:
    """Return the content of the first `tokens` tokens.

    Raises:
        NotYetNamed: the adapter's files are being read.
        Unnameable: the prompt, an adapter or an item has no certain name.
    """
    # Of embeddings, a prompt may have token ids too: placeholders, which say nothing of its content.
    if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
        raise Unnameable("the prompt is not made of token ids")
    adapter = adapters.name(request.lora_request)
    if len(adapter) > MAX_ADAPTER:
        raise Unnameable(f"the name of its LoRA adapter has {len(adapter)} characters, at most {MAX_ADAPTER}")
    salt = request.cache_salt
    features = [one for one in request.mm_features or () if one.mm_position.offset < tokens]
    places = sorted((one.mm_position.offset, one.mm_position.length, items.name_of(one)) for one in features)
    return PromptContent(
        prompt_digest(request.prompt_token_ids[:tokens]),
        prompt_digest((), [f"{name} at {at}+{length}" for at, length, name in places]) if places else "",
        adapter,
        prompt_digest((), [salt]) if salt else "",
    )
