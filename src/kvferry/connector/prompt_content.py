"""Names for the content of a prompt: digests of everything that determines its KV, and of its cache salt.

A peer gives the KV of a ticket only to a prompt of the same content (`transport.redeem`). Tiers keep chunks
under keys derived from their content (`keys.chunk`).
"""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.connector.adapters import Adapters
from kvferry.connector.engine import Request
from kvferry.errors import Unnameable
from kvferry.keys import prompt_digest
from kvferry.keys.chunk import ChunkKeys, Item
from kvferry.transport.redeem import MAX_ADAPTER, PromptContent

_NO_TOKENS = "the prompt is not made of token ids"


def content_of(request: Request, tokens: int, adapters: Adapters) -> PromptContent:
    """Return digests of everything that determines the KV of a prompt's first `tokens` tokens.

    They cover the tokens, images and clips, the LoRA adapter and the cache salt.

    Args:
        request: the request.
        tokens: number of prompt tokens.
        adapters: record of the engine's LoRA adapters, which names each adapter by a digest of its files.

    Raises:
        NotYetNamed: a thread is still reading the files of the request's LoRA adapter.
        Unnameable: the content of the prompt, of the LoRA adapter, or of an image or clip cannot be
            identified for certain.
    """
    if request.prompt_token_ids is None:
        raise Unnameable(_NO_TOKENS)
    adapter = adapters.name(request.adapter)
    if len(adapter) > MAX_ADAPTER:
        raise Unnameable(f"the name of its LoRA adapter has {len(adapter)} characters, at most {MAX_ADAPTER}")
    salt = request.cache_salt
    items = sorted((one.offset, one.length, one.name()) for one in request.items if one.offset < tokens)
    return PromptContent(
        prompt_digest(request.prompt_token_ids[:tokens]),
        prompt_digest((), [f"{name} at {at}+{length}" for at, length, name in items]) if items else "",
        adapter,
        prompt_digest((), [salt]) if salt else "",
    )


def keys_of(
    request: Request, tokens: Sequence[int], chunk_tokens: int, adapters: Adapters, epoch: str
) -> ChunkKeys:
    """Return the keys under which tiers store the chunks (fixed-size runs of tokens) of a request.

    Args:
        request: the request.
        tokens: token ids of the request, from the first token on.
        chunk_tokens: number of tokens per chunk.
        adapters: record of the engine's LoRA adapters, which names each adapter by a digest of its files.
        epoch: random text on which all keys depend; empty before the first reset of the cache. It changes at
            each reset, so that chunks from before the reset are not found again.

    Raises:
        NotYetNamed: a thread is still reading the files of the request's LoRA adapter.
        Unnameable: the content of the request cannot be identified for certain.
    """
    if request.prompt_token_ids is None:
        raise Unnameable(_NO_TOKENS)
    if request.arrives_in_parts:
        raise Unnameable("the prompt arrives in parts, and later parts may add images or other items")
    return ChunkKeys(
        chunk_tokens,
        tokens,
        items=[Item(one.offset, one.length, one.name()) for one in request.items],
        lora=adapters.name(request.adapter),
        salt=f"{epoch}{request.cache_salt or ''}",
    )
