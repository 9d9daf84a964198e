"""Wrappers of vLLM's requests and steps for the connector."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.connector.engine import BlockIds, LoraAdapter
from kvferry.engines.vllm import items
from kvferry.engines.vllm.compat.drafts import reads_ahead
from kvferry.engines.vllm.compat.models import vocabulary_size
from kvferry.engines.vllm.compat.requests import (
    finished_whole,
    own_hit,
    reads_no_cache,
    trim_prompt,
    waits_for_blocks,
    was_rejected,
)


@dataclass(frozen=True, slots=True)
class VLLMItem:
    """An item of a prompt; satisfies `PromptItem`.

    Attributes:
        feature: vLLM's MultiModalFeatureSpec.
    """

    feature: Any

    @property
    def offset(self) -> int:
        """Position of its first token."""
        return int(self.feature.mm_position.offset)

    @property
    def length(self) -> int:
        """Number of tokens that it stands for."""
        return int(self.feature.mm_position.length)

    @property
    def is_ambiguous(self) -> bool:
        """True if its identifier has stood for other content too."""
        return items.is_uncertain(self.feature)

    def name(self) -> str:
        """Return a digest of its content, as `items.name_of` does."""
        return items.name_of(self.feature)


@dataclass(frozen=True, slots=True)
class VLLMRequest:
    """A request in vLLM's scheduler; satisfies `Request`.

    Attributes:
        raw: vLLM's request.
        hash_block_tokens: tokens per block that vLLM hashes; None or 0 without prefix caching.
        sampled_below: exclusive upper bound of token ids, as in `compat.requests.trim_prompt`.
    """

    raw: Any
    hash_block_tokens: int | None = None
    sampled_below: int = 0

    @property
    def request_id(self) -> str:
        """Its id in the scheduler."""
        return str(self.raw.request_id)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return int(self.raw.num_tokens)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return int(self.raw.num_prompt_tokens)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in its blocks."""
        return int(self.raw.num_computed_tokens)

    @property
    def num_preemptions(self) -> int:
        """Number of times that its blocks were taken from it."""
        return int(self.raw.num_preemptions)

    @property
    def prompt_token_ids(self) -> Sequence[int] | None:
        """Token ids of its prompt; None if the prompt is not made of token ids.

        A prompt of embeddings may have token ids too: placeholders, which say nothing of its content.
        """
        ids: Sequence[int] | None = self.raw.prompt_token_ids
        return ids if getattr(self.raw, "prompt_embeds", None) is None else None

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Token ids of prompt and answer."""
        ids: Sequence[int] = self.raw.all_token_ids
        return ids

    @property
    def adapter(self) -> LoraAdapter | None:
        """Its LoRA adapter."""
        adapter: LoraAdapter | None = self.raw.lora_request
        return adapter

    @property
    def items(self) -> Sequence[VLLMItem]:
        """Images and other items of its prompt."""
        return [VLLMItem(feature) for feature in self.raw.mm_features or ()]

    @property
    def cache_salt(self) -> str | None:
        """Its cache salt."""
        salt: str | None = self.raw.cache_salt
        return salt

    @property
    def arrives_in_parts(self) -> bool:
        """True if more of its prompt is still to come."""
        return bool(getattr(self.raw, "resumable", False))

    @property
    def kv_transfer_params(self) -> Any:
        """Its parameters for the connector, unchecked."""
        return self.raw.kv_transfer_params

    @property
    def trace_headers(self) -> Mapping[str, str]:
        """Its trace context, unchecked."""
        return self.raw.trace_headers or {}

    @property
    def own_hit(self) -> int | None:
        """Tokens that vLLM's prefix cache had of it at its first admission."""
        return own_hit(self.raw)

    @property
    def is_complete(self) -> bool:
        """True if it ended by itself."""
        return finished_whole(self.raw)

    @property
    def needs_blocks(self) -> bool:
        """True if it waits and has no blocks."""
        return waits_for_blocks(self.raw)

    @property
    def was_rejected(self) -> bool:
        """True if the API server refused it."""
        return was_rejected(self.raw)

    @property
    def why_no_cache(self) -> str | None:
        """Reason why it reads no cache; None if it may."""
        return reads_no_cache(self.raw)

    def trim_prompt(self) -> bool:
        """Drop the last prompt token, as `compat.requests.trim_prompt` does."""
        return trim_prompt(self.raw, self.hash_block_tokens, self.sampled_below)


class VLLMRequests:
    """Wrapper of the requests of one engine."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self._hash_block_tokens: int | None = kv_cache_config.hash_block_size
        self._sampled_below = vocabulary_size(vllm_config) if reads_ahead(vllm_config) else 0

    def wrap(self, raw: Any) -> VLLMRequest:
        """Return vLLM's request as the connector sees it."""
        return VLLMRequest(raw, self._hash_block_tokens, self._sampled_below)


@dataclass(frozen=True, slots=True)
class VLLMStep:
    """A step that vLLM has scheduled; satisfies `Step`.

    Attributes:
        output: vLLM's SchedulerOutput.
    """

    output: Any

    @property
    def tokens(self) -> Mapping[str, int]:
        """Number of tokens that it computes, by request."""
        tokens: Mapping[str, int] = self.output.num_scheduled_tokens
        return tokens

    @property
    def snapshots(self) -> Mapping[str, Iterable[tuple[int, int, int]]]:
        """Recurrent states that it leaves behind."""
        state = self.output.kv_connector_block_state
        return state.boundary_state_offloads if state else {}

    def block_ids(self, request_id: str) -> BlockIds:
        """Return the block tables of a request."""
        ids: BlockIds = self.output.kv_connector_block_state.resolve_block_ids(request_id)
        return ids
