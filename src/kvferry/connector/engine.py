"""What the connector needs of an engine, and when an engine calls it.

An engine package wraps its own objects so that they satisfy these protocols. All of them belong to the thread
of the engine's scheduler: nothing here is called, and no object is read, from any other thread. Attributes of
requests are live: the connector reads them again whenever it is called.

**Admission of a request.** `half` is the `SchedulerHalf`:

    half.on_new_request(request)
    tokens = half.admission.matched(request, local_tokens)    None: run a step, then ask again
    (blocks for all tokens up to local_tokens + tokens)
    half.admission.allocated(request, blocks, tokens)
    tokens > 0: run steps without the request until `WorkerHalf.ended` names it in `received`
        also in `failed`: free its blocks, and ask `matched` again

A load fills blocks from position `local_tokens` on. A group with a window needs blocks only from
`planning.select.first_attended` of the next computed token on; null blocks stand for the others. The engine
computes at least the last token, so of a load of all tokens it keeps one fewer.

**A step**, also one without requests while a load, a store or a lease is under way. `worker` is the
`WorkerHalf` of each rank:

    orders = half.orders(step)            before the step's tokens count as computed
    worker.begin(orders)
    (the forward pass)
    worker.save(orders, mark)
    ended = worker.ended()
    half.take_reports(worker.take_reports())     unless it is None
    half.sent(ended.sent)                 the blocks of these requests, kept since `finished`, can be freed
    half.step_done()

**The end of a request.** Set `Request.is_complete`, call `half.finished`, and free the blocks, unless it says
that they are kept. The connector holds references to blocks that are still read or written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from kvferry.geometry import GroupKind

BlockIds: TypeAlias = tuple[list[int], ...]
"""Block ids by position in the request, per KV cache group."""


class Block(Protocol):
    """A block of the engine's pool.

    Attributes:
        block_id: its number.
        is_null: it stands for a position that has no block.
        block_hash: its name in the engine's prefix cache; None if it is not in it.
    """

    @property
    def block_id(self) -> int: ...
    @property
    def is_null(self) -> bool: ...
    @property
    def block_hash(self) -> object | None: ...


class BlockPool(Protocol):
    """The engine's block pool, which counts references to blocks.

    Attributes:
        blocks: all blocks, by id. Block 0 is the null block, which is never given out.
    """

    @property
    def blocks(self) -> Sequence[Block]: ...

    def touch(self, blocks: Sequence[Block]) -> None:
        """Add a reference to each block, so that no request gets it. Mutates the pool.

        The connector calls it only while a request holds these blocks; none is null.
        """

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        """Drop a reference to each block; those without any are free, the first to be reused first.

        Mutates the pool. The connector drops only references that it has added.
        """

    def get_num_free_blocks(self) -> int:
        """Return the number of blocks that nobody holds."""

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Take blocks out of the prefix cache; whoever holds them keeps them. Mutates the pool."""


class LoraAdapter(Protocol):
    """A LoRA adapter of a request.

    Attributes:
        lora_name: the name that clients use.
        lora_int_id: the engine's number for it.
        lora_path: folder of its files.
        load_inplace: it replaces the weights of an adapter that is loaded.
    """

    @property
    def lora_name(self) -> str: ...
    @property
    def lora_int_id(self) -> int: ...
    @property
    def lora_path(self) -> str: ...
    @property
    def load_inplace(self) -> bool: ...


