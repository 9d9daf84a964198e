"""Room for what comes after loads: for the next step of every request that holds blocks and waits.

vLLM begins an asynchronous load when there are blocks for it, and for what requests whose loads came before
still need. Of windows it counts too few of the latter: from a request's most blocks it takes those in its
table, and these are null up to its window (`get_num_blocks_to_allocate`, where the cap applies). Whoever
waits with blocks goes on in turn, so when the first of them needs more than are free and nothing runs, none
ever does. Hence a load is begun only if it leaves as many blocks free as any of them needs. One that waits
alone goes on once what runs has ended, however few are free now.

Models without windows are left to vLLM's own count, which is exact there.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.engines.vllm.compat.specs import kind_of, reach_of
from kvferry.geometry import GroupKind
from kvferry.planning.select import STATE_BLOCKS, first_seen, sees_all


@dataclass(slots=True)
class Headroom:
    """See the module. The engine's thread calls it.

    Attributes:
        groups: kind, reach and block size of each whose blocks are counted; none if there is no window.
        step_tokens: most of a request that one step computes.
        pool: the engine's block pool.
    """

    groups: Sequence[tuple[GroupKind, int, int]] = ()
    step_tokens: int = 0
    pool: Any = None
    _needs: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any, pool: Any) -> Headroom:
        """What there is in an engine."""
        groups = []
        for group in kv_cache_config.kv_cache_groups:
            spec = group.kv_cache_spec
            kind = kind_of(spec)
            groups.append((kind, reach_of(spec), int(spec.block_size)))
        if not any(reach for _, reach, _ in groups):
            return cls()
        step_tokens = vllm_config.scheduler_config.max_num_batched_tokens + vllm_config.num_speculative_tokens
        return cls(groups, int(step_tokens), pool)

    def __len__(self) -> int:
        """Requests that hold blocks and wait."""
        return len(self._needs)

    def fits(self, request_id: str, total: int, tokens: int) -> bool:
        """Whether a load can be begun.

        Args:
            request_id: whose.
            total: tokens that are at hand after it.
            tokens: of the request.
        """
        others = [need for name, need in self._needs.items() if name != request_id]
        if not others:
            return True
        most = max(self._need(total, tokens), *others)
        return int(self.pool.get_num_free_blocks()) - self._takes(total) >= most

    def loads(self, request_id: str, total: int, tokens: int) -> None:
        """A load begins; see `fits`."""
        if self.groups:
            self._needs[request_id] = self._need(total, tokens)

    def go_on(self, requests: Container[str]) -> None:
        """The coming step computes something of these."""
        for name in [name for name in self._needs if name in requests]:
            del self._needs[name]

    def forget(self, request_id: str) -> None:
        """It has ended, or its load has failed: it holds nothing."""
        self._needs.pop(request_id, None)

    def _takes(self, total: int) -> int:
        """Blocks of a request up to so many tokens, as if none of them were at hand."""
        seen_from = [max(first_seen(kind, reach, total), 0) for kind, reach, _ in self.groups]
        return sum(
            _between(group, first // group[2] * group[2], total)
            for group, first in zip(self.groups, seen_from, strict=True)
        )

    def _need(self, total: int, tokens: int) -> int:
        """Blocks that its next step takes; of what sees everything, those of all steps to come."""
        step = min(tokens, min(total, tokens - 1) + self.step_tokens)
        return sum(_between(group, total, tokens if sees_all(group[0]) else step) for group in self.groups)


def _between(group: tuple[GroupKind, int, int], have: int, tokens: int) -> int:
    """Blocks that a group takes to go from so many tokens to more."""
    kind, _, block = group
    return STATE_BLOCKS if kind is GroupKind.STATE else max(-(-tokens // block) - -(-have // block), 0)
