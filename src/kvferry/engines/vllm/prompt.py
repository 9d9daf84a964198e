"""Digests of everything that the KV of a prompt is computed from. They travel with an offer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvferry.engines.vllm import items
from kvferry.engines.vllm.adapters import Adapters
from kvferry.keys import prompt_digest


@dataclass(frozen=True, slots=True)
class PromptContent:
    """The content of the beginning of a prompt.

    Attributes:
        tokens: digest of the token ids.
        items: digest of images, videos and audio with their positions; empty without any.
        adapter: the LoRA adapter's name by content (`Adapters.name`); empty without one.
    """

    tokens: str
    items: str
    adapter: str

    def difference(self, offered: PromptContent) -> str | None:
        """Return why blocks of `offered` are not of this prompt; None if they are."""
        if offered.tokens != self.tokens:
            return (
                "the offered blocks hold other tokens than this prompt (remote_digest differs); do both "
                "engines use the same tokenizer and chat template, and does the router pair the right halves?"
            )
        if offered.items != self.items:
            return (
                "the offered blocks hold other images (or video, or audio) than this prompt, as the "
                "processors made them (remote_items differs); do both engines get the same media, and have "
                "the same preprocessor_config.json and --mm-processor-kwargs?"
            )
        if offered.adapter != self.adapter:
            return (
                f"the offered blocks were computed with LoRA {offered.adapter or 'none'}, this prompt has "
                f"{self.adapter or 'none'} (digests of weights and configuration, then the engine's LoRA "
                "settings); give both engines the same adapter files under this name"
            )
        return None


def content_of(request: Any, tokens: int, adapters: Adapters) -> PromptContent:
    """Return the content of the first `tokens` tokens.

    The cache salt is left out: it separates tenants' caches and does not change the KV.

    Raises:
        NotYetNamed: the adapter's files are being read.
        Unnameable: an adapter or an item has no certain name.
    """
    features = [one for one in request.mm_features or () if one.mm_position.offset < tokens]
    places = sorted((one.mm_position.offset, one.mm_position.length, items.name_of(one)) for one in features)
    return PromptContent(
        prompt_digest(request.prompt_token_ids[:tokens]),
        prompt_digest((), [f"{name} at {at}+{length}" for at, length, name in places]) if places else "",
        adapters.name(request.lora_request),
    )
