"""vLLM's requests and steps, with the interface that kvferry's connector expects."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.request import RequestStatus

from kvferry.connector.engine import BlockIds
from kvferry.connector.hints import hints_in
from kvferry.engines.vllm import items
from kvferry.engines.vllm.compat.model import reads_ahead

HINTS_ACTION = "kvferry.hints", "1"
"""Type and version of the action in vLLM's ``kv_hints`` whose payload is `connector.hints.Hints`."""


def external_id(request_id: str) -> str:
    """Return a request's id without the suffix that vLLM appends (a hyphen and eight random hex digits)."""
    return re.sub(r"-[0-9a-f]{8}$", "", request_id)


def parent_of(request_id: str) -> str | None:
    """Return the id that all samples of one prompt share (``n`` above 1); None for any other request."""
    # The number of the sample, an underscore, and the shared id, which ends with eight random digits.
    found = re.fullmatch(r"\d+_(.*-[0-9a-f]{8})", request_id, re.DOTALL)
    return None if found is None else found.group(1)


def hash_block_tokens(vllm_config: Any, kv_cache_config: Any) -> int | None:
    """Return the number of tokens that each block hash of a request covers; None without prefix caching."""
    if hasattr(kv_cache_config, "hash_block_size"):
        return kv_cache_config.hash_block_size
    # vLLM 0.31: its scheduler computes the number with the same function.
    _, tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return int(tokens)


def _attribute(path: str) -> Any:
    # Several per request and step: without a frame of the interpreter.
    return property(attrgetter(path))


@dataclass(frozen=True, slots=True)
class VLLMItem:
    """Image, video or audio clip in a prompt (`PromptItem`)."""

    feature: Any  # vLLM's MultiModalFeatureSpec

    offset = _attribute("feature.mm_position.offset")
    length = _attribute("feature.mm_position.length")

    @property
    def is_ambiguous(self) -> bool:
        return items.is_uncertain(self.feature)

    def name(self) -> str:
        return items.name_of(self.feature)


