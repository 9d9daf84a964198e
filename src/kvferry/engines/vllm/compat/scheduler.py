"""Changes to vLLM's scheduler (freed blocks, requests from clients, pauses), and its prefix cache."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
from vllm.v1.core.kv_cache_utils import resolve_block_hashes
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from kvferry.connector.engine import Request
from kvferry.engines.vllm.compat.model import patch_once
from kvferry.engines.vllm.compat.process import tell_of_sleep
from kvferry.engines.vllm.compat.requests import VLLMRequest
from kvferry.tiers.names import Medium

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ModuleNotFoundError:  # vLLM 0.31
    # It never calls the hook that needs them, `get_external_cache_hit_sources`.
    CacheHitSource = None

Label = Any
"""A member of vLLM's `CacheHitSource`."""

_LABELS = {
    Medium.PEER: "P2P",
    Medium.HOST: "HOST",
    Medium.DISK: "DISK",
    Medium.NETWORK: "EXTERNAL_UNSPECIFIED",
}
_FOR_CONNECTORS = ("kv_transfer_params", "ec_transfer_params")


def prepare_scheduler(vllm_config: VllmConfig) -> None:
    """Change what one of kvferry's connectors needs in its scheduler's process; mutates `vllm_config`."""
    defer_frees(vllm_config)
    guard_arrivals()
    tell_of_pauses()
    tell_of_sleep()


def defer_frees(vllm_config: VllmConfig) -> None:
    """Make vLLM free a block only after all steps that may write to it; mutates the role in `vllm_config`.

    Call this while the connector is created, because vLLM reads the role right after that.
    """
    # With overlapping steps (asynchronous scheduling), a running step may still write to the blocks of an
    # aborted or preempted request, and would overwrite KV that is loaded into them. vLLM waits for the step
    # only if the role includes loads (`kv_consumer` or `kv_both`). With kvferry, prefill engines load, too:
    # from tiers or from decode engines.
    transfer = vllm_config.kv_transfer_config
    if not transfer.is_kv_consumer:
        transfer.kv_role = "kv_both"


def guard_arrivals() -> None:
    """Patch vLLM's `Scheduler` so that clients cannot terminate or delay the engine with certain requests."""

    def add_request(add: Callable[..., None], scheduler: Any, request: Any) -> None:
        # vLLM appends random digits to all ids but those of requests that the API server refuses. If such an
        # id equals that of a running request, or of an ended one whose blocks are kept, an assertion
        # terminates the engine.
        if request.abort_immediately:
            request.request_id = f"rejected-{uuid.uuid4().hex}"
        _keep_from_workers(request)
        add(scheduler, request)

    patch_once(Scheduler, "add_request", add_request)


def _keep_from_workers(request: Any) -> None:
    """Remove the parameters for connectors from a request's sampling parameters; mutates `request`."""
    # vLLM pickles these parameters and sends them to every worker. Large ones delay a step, and parameters
    # nested 600 levels deep terminate the engine. Only the scheduler needs them, and it reads them from the
    # request's attribute `kv_transfer_params`.
    extra = getattr(request.sampling_params, "extra_args", None)
    if extra and not extra.keys().isdisjoint(_FOR_CONNECTORS):
        # Copy first: requests made from one list of prompts share their sampling parameters.
        request.sampling_params = copy.copy(request.sampling_params)
        kept = {name: value for name, value in extra.items() if name not in _FOR_CONNECTORS}
        request.sampling_params.extra_args = kept or None


def tell_of_pauses() -> None:
    """Patch vLLM's `Scheduler` to call its connector's ``on_pause(paused)`` when it is paused or resumed."""

    def set_pause_state(pause: Callable[..., None], scheduler: Any, pause_state: PauseState) -> None:
        pause(scheduler, pause_state)
        # The connector may be none of kvferry's.
        if (on_pause := getattr(scheduler.connector, "on_pause", None)) is not None:
            on_pause(pause_state is not PauseState.UNPAUSED)

    patch_once(Scheduler, "set_pause_state", set_pause_state)


class VLLMPrefixCache:
    """The prefix cache of vLLM's scheduler, as `connector.engine.PrefixCache` describes it."""

    def __init__(self, coordinator: HybridKVCacheCoordinator) -> None:
        self._coordinator = coordinator
        self._pool: Any = coordinator.block_pool

    @classmethod
    def of(cls, manager: Any) -> VLLMPrefixCache | None:
        """Return the prefix cache of a KVCacheManager if a connector may complete its prefixes; else None."""
        coordinator = manager.coordinator
        # If prefixes may end inside a block, vLLM ignores loads that do not reach beyond it.
        if not isinstance(coordinator, HybridKVCacheCoordinator) or coordinator.enable_partial_hash_hits:
            return None
        specs = [group.spec for group in coordinator.attention_groups]
        attention = [spec for spec in specs if not isinstance(spec, MambaSpec)]
        # With several attention groups, vLLM reports the longest prefix of one, and a load would not bring
        # what the others lack.
        if len(attention) == len(specs) or len(attention) != 1:
            return None
        return cls(coordinator) if isinstance(attention[0], FullAttentionSpec) else None

    def resumable_tokens(self, request: Request) -> int:
        assert isinstance(request, VLLMRequest)
        raw = request.raw
        _, tokens, _ = self._coordinator.find_longest_cache_hit(raw.block_hashes, raw.num_tokens - 1)
        return int(tokens)

    def shorten(self, request: Request, tokens: int) -> None:
        """Evict the attention block that follows the first `tokens` tokens. Mutates the cache."""
        group_id = self._coordinator.full_attention_group_id
        assert isinstance(request, VLLMRequest)
        assert group_id is not None
        size = self._coordinator.single_type_managers[group_id].block_size
        hashes = resolve_block_hashes(request.raw.block_hashes, self._pool.hash_block_size, size)
        if tokens // size >= len(hashes):
            return
        # Several blocks may have the same content.
        while found := self._pool.get_cached_block(hashes[tokens // size], [group_id]):
            self._pool.evict_blocks({block.block_id for block in found})


def hit_source(medium: Medium) -> Label:
    """Return vLLM's label for cache hits whose KV came from a medium. Not for vLLM 0.31."""
    return CacheHitSource[_LABELS[medium]]
