"""A simulated engine: its prefix cache, its tiers, and the requests that it computes one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.connector.local_prefix import LocalPrefix, last_boundary_before
from kvferry.tools.replay.content import RequestKeys
from kvferry.tools.replay.engine_cache import EngineCache
from kvferry.tools.replay.model import ServedModel
from kvferry.tools.replay.stores import ComputedPrompt, snapshots_of, store_chunks
from kvferry.tools.replay.tiers import SimulatedTiers
from kvferry.tools.replay.trace.request import TraceRequest


class Hit(NamedTuple):
    """The tokens of a prompt that a simulated engine did not compute.

    Attributes:
        local_tokens: number of tokens from the engine's own prefix cache.
        tier_tokens: number of tokens from each tier, host memory first.
        tier_bytes: number of bytes loaded from each tier.
        attention_tokens: length in tokens of the longest prefix whose full-attention KV was at hand. Tokens
            beyond `found` were computed again because a window or a snapshot was missing.
        group_tokens: length in tokens of the longest prefix that each group alone could use.
        shared_tokens: as in `ComputedPrompt`.
    """

    local_tokens: int
    tier_tokens: tuple[int, ...]
    tier_bytes: tuple[int, ...]
    attention_tokens: int
    group_tokens: tuple[int, ...]
    shared_tokens: int = 0

    @property
    def found(self) -> int:
        """Number of tokens that the engine had or loaded."""
        return self.local_tokens + sum(self.tier_tokens)


class Arrived(NamedTuple):
    """A request that a simulated engine has not admitted yet.

    Attributes:
        block_keys: keys of the request's runs of blocks.
    """

    request: TraceRequest
    keys: RequestKeys
    block_keys: RequestKeys


class Running(NamedTuple):
    """A request that a simulated engine has admitted and not finished.

    Attributes:
        shared: position of a prefix shared with another prompt, as in `ComputedPrompt`.
    """

    arrived: Arrived
    hit: Hit
    shared: int


@dataclass(slots=True)
class SimulatedEngine:
    """An engine of a replay, which computes one prompt after the other."""

    model: ServedModel
    tiers: SimulatedTiers
    cache: EngineCache
    waiting: deque[Arrived] = field(default_factory=deque)

    def arrive(self, requests: Sequence[TraceRequest]) -> list[Arrived]:
        """Compute the keys of requests. The result may also go to another engine with equal settings."""
        keys = self.cache.keys_of_each(requests)
        return [Arrived(*each) for each in zip(requests, *keys, strict=True)]

    def admit(self, arrived: Arrived) -> Running:
        """Look a prompt up in the engine's prefix cache and in its tiers, and load what helps."""
        prompt = arrived.request.prompt_tokens
        local = self.cache.look_up(prompt, arrived.block_keys)
        hit = self._find(prompt, arrived.keys, local)
        completed = self.model.completes_prefixes and any(hit.tier_tokens)
        shared = local.tokens if local.needs_load and not completed else 0
        return Running(arrived, hit, shared)

    def finish(self, running: Running) -> None:
        """Compute the rest of an admitted prompt, store its chunks, and keep its blocks."""
        request, keys, block_keys = running.arrived
        found = min(running.hit.found, request.prompt_tokens - 1)  # the last token is always computed
        prompt = ComputedPrompt(request.prompt_tokens, found, running.shared, running.hit.shared_tokens)
        snapshots = snapshots_of(self.model, prompt)
        store_chunks(self.model, self.tiers, keys, prompt, snapshots)
        steps = self.model.form.steps
        loaded_state = self.model.state is not None and any(running.hit.tier_tokens)
        if loaded_state and found % steps.block_tokens == 0 and steps.retains(found):
            snapshots.insert(0, found)  # a loaded snapshot is cached like a computed one
        self.cache.keep(request, block_keys, snapshots, running.shared)

    def _find(self, prompt: int, keys: RequestKeys, local: LocalPrefix) -> Hit:
        """Load the longest usable prefix of a prompt, as `connector.admission` chooses it."""
        if not self.model.completes_prefixes:
            return self._load(prompt, keys, local, local.resumable_tokens)
        hit = self._load(prompt, keys, local, local.tokens)
        if not local.needs_load or any(hit.tier_tokens):
            return hit
        found, begin = self.tiers.look_up(prompt, keys, local.resumable_tokens), local.resumable_tokens
        if found is not None and found.tokens > begin:  # then the engine uses fewer of its attention blocks
            begin = last_boundary_before(found.tokens, self.model.block_tokens)
        return self._load(prompt, keys, local, begin)

    def _load(self, prompt: int, keys: RequestKeys, local: LocalPrefix, begin: int) -> Hit:
        """Load the longest usable prefix, if it is longer than what the engine has.

        Args:
            begin: number of tokens of it before the load.
        """
        # The last token is computed in any case, so a load of it alone saves nothing.
        saves_computation = prompt - begin > 1
        found = self.tiers.look_up(prompt, keys, begin) if saves_computation else None
        none = (0,) * len(self.tiers.tiers)
        if found is None:
            each = (local.resumable_tokens,) * len(self.model.groups)
            return Hit(local.resumable_tokens, none, none, local.tokens, each)
        attention = max(local.tokens, found.attention_tokens) if self.model.attention else 0
        if found.tokens <= begin:
            return Hit(
                local.resumable_tokens, none, none, attention, found.group_tokens, found.attention_tokens
            )
        sizes = self.tiers.load(found.wanted)
        return Hit(begin, found.tier_tokens, sizes, attention, found.group_tokens, found.attention_tokens)
