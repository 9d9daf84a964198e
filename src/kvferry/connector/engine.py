"""The protocols that an engine must implement for the connector, and the calls that it must make.

An engine package wraps its own objects so that they implement these protocols. The connector uses all of them
only in the thread of the engine's scheduler. Attributes of requests are live: the connector reads them again
whenever it is called.

**Admission of a request.** `half` is the `SchedulerHalf`:

    half.on_new_request(request)
    tokens = half.admission.matched(request, local_tokens)    None: run a step, then ask again
    (blocks for all tokens up to local_tokens + tokens)
    half.admission.allocated(request, blocks, tokens)
    tokens > 0: run steps without the request until `WorkerHalf.ended` names it in `received`
        also in `failed`: free its blocks, and ask `matched` again

After `matched`, an engine with recurrent state calls `half.place_snapshots(request, local_tokens + tokens)`.
If `matched` returns 0, an engine with a `PrefixCache` takes the prefix of `PrefixCache.resumable_tokens`.
A load fills the blocks from position `local_tokens` on. A group with a window needs blocks only from
`planning.select.first_attended` of the next computed token on, and has null blocks before. The engine always
computes the last token, so after a load of all tokens it counts one token fewer as loaded.

**A step.** The engine must also run steps without requests while a load, a store or a lease is under way.
`worker` is the `WorkerHalf` of each rank:

    orders = half.orders(step)            before the step's tokens count as computed
    worker.raise_words(orders)            before the step writes to the cache, or zeroes blocks
    worker.begin(orders)
    (the forward pass)
    worker.save(orders, mark)             `mark` records an event on the GPU, after the forward pass
    ended = worker.ended()
    half.take_reports(worker.take_reports())     unless it is None
    half.sent(ended.sent)                 the blocks of these requests, kept since `finished`, can be freed
    half.step_done()

**The end of a request.** Set `Request.is_complete` and call `half.finished`. Free the blocks, unless it
returns that they are kept. The connector holds references to blocks that are still read or written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from kvferry.geometry import GroupKind

# Block table of a request for each KV cache group: block ids by block position.
BlockIds: TypeAlias = tuple[list[int], ...]


class Block(Protocol):
    """A block of the engine's pool. The null block stands for a position without a block."""

    @property
    def block_id(self) -> int: ...
    @property
    def is_null(self) -> bool: ...
    @property
    def block_hash(self) -> object | None: ...  # its key in the engine's prefix cache; None if not cached


class BlockPool(Protocol):
    """The engine's pool of KV blocks. Block 0 of `blocks` is the null block, which is never allocated."""

    @property
    def blocks(self) -> Sequence[Block]: ...

    def touch(self, blocks: Sequence[Block]) -> None:
        """Add a reference to each block. All are held by a request, and none is the null block."""

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        """Drop a reference that `touch` has added to each block. Free blocks are reused in this order."""

    def get_num_free_blocks(self) -> int: ...

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Remove blocks from the prefix cache, but not from the requests that hold them."""


class PrefixCache(Protocol):
    """The prefix cache of an engine that shares attention blocks even where it lacks recurrent state.

    Such an engine passes to `Admission.matched` the tokens that its layers with full attention have.
    """

    def resumable_tokens(self, request: Request) -> int:
        """Return the number of a request's tokens after which all groups can continue without a load."""

    def shorten(self, request: Request, tokens: int) -> None:
        """Make the engine find at most `tokens` tokens of a request at its next look-up.

        Evict the block of full attention that follows these tokens, a multiple of such layers' block size.
        """


class LoraAdapter(Protocol):
    """A LoRA adapter of a request."""

    @property
    def lora_name(self) -> str: ...
    @property
    def lora_int_id(self) -> int: ...
    @property
    def lora_path(self) -> str: ...  # the directory with its files
    @property
    def load_inplace(self) -> bool: ...  # it replaces the weights of an adapter that is loaded