@dataclass(frozen=True, slots=True)
class VLLMRequest:
    """Request in vLLM's scheduler, as `connector.engine.Request` describes it.

    Attributes:
        hash_block_tokens: number of tokens that each of vLLM's block hashes covers; None or 0 without prefix
            caching.
        sampled_below: number of token ids that the engine can sample; 0 without a draft model.
    """

    raw: Any
    hash_block_tokens: int | None = None
    sampled_below: int = 0

    request_id = _attribute("raw.request_id")
    num_tokens = _attribute("raw.num_tokens")
    num_prompt_tokens = _attribute("raw.num_prompt_tokens")
    num_computed_tokens = _attribute("raw.num_computed_tokens")
    num_preemptions = _attribute("raw.num_preemptions")
    all_token_ids = _attribute("raw.all_token_ids")
    adapter = _attribute("raw.lora_request")
    cache_salt = _attribute("raw.cache_salt")
    kv_transfer_params = _attribute("raw.kv_transfer_params")
    session_id = _attribute("raw.session_id")

    @property
    def prompt_token_ids(self) -> Sequence[int] | None:
        # A prompt of embeddings may have token ids too, but they are only placeholders.
        return self.raw.prompt_token_ids if getattr(self.raw, "prompt_embeds", None) is None else None

    @property
    def items(self) -> Sequence[VLLMItem]:
        return [VLLMItem(feature) for feature in self.raw.mm_features or ()]

    @property
    def arrives_in_parts(self) -> bool:
        return bool(getattr(self.raw, "resumable", False))

    @property
    def hints(self) -> Any:
        # Only callers of vLLM's Python interface can fill `kv_hints`. vLLM checks none of the payloads.
        for action in [] if self.raw.kv_hints is None else self.raw.kv_hints.actions:
            if (action.action_type, action.action_version) == HINTS_ACTION:
                return action.payload
        return hints_in(self.raw.kv_transfer_params)

    @property
    def trace_headers(self) -> Mapping[str, str]:
        return self.raw.trace_headers or {}

    @property
    def own_hit(self) -> int | None:
        # At an admission, vLLM sets the stats only if the request was never preempted.
        stats = None if self.raw.num_preemptions else self.raw.prefill_stats
        return None if stats is None else int(stats.num_local_cached_tokens)

    @property
    def cached_tokens(self) -> int | None:
        # vLLM takes the stats away with the first output.
        stats = self.raw.prefill_stats
        return None if stats is None else int(stats.num_cached_tokens)

    @property
    def is_complete(self) -> bool:
        return self.raw.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)

    @property
    def needs_blocks(self) -> bool:
        return self.raw.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)

    @property
    def was_rejected(self) -> bool:
        # If the API server refuses a request, or its client leaves before the engine gets it, the engine
        # receives a placeholder of one token, which ends at once.
        return bool(self.raw.abort_immediately)

    @property
    def cache_refusal(self) -> str | None:
        if not self.raw.skip_reading_prefix_cache:
            return None
        if self._scores_prompt:
            return "logprobs of its prompt are asked for (prompt_logprobs, or echo with logprobs)"
        return "it asks to read no cache (skip_reading_prefix_cache)"

    @property
    def snapshot_at(self) -> int:
        # vLLM sets it before it asks the connector: to the position where the request departs from another
        # prompt in its own prefix cache. In the cache mode `align`, `Scheduler._mamba_block_aligned_split`
        # ends a step there, and `MambaManager.reachable_block_mask` has the prefix cache retain the snapshot.
        return int(self.raw.shared_prefix_boundary)

    def report_cached_tokens(self, tokens: int) -> None:
        # From it vLLM derives the cached tokens of the answer, the tokens written to the cache (`finalize`)
        # and `vllm:prompt_tokens_cached`. Its counts by source stay: the load did bring these tokens.
        if self.raw.prefill_stats is not None:
            self.raw.prefill_stats.num_cached_tokens = min(tokens, self.raw.num_prompt_tokens)

    def take_snapshot_at(self, tokens: int) -> None:
        # vLLM reads it when it schedules a step, so a step's call takes effect in the next one.
        self.raw.shared_prefix_boundary = tokens

    def trim_prompt(self) -> bool:
        """Drop the last prompt token, and limit the answer to one token. Mutates vLLM's request.

        With a draft model, also force this engine to sample the dropped token after the shortened prompt.
        Return False if the request cannot do without the token, and is unchanged.
        """
        raw = self.raw
        if raw.num_prompt_tokens < 2 or raw.prompt_token_ids is None or raw.prompt_embeds is not None:
            return False
        if self._scores_prompt or self.cache_refusal is not None:
            return False
        dropped = raw.prompt_token_ids[-1]
        # A draft model reads the following token to compute the KV of a token. So the token sampled after the
        # shortened prompt must be the dropped one. If there is a grammar, it decides which token is sampled.
        # To force an id that cannot be sampled would terminate the engine.
        if dropped < self.sampled_below and raw.sampling_params and raw.structured_output_request is None:
            # Copy first: requests made from one list of prompts share their sampling parameters.
            raw.sampling_params = copy.copy(raw.sampling_params)
            raw.sampling_params.allowed_token_ids = [dropped]
        # Make a new list: in an engine that shares its process with the API, samples of one prompt share it.
        raw.prompt_token_ids = raw.prompt_token_ids[:-1]
        del raw._all_token_ids[-1:]
        raw.num_prompt_tokens -= 1
        raw.max_tokens = 1
        if self.hash_block_tokens:
            # The last hashed block may no longer be full.
            del raw.block_hashes[raw.num_prompt_tokens // self.hash_block_tokens :]
        return True

    @property
    def _scores_prompt(self) -> bool:
        sampling = self.raw.sampling_params
        return sampling is not None and (
            sampling.prompt_logprobs is not None or sampling.prompt_logprob_token_ids is not None
        )


def request_wrapper(vllm_config: Any, kv_cache_config: Any) -> Callable[[Any], VLLMRequest]:
    """Return a function that wraps the requests of one engine."""
    return partial(
        VLLMRequest,
        hash_block_tokens=hash_block_tokens(vllm_config, kv_cache_config),
        sampled_below=int(vllm_config.model_config.get_vocab_size()) if reads_ahead(vllm_config) else 0,
    )


@dataclass(frozen=True, slots=True)
class VLLMStep:
    """Step that vLLM has scheduled, as `connector.engine.Step` describes it."""

    output: Any  # vLLM's SchedulerOutput

    tokens = _attribute("output.num_scheduled_tokens")
    num_tokens = _attribute("output.total_num_scheduled_tokens")

    @property
    def snapshots(self) -> Mapping[str, Iterable[tuple[int, int, int]]]:
        state = self.output.kv_connector_block_state
        return state.boundary_state_offloads if state else {}

    def block_ids(self, request_id: str) -> BlockIds:
        return self.output.kv_connector_block_state.resolve_block_ids(request_id)
