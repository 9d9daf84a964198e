"""A block pool that checks references, and requests of an engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from kvferry.engines.vllm.compat.requests import VLLMRequest


@dataclass
class Block:
    block_id: int
    ref_cnt: int = 0
    block_hash: bytes | None = None

    @property
    def is_null(self) -> bool:
        return self.block_id == 0


class BlockPool:
    """Blocks are allocated in the order in which they were freed."""

    def __init__(self, blocks: int) -> None:
        self.blocks = [Block(number) for number in range(blocks)]
        self.free = self.blocks[1:]

    def allocate(self, count: int) -> list[Block] | None:
        if count > len(self.free):
            return None
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            block.ref_cnt = 1
        return taken

    def touch(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            assert not block.is_null, "the null block has no references"
            assert block.ref_cnt > 0, "a free block may be allocated to another request"
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            assert block.ref_cnt > 0, "freed twice"
            block.ref_cnt -= 1
            if not block.ref_cnt:
                self.free.append(block)

    def evict_blocks(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.blocks[number].block_hash = None

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    @property
    def references(self) -> int:
        return sum(block.ref_cnt for block in self.blocks)


class MadeUpRequest:
    """A request as the connector sees it, over one as vLLM has it; both sets of attributes can be set."""

    def __init__(self, **raw: Any) -> None:
        object.__setattr__(self, "raw", SimpleNamespace(**raw))

    def __getattr__(self, name: str) -> Any:
        if name not in vars(VLLMRequest) or (name in _DERIVED and hasattr(self.raw, name)):
            return getattr(self.raw, name)
        return getattr(VLLMRequest(self.raw), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.raw, name, value)


_DERIVED = frozenset({"is_complete", "needs_blocks", "trim_prompt"})


def request(name: str, tokens: Sequence[int], prompt: int | None = None, **more: Any) -> MadeUpRequest:
    """Return a request of these tokens. The first `prompt` of them, by default all, are its prompt."""
    return MadeUpRequest(
        **{
            "request_id": name,
            "prompt_token_ids": list(tokens[:prompt]),
            "prompt_embeds": None,
            "all_token_ids": list(tokens),
            "num_tokens": len(tokens),
            "num_prompt_tokens": len(tokens) if prompt is None else prompt,
            "num_computed_tokens": 0,
            "num_preemptions": 0,
            "prefill_stats": None,
            "mm_features": [],
            "lora_request": None,
            "cache_salt": None,
            "kv_transfer_params": None,
            "trace_headers": None,
            "kv_hints": None,
            "session_id": None,
            "skip_reading_prefix_cache": False,
            "abort_immediately": False,
            "sampling_params": None,
            **({} if "status" in more else {"is_complete": True, "needs_blocks": False}),
            **more,
        }
    )