class PromptItem(Protocol):
    """An image, video or audio clip that stands for `length` tokens of a prompt from `offset` on."""

    @property
    def offset(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def is_ambiguous(self) -> bool: ...  # the engine has seen different content under its identifier

    def name(self) -> str:
        """Return a digest of the content. Raise Unnameable if it is unavailable or `is_ambiguous`."""


class Request(Protocol):
    """A request in the engine's scheduler.

    Attributes:
        num_tokens, all_token_ids: of the prompt and of the answer so far.
        num_computed_tokens: number of tokens whose KV will be in the request's blocks when all steps
            scheduled so far are done. During `SchedulerHalf.orders` this number does not include the tokens
            of the coming step.
        prompt_token_ids: None if the prompt contains embeddings.
        items: sorted by offset.
        cache_salt: only requests with the same salt share KV; None without a salt.
        arrives_in_parts: True if later parts of the prompt are still to arrive.
        kv_transfer_params, trace_headers: from the client or router, unchecked.
        hints: what the client or router says about the later use of the KV, unchecked; None without hints.
        session_id: name of the conversation or agent session that the request is part of, unchecked; None
            without a session.
        own_hit: number of the request's tokens that the engine's prefix cache had when the request was first
            admitted; None after a preemption.
        cached_tokens: number of prompt tokens that the engine's answer reports as cached: those that its
            prefix cache and loads brought at the first admission. None once the answer has begun.
        is_complete: True if the request ended normally, so that all its tokens have been computed. Valid once
            it has ended.
        needs_blocks: True if the request waits and has no blocks.
        was_rejected: True if the request was refused before it reached the scheduler, so that its prompt is
            unknown.
        snapshot_at: position in tokens at which the engine will end a step and take a snapshot of recurrent
            state, for other prompts; 0 if there is none.
        cache_refusal: reason why the request must not use cached KV; None if it may.
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
    def hints(self) -> Any: ...
    @property
    def session_id(self) -> Any: ...
    @property
    def trace_headers(self) -> Mapping[str, str]: ...
    @property
    def own_hit(self) -> int | None: ...
    @property
    def cached_tokens(self) -> int | None: ...
    @property
    def is_complete(self) -> bool: ...
    @property
    def needs_blocks(self) -> bool: ...
    @property
    def was_rejected(self) -> bool: ...
    @property
    def snapshot_at(self) -> int: ...
    @property
    def cache_refusal(self) -> str | None: ...

    def report_cached_tokens(self, tokens: int) -> None:
        """Set `cached_tokens`, unless the engine reports none or the answer has begun."""

    def take_snapshot_at(self, tokens: int) -> None:
        """Set `snapshot_at`. An engine that cannot end a step there ignores the call."""

    def trim_prompt(self) -> bool:
        """Drop the last prompt token, which the engine that reads the KV computes, and ask for one token.

        Return False if the request needs the token, and is unchanged.
        """


class Step(Protocol):
    """A step that the engine has scheduled.

    Attributes:
        tokens: number of tokens that the step computes, by request id; `num_tokens` is their sum.
        snapshots: (index of the KV cache group, block id, number of tokens that the state covers) of each
            snapshot of recurrent state that the step writes, by request id.
    """

    @property
    def tokens(self) -> Mapping[str, int]: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def snapshots(self) -> Mapping[str, Iterable[tuple[int, int, int]]]: ...

    def block_ids(self, request_id: str) -> BlockIds:
        """Return the block tables of a request, including the blocks that the step writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """A KV cache group, as the scheduler sees it: layers that share one block table per request.

    Attributes:
        state_block_tokens: number of tokens per entry of the block table, if each entry is a snapshot. 0 if
            the first entry always holds the current state, and for groups without recurrent state.
        snapshot_tokens: smallest distance in tokens between snapshots; 0 if the engine takes none; None for
            groups without recurrent state.
    """

    kind: GroupKind
    attention_span: int  # sliding window or attention chunk in tokens; 0 for other kinds
    block_tokens: int
    state_block_tokens: int = 0
    snapshot_tokens: int | None = None

    def table(self, block_ids: Sequence[int], tokens: int) -> list[int]:
        """Return the part of a request's block table to transfer for its first `tokens` tokens.

        For recurrent state this is the block with the state after these tokens:

        >>> state = CacheGroup(kind=GroupKind.STATE, attention_span=0, block_tokens=16, state_block_tokens=16)
        >>> state.table([7, 8, 9], 32), state.table([7, 8, 9], 33)
        ([8], [9])
        """
        if self.kind is not GroupKind.STATE:
            return list(block_ids)
        return [block_ids[(tokens - 1) // self.state_block_tokens if self.state_block_tokens else 0]]


def _no_sample(request_id: str) -> None:
    del request_id


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Facts about an engine. Default values stand for an engine without the feature.

    Attributes:
        draft_lookahead: number of tokens after a position that a draft model reads to compute the KV of that
            position.
        reuses_prompts_only: True if only the KV of prompts may be stored and offered, because the KV of
            generated tokens differs from that of the same tokens in a prompt.
        has_rings: True if some layers keep a ring buffer per request. Such a buffer can be used only at the
            request's present position, so its KV cannot be stored in tiers.
        writes_before_hooks: True if the engine may write to blocks in a step before it calls
            `WorkerHalf.raise_words`. Other engines then read no prompt that is still computed.
        lockstep: True if other engines wait for each step of this engine. A step then never waits for loads.
        parent_of: takes a request id, and returns the id that all samples of one prompt share, or None if the
            request is not one of several samples.
    """

    engine_id: str
    groups: tuple[CacheGroup, ...]
    num_blocks: int
    longest_request: int  # in tokens
    steps_in_flight: int  # maximum number of steps that are scheduled but not done
    tokens_in_flight: int  # maximum number of tokens of one request in all steps in flight together
    step_tokens: int  # maximum number of tokens of one request in a step, including draft tokens
    draft_lookahead: int = 0
    speculates: bool = False
    reuses_prompts_only: bool = False
    has_rings: bool = False
    writes_before_hooks: bool = False
    lockstep: bool = False
    port_offset: int = 0  # added to configured ports, so that engines with one configuration differ
    parent_of: Callable[[str], str | None] = _no_sample

    @property
    def has_state(self) -> bool:
        return any(group.kind is GroupKind.STATE for group in self.groups)

    def tables(self, block_ids: BlockIds, tokens: int) -> BlockIds:
        return tuple(group.table(ids, tokens) for group, ids in zip(self.groups, block_ids, strict=True))


@dataclass(slots=True, kw_only=True)
class PlainRequest:
    """A `Request` for engines without a class of their own.

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
    hints: Any = None
    session_id: str | None = None
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
        return [*(self.prompt_token_ids or ()), *self.answer_token_ids]

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids or ())

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.answer_token_ids)

    def report_cached_tokens(self, tokens: int) -> None:
        self.cached_tokens = min(tokens, self.num_prompt_tokens)

    def take_snapshot_at(self, tokens: int) -> None:
        self.snapshot_at = tokens

    def trim_prompt(self) -> bool:
        if self.prompt_token_ids is None or len(self.prompt_token_ids) < 2:
            return False
        self.prompt_token_ids = self.prompt_token_ids[:-1]
        return True


@dataclass(slots=True, kw_only=True)
class PlainStep:
    """A `Step` for engines without a class of their own. `tables` are block tables by request id."""

    tokens: Mapping[str, int]
    tables: Mapping[str, BlockIds] = field(default_factory=dict)
    snapshots: Mapping[str, Sequence[tuple[int, int, int]]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens.values())

    def block_ids(self, request_id: str) -> BlockIds:
        return self.tables[request_id]


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive blocks of a prompt in one KV cache group.

    >>> run = BlockRun(0, (b"a", b"b"), parent=None, tokens=(1, 2, 3, 4), block_tokens=2)
    >>> run.part(1, 2)
    BlockRun(group=0, hashes=(b'b',), parent=b'a', tokens=(3, 4), block_tokens=2, adapter=None, extra_keys=())
    """

    group: int  # index of the engine's KV cache group
    hashes: tuple[bytes, ...]  # the engine's; each covers all tokens up to the end of its block
    parent: bytes | None  # hash of the block before the first one; None at the start of a prompt
    tokens: Sequence[int]
    block_tokens: int
    adapter: tuple[int, str] | None = None  # (id, name) of the request's LoRA adapter
    # What the engine hashes with the tokens of each block; empty if there is nothing.
    extra_keys: tuple[tuple[object, ...] | None, ...] = ()

    def part(self, first: int, last: int) -> BlockRun:
        """Return the blocks with indices from `first` to `last`, half-open."""
        size = self.block_tokens
        return BlockRun(
            self.group,
            self.hashes[first:last],
            self.hashes[first - 1] if first else self.parent,
            self.tokens[first * size : last * size],
            size,
            self.adapter,
            self.extra_keys[first:last],
        )

    def parts(self, wanted: Sequence[bool]) -> Iterator[BlockRun]:
        """Yield the wanted blocks as the fewest runs."""
        first = 0
        for at, is_wanted in enumerate([*wanted, False]):
            if not is_wanted:
                if first < at:
                    yield self.part(first, at)
                first = at + 1


# A function of a request, the index of a KV cache group, and a range of the request's tokens. It returns the
# engine's blocks that end in the range, of which the first may begin before it. It returns None if there is
# no such block, or if the engine has no hash of them.
DescribeBlocks: TypeAlias = Callable[[Request, int, range], BlockRun | None]
