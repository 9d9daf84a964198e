"""Plain data classes for requests and steps, for benchmarks, tests, and engines without own classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.connector.engine import BlockIds, LoraAdapter, PromptItem


@dataclass(slots=True, kw_only=True)
class PlainRequest:
    """A plain data class that implements `Request`. The attributes are explained there.

    >>> request = PlainRequest(request_id="r", prompt_token_ids=[1, 2, 3])
    >>> request.num_tokens, request.trim_prompt(), request.num_tokens
    (3, True, 2)
    """

    request_id: str
    prompt_token_ids: Sequence[int] | None
    answer_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    adapter: LoraAdapter | None = None
    items: Sequence[PromptItem] = ()
    cache_salt: str | None = None
    arrives_in_parts: bool = False
    kv_transfer_params: Any = None
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    own_hit: int | None = None
    cached_tokens: int | None = None
    is_complete: bool = False
    needs_blocks: bool = False
    was_rejected: bool = False
    snapshot_at: int = 0
    cache_refusal: str | None = None

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Token ids of prompt and answer."""
        return [*(self.prompt_token_ids or ()), *self.answer_token_ids]

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.prompt_token_ids or ())

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and answer."""
        return self.num_prompt_tokens + len(self.answer_token_ids)

    def report_cached_tokens(self, tokens: int) -> None:
        """Set `cached_tokens`."""
        self.cached_tokens = min(tokens, self.num_prompt_tokens)

    def take_snapshot_at(self, tokens: int) -> None:
        """Set `snapshot_at`."""
        self.snapshot_at = tokens

    def trim_prompt(self) -> bool:
        """Drop the last prompt token if there are two or more; return whether it was dropped."""
        if self.prompt_token_ids is None or len(self.prompt_token_ids) < 2:
            return False
        self.prompt_token_ids = self.prompt_token_ids[:-1]
        return True


@dataclass(slots=True, kw_only=True)
class PlainStep:
    """An engine step as a data class. It implements `Step`, which documents the other attributes.

    Attributes:
        tables: block tables, per KV cache group, of each request that the step computes, by request id.
    """

    tokens: Mapping[str, int]
    tables: Mapping[str, BlockIds] = field(default_factory=dict)
    snapshots: Mapping[str, Sequence[tuple[int, int, int]]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the step computes, of all requests."""
        return sum(self.tokens.values())

    def block_ids(self, request_id: str) -> BlockIds:
        """Return the block tables of a request, per KV cache group."""
        return self.tables[request_id]
