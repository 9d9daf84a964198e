"""Wrappers that give vLLM's requests and steps the interface that kvferry's connector expects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.connector.engine import BlockIds, LoraAdapter
from kvferry.engines.vllm import items
from kvferry.engines.vllm.compat.block_hashes import hash_block_tokens
from kvferry.engines.vllm.compat.drafts import reads_ahead
from kvferry.engines.vllm.compat.models import vocabulary_size
from kvferry.engines.vllm.compat.requests import (
    cache_refusal,
    cached_tokens,
    ended_normally,
    own_hit,
    report_cached_tokens,
    snapshot_at,
    take_snapshot_at,
    trim_prompt,
    waits_for_blocks,
    was_rejected,
)


@dataclass(frozen=True, slots=True)
class VLLMItem:
    """Image, video or audio clip in a prompt, with the interface that kvferry expects (`PromptItem`).

    Attributes:
        feature: vLLM's MultiModalFeatureSpec of the item.
    """

    feature: Any

    @property
    def offset(self) -> int:
        """Position in the prompt of the item's first placeholder token."""
        return int(self.feature.mm_position.offset)

    @property
    def length(self) -> int:
        """Number of prompt tokens that are placeholders for the item."""
        return int(self.feature.mm_position.length)

    @property
    def is_ambiguous(self) -> bool:
        """True if an item with other content has, or may have, used the same identifier as this item."""
        return items.is_uncertain(self.feature)

    def name(self) -> str:
        """Return the name of the item: a digest of its content, 32 hex digits.

        Raises:
            Unnameable: no reliable digest can be computed.
        """
        return items.name_of(self.feature)


@dataclass(frozen=True, slots=True)
class VLLMRequest:
    """Request in vLLM's scheduler, with the interface that kvferry expects (`Request`).

    Attributes:
        raw: vLLM's request.
        hash_block_tokens: number of tokens that each of vLLM's block hashes covers; None or 0 without prefix
            caching.
        sampled_below: number of token ids that the engine can sample. All sampled ids are below this number.
            0 without a draft model. Used by `trim_prompt`.
    """

    raw: Any
    hash_block_tokens: int | None = None
    sampled_below: int = 0

    @property
    def request_id(self) -> str:
        """Id of the request in vLLM's scheduler."""
        return str(self.raw.request_id)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the request's prompt and in its answer so far."""
        return int(self.raw.num_tokens)

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens in the request's prompt."""
        return int(self.raw.num_prompt_tokens)

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens whose KV is in the request's blocks once all steps scheduled so far are done."""
        return int(self.raw.num_computed_tokens)

    @property
    def num_preemptions(self) -> int:
        """Number of times that vLLM has preempted the request and freed its blocks."""
        return int(self.raw.num_preemptions)

    @property
    def prompt_token_ids(self) -> Sequence[int] | None:
        """Token ids of the prompt; None if the prompt consists of embeddings.

        vLLM's request may have token ids for such a prompt, but they are only placeholders.
        """
        ids: Sequence[int] | None = self.raw.prompt_token_ids
        return ids if getattr(self.raw, "prompt_embeds", None) is None else None

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Token ids of the request's prompt and of its answer so far."""
        ids: Sequence[int] = self.raw.all_token_ids
        return ids

    @property
    def adapter(self) -> LoraAdapter | None:
        """LoRA adapter that the request uses; None if it uses none."""
        adapter: LoraAdapter | None = self.raw.lora_request
        return adapter

    @property
    def items(self) -> Sequence[VLLMItem]:
        """Images, videos and audio clips in the request's prompt."""
        return [VLLMItem(feature) for feature in self.raw.mm_features or ()]

    @property
    def cache_salt(self) -> str | None:
        """Salt of the request's cache keys; None without one. Only requests with the same salt share KV."""
        salt: str | None = self.raw.cache_salt
        return salt

    @property
    def arrives_in_parts(self) -> bool:
        """True if the client may send more of the request's prompt later."""
        return bool(getattr(self.raw, "resumable", False))

    @property
    def kv_transfer_params(self) -> Any:
        """Parameters for the connector, as the client or router sent them. They are not validated."""
        return self.raw.kv_transfer_params

    @property
    def trace_headers(self) -> Mapping[str, str]:
        """HTTP headers that carry the request's trace context, not validated; empty without a trace."""
        return self.raw.trace_headers or {}

    @property
    def own_hit(self) -> int | None:
        """Number of the request's tokens that vLLM's own prefix cache had at its first admission.

        None if the request was preempted or has produced output, because vLLM then does not provide it.
        """
        return own_hit(self.raw)

    @property
    def cached_tokens(self) -> int | None:
        """Number of prompt tokens that vLLM's answer reports as cached; None once the answer has begun."""
        return cached_tokens(self.raw)

    @property
    def is_complete(self) -> bool:
        """True if the request stopped or reached its maximum length, and was not aborted.

        All its tokens have then been computed. Valid only once the request has ended.
        """
        return ended_normally(self.raw)

    @property
    def needs_blocks(self) -> bool:
        """True if the request is queued and holds no blocks, because it is new or was preempted."""
        return waits_for_blocks(self.raw)

    @property
    def was_rejected(self) -> bool:
        """True if the API server refused the request, or the client left before the engine got it."""
        return was_rejected(self.raw)

    @property
    def cache_refusal(self) -> str | None:
        """Reason why the request must not use cached KV; None if it may."""
        return cache_refusal(self.raw)

    @property
    def snapshot_at(self) -> int:
        """Position at which vLLM will end a step and keep the recurrent state for others; 0 for none."""
        return snapshot_at(self.raw)

    def report_cached_tokens(self, tokens: int) -> None:
        """Have vLLM's answer report so many prompt tokens as cached, unless the answer has begun.

        Args:
            tokens: number of prompt tokens that the caches of the engine had that computed the prompt.
        """
        report_cached_tokens(self.raw, tokens)

    def take_snapshot_at(self, tokens: int) -> None:
        """Have vLLM end a step at a position and keep the recurrent state there, for other prompts.

        Args:
            tokens: position in tokens, at the end of a block.
        """
        take_snapshot_at(self.raw, tokens)

    def trim_prompt(self) -> bool:
        """Drop the last prompt token, because another engine continues the request and computes this token.

        Returns:
            True if the token was dropped. False if the request cannot be shortened and is unchanged.
        """
        return trim_prompt(self.raw, self.hash_block_tokens, self.sampled_below)


