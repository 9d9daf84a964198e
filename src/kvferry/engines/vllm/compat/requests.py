"""A request in vLLM's scheduler: its state, the caches that it may read, and the end of its prompt."""

from __future__ import annotations

import copy
from typing import Any

from vllm.v1.request import RequestStatus


def ended_normally(request: Any) -> bool:
    """Return True if a request has stopped or reached its maximum length, and was not aborted."""
    return request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


def waits_for_blocks(request: Any) -> bool:
    """Return True if a request is queued and holds no blocks, because it is new or was preempted."""
    return request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def was_rejected(request: Any) -> bool:
    """Return True if the API server refused a request, or its client left before the engine received it.

    In these cases, the engine receives a placeholder request with one token, which ends at once.
    """
    return bool(request.abort_immediately)


def own_hit(request: Any) -> int | None:
    """Return the number of a request's tokens that vLLM's own prefix cache had at its first admission.

    Return None if the request has been preempted or has produced output, because vLLM does not provide the
    number then.
    """
    stats = None if request.num_preemptions else request.prefill_stats
    return None if stats is None else int(stats.num_local_cached_tokens)


def cached_tokens(request: Any) -> int | None:
    """Return the number of prompt tokens that vLLM will report as cached; None once the answer has begun.

    vLLM sets it at the first admission, to the tokens of its own prefix cache and of the connector's load.
    """
    stats = request.prefill_stats
    return None if stats is None else int(stats.num_cached_tokens)


def report_cached_tokens(request: Any, tokens: int) -> None:
    """Have vLLM report so many prompt tokens as cached; mutates `request`. Ignored once the answer has begun.

    vLLM derives from it the cached tokens of the answer, the tokens written to the cache (``finalize``) and
    ``vllm:prompt_tokens_cached``. Its counts by source stay as they are: the load did bring these tokens.

    Args:
        request: vLLM's request, after the admission that begins to compute it.
        tokens: number of prompt tokens; the length of the prompt at most.
    """
    if request.prefill_stats is not None:
        request.prefill_stats.num_cached_tokens = min(tokens, request.num_prompt_tokens)


def cache_refusal(request: Any) -> str | None:
    """Return the reason why a request must not use cached KV; None if it may.

    Cached KV is KV from vLLM's own prefix cache or from a connector.
    """
    if not request.skip_reading_prefix_cache:
        return None
    if _scores_prompt(request.sampling_params):
        return "logprobs of its prompt are asked for (prompt_logprobs, or echo with logprobs)"
    return "it asks to read no cache (skip_reading_prefix_cache)"


def snapshot_at(request: Any) -> int:
    """Return the position in tokens at which vLLM ends a step and keeps the recurrent state; 0 for none.

    vLLM sets it before it asks the connector: to the position where the request departs from another prompt
    in its own prefix cache. In the cache mode `align`, `Scheduler._mamba_block_aligned_split` ends a step
    there, and `MambaManager.reachable_block_mask` has the prefix cache retain the snapshot.
    """
    return int(request.shared_prefix_boundary)


def take_snapshot_at(request: Any, tokens: int) -> None:
    """Set the position of `snapshot_at`. Mutates `request`.

    vLLM reads it when it schedules a step, so a step's call takes effect in the next one.

    Args:
        request: vLLM's request.
        tokens: position in tokens, at the end of a block.
    """
    request.shared_prefix_boundary = tokens


def trim_prompt(request: Any, hash_block_tokens: int | None, sampled_below: int = 0) -> bool:
    """Drop the last prompt token of a request that computes a prompt for another engine; mutates `request`.

    The other engine (the consumer) computes the last prompt token itself, because it samples the first token
    of the answer. The consumer cannot use a recurrent state that already includes the last prompt token.

    With a draft model, this function also forces this engine to sample the dropped token after the shortened
    prompt. The draft model reads the following token to compute the KV of a token, so the sampled token must
    be the one that the prompt contains. Sampling is not forced if a grammar decides it (structured output),
    or if the token's id is too high to be sampled (forcing it would terminate the engine).

    The request is also limited to one generated token.

    Args:
        request: vLLM's request.
        hash_block_tokens: number of tokens that each of the request's block hashes covers; None or 0 without
            prefix caching. The hash of a block that is no longer full is removed.
        sampled_below: number of token ids that the engine can sample. All sampled ids are below this number.
            0 without a draft model.

    Returns:
        True if the token was dropped. False if the request was left unchanged, because its prompt has only
        one token or is not made of token ids, because the client wants logprobs of the prompt, or because the
        request must not use cached KV.
    """
    if request.num_prompt_tokens < 2 or request.prompt_token_ids is None or request.prompt_embeds is not None:
        return False
    if _scores_prompt(request.sampling_params) or cache_refusal(request) is not None:
        return False
    dropped = request.prompt_token_ids[-1]
    # If there is a grammar, it decides which token is sampled.
    if dropped < sampled_below and request.sampling_params and request.structured_output_request is None:
        # Copy first: requests made from one list of prompts share their sampling parameters.
        request.sampling_params = copy.copy(request.sampling_params)
        request.sampling_params.allowed_token_ids = [dropped]
    # Make a new list: in an engine that shares its process with the API, samples of one prompt share it.
    request.prompt_token_ids = request.prompt_token_ids[:-1]
    del request._all_token_ids[-1:]
    request.num_prompt_tokens -= 1
    request.max_tokens = 1
    if hash_block_tokens:
        del request.block_hashes[request.num_prompt_tokens // hash_block_tokens :]
    return True


def _scores_prompt(sampling: Any) -> bool:
    return sampling is not None and (
        sampling.prompt_logprobs is not None or sampling.prompt_logprob_token_ids is not None
    )