class PromptItem(Protocol):
    """An image, video or audio clip that stands for tokens of a prompt.

    Attributes:
        offset: position of its first token.
        length: its tokens.
        is_ambiguous: the engine has seen other content under the same identifier.
    """

    @property
    def offset(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def is_ambiguous(self) -> bool: ...

    def name(self) -> str:
        """Return a digest of its content.

        Raises:
            Unnameable: its content is not at hand or not certain.
        """


class Request(Protocol):
    """A request in the engine's scheduler.

    Attributes:
        request_id: unique in this engine while the request is alive.
        num_tokens: tokens of the prompt and of the answer so far.
        num_prompt_tokens: tokens of the prompt.
        num_computed_tokens: tokens whose KV is in the request's blocks, or will be after steps that were
            scheduled before. `SchedulerHalf.orders` expects it without the tokens of its own step.
        num_preemptions: times that its blocks were taken from it.
        prompt_token_ids: the prompt; None if it is not made of token ids alone.
        all_token_ids: prompt and answer so far.
        adapter: its LoRA adapter, if it has one.
        items: images and the like, sorted by offset.
        cache_salt: separates its KV from that of equal prompts with another salt.
        arrives_in_parts: more of the prompt is still to come.
        kv_transfer_params: parameters from the client or router, unchecked.
        trace_headers: W3C trace context of the client, unchecked.
        own_hit: tokens that the engine's prefix cache had at its first admission; None after a preemption.
        is_complete: it ended by itself, so everything it was to compute has been computed. Read when it has
            ended.
        needs_blocks: it waits and has no blocks.
        was_rejected: it was refused before it reached the scheduler, so its prompt is not known here.
        why_no_cache: why it reads no cache, in words; None if it may.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def prompt_token_ids(self) -> Sequence[int] | None: ...
    @property
    def all_token_ids(self) -> Sequence[int]: ...
    @property
    def adapter(self) -> LoraAdapter | None: ...
    @property
    def items(self) -> Sequence[PromptItem]: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def arrives_in_parts(self) -> bool: ...
    @property
    def kv_transfer_params(self) -> Any: ...
    @property
    def trace_headers(self) -> Mapping[str, str]: ...
    @property
    def own_hit(self) -> int | None: ...
    @property
    def is_complete(self) -> bool: ...
    @property
    def needs_blocks(self) -> bool: ...
    @property
    def was_rejected(self) -> bool: ...
    @property
    def why_no_cache(self) -> str | None: ...

    def trim_prompt(self) -> bool:
        """Drop the last prompt token, and answer with one token only. Mutates the engine's request.

        Returns:
            Whether it was done. The request stays as it was if it cannot do without that token.
        """


class RequestBlocks(Protocol):
    """The blocks that the engine has given to a request.

    Attributes:
        blocks: by position, per group.
    """

    @property
    def blocks(self) -> Sequence[Sequence[Block]]: ...

    def get_block_ids(self) -> BlockIds:
        """Return their ids."""


class Step(Protocol):
    """A step that the engine has scheduled.

    Attributes:
        tokens: tokens that it computes, by request.
        snapshots: (group, block id, tokens) of recurrent states that it leaves behind, by request.
    """

    @property
    def tokens(self) -> Mapping[str, int]: ...
    @property
    def snapshots(self) -> Mapping[str, Iterable[tuple[int, int, int]]]: ...

    def block_ids(self, request_id: str) -> BlockIds:
        """Return the block tables of a request that the step computes, with the blocks that it writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """A KV cache group, as the scheduler sees it: layers that share one block table per request.

    Attributes:
        kind: what a continuation needs of it.
        attention_span: window or chunk in tokens; 0 for other kinds.
        block_tokens: tokens of a block.
        state_block_tokens: tokens per entry of a state group's table, which has snapshots by position; 0 if
            its only entry is the running state, and for other kinds.
        snapshot_tokens: smallest distance of a state group's snapshots, 0 if it announces none; None for
            other kinds.
    """

    kind: GroupKind
    attention_span: int
    block_tokens: int
    state_block_tokens: int = 0
    snapshot_tokens: int | None = None

    def table(self, block_ids: Sequence[int], tokens: int) -> list[int]:
        """Return the table to move of a request: of a state group, only the snapshot after `tokens` tokens.

        >>> state = CacheGroup(kind=GroupKind.STATE, attention_span=0, block_tokens=16, state_block_tokens=16)
        >>> state.table([7, 8, 9], 32), state.table([7, 8, 9], 33)
        ([8], [9])
        """
        if self.kind is not GroupKind.STATE:
            return list(block_ids)
        return [block_ids[(tokens - 1) // self.state_block_tokens if self.state_block_tokens else 0]]


def _no_sample(request_id: str) -> None:
    """Return None: the engine does not split a request into samples."""
    del request_id


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Facts of an engine that the connector decides by. Defaults fit an engine without that feature.

    Attributes:
        engine_id: its name.
        groups: its KV cache groups.
        num_blocks: blocks of its pool.
        longest_request: most tokens of a request.
        steps_in_flight: most steps that are scheduled and not done.
        tokens_in_flight: most tokens of a request that such steps compute.
        step_tokens: most tokens of a request that one step computes, drafts included.
        draft_lookahead: tokens beyond a position that a draft model reads to compute that position.
        speculates: answers are drafted.
        names_prompts_only: generated tokens have other KV than the same tokens in a prompt.
        has_rings: layers keep a ring per request, which is right at one position only.
        port_offset: added to the configured port of the control channel, where several engines share it.
        parent_of: returns the id that samples of one prompt share; None for a request that is no sample.
    """

    engine_id: str
    groups: tuple[CacheGroup, ...]
    num_blocks: int
    longest_request: int
    steps_in_flight: int
    tokens_in_flight: int
    step_tokens: int
    draft_lookahead: int = 0
    speculates: bool = False
    names_prompts_only: bool = False
    has_rings: bool = False
    port_offset: int = 0
    parent_of: Callable[[str], str | None] = _no_sample

    @property
    def has_state(self) -> bool:
        """Whether some layers keep recurrent state."""
        return any(group.kind is GroupKind.STATE for group in self.groups)

    def tables(self, block_ids: BlockIds, tokens: int) -> BlockIds:
        """Return the tables to move of a request that has `tokens` tokens; see `CacheGroup.table`."""
        return tuple(group.table(ids, tokens) for group, ids in zip(self.groups, block_ids, strict=True))