class VLLMRequests:
    """Wraps the requests of one vLLM engine as `VLLMRequest` objects for kvferry's connector."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self._hash_block_tokens = hash_block_tokens(vllm_config, kv_cache_config)
        self._sampled_below = vocabulary_size(vllm_config) if reads_ahead(vllm_config) else 0

    def wrap(self, raw: Any) -> VLLMRequest:
        """Return one of vLLM's requests with the interface that kvferry's connector expects.

        Args:
            raw: vLLM's request.
        """
        return VLLMRequest(raw, self._hash_block_tokens, self._sampled_below)


@dataclass(frozen=True, slots=True)
class VLLMStep:
    """Step that vLLM has scheduled, with the interface that kvferry expects (`Step`).

    Attributes:
        output: vLLM's SchedulerOutput of the step.
    """

    output: Any

    @property
    def tokens(self) -> Mapping[str, int]:
        """Number of tokens that the step computes for each request, by request id."""
        tokens: Mapping[str, int] = self.output.num_scheduled_tokens
        return tokens

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the step computes, of all requests."""
        tokens: int = self.output.total_num_scheduled_tokens
        return tokens

    @property
    def snapshots(self) -> Mapping[str, Iterable[tuple[int, int, int]]]:
        """Snapshots (recurrent state at one position) that the blocks contain after the step, by request id.

        Each snapshot is (index of the KV cache group, id of the block with the state, number of tokens that
        the state includes).
        """
        state = self.output.kv_connector_block_state
        return state.boundary_state_offloads if state else {}

    def block_ids(self, request_id: str) -> BlockIds:
        """Return the ids of a request's blocks for each KV cache group, including blocks that the step fills.

        Args:
            request_id: id of the request.
        """
        ids: BlockIds = self.output.kv_connector_block_state.resolve_block_ids(request_id)
        return ids
