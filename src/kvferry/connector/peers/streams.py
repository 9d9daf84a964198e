"""Prompts whose KV other engines read while this engine computes them.

A router may ask a prefill and a decode engine at once, and give both the same ticket. The prefill engine
then publishes the ticket as soon as it has computed the first tokens, and adds further tokens after each
step. Only the blocks of groups that attend to all tokens are added: those of sliding windows and recurrent
state change until the prompt's last token.

    WAITING ─first tokens computed─▶ READABLE ─▶ handed over with its last tokens, like any other prompt
                                        └─preempted, aborted, released, or the cache was reset─▶ OVER

While a prompt is readable, a lease word covers its blocks, but the engine may take them at any time. So when
the lease ends, each worker raises the word before the forward pass of the next step, which is the first that
can write the blocks for another request.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.common.errors import TransferError, Unnameable
from kvferry.connector.content import Adapters, content_of
from kvferry.connector.engine import BlockIds, EngineFacts, Request, Step
from kvferry.connector.peers.offer import ticket_of
from kvferry.planning.select import NULL_BLOCK, attends_to_all
from kvferry.transport.lease import LeaseBook, LeaseWord
from kvferry.transport.redeem import Grant, TicketBook


def steps_readable(engine: EngineFacts) -> int:
    """Return how many prompt tokens a step computes, if their KV is final after the step; else 0."""
    # Without a group that attends to all tokens, nothing is final before the prompt's end.
    final = any(attends_to_all(group.kind) for group in engine.groups)
    # Draft layers may complete their KV later. An engine that writes to blocks before its workers raise lease
    # words could write while a reader still trusts the word.
    unsafe = engine.speculates or engine.writes_before_hooks
    return engine.step_tokens if final and not unsafe else 0


@dataclass(slots=True)
class Stream:
    """A prompt that this engine computes, and whose KV another engine may read meanwhile.

    Attributes:
        ticket: ticket that the router has drawn.
        preemptions: number of the request's preemptions when its last step was scheduled.
        cached_tokens: number of prompt tokens that the engine's caches had; None before the first step.
        word: lease word of the blocks; None before the first tokens were published.
        over: True once the lease has ended.
    """

    request: Request
    ticket: bytes
    preemptions: int = 0
    cached_tokens: int | None = None
    word: LeaseWord | None = None
    over: bool = False


class _Computed(NamedTuple):
    """The tokens of a prompt that will have been computed when a step is done.

    Attributes:
        preemptions: number of the request's preemptions when the step was scheduled.
        tokens: number of computed tokens, from the start of the prompt.
        tables: block table of the request for each KV cache group.
    """

    stream: Stream
    preemptions: int
    tokens: int
    tables: BlockIds


class Streams:
    """The prompts whose KV other engines may read while this engine computes them.

    Only the engine's thread calls it.
    """

    def __init__(self, engine: EngineFacts, book: LeaseBook, tickets: TicketBook, adapters: Adapters) -> None:
        self._engine, self._book, self._adapters = engine, book, adapters
        self._streams: dict[str, Stream] = {}
        self._steps: deque[tuple[int, list[_Computed]]] = deque()
        self._tickets = tickets

    def __len__(self) -> int:
        """Return the number of requests whose prompts are, or will be, read while they are computed."""
        return len(self._streams)

    def __contains__(self, lease: str) -> bool:
        """Return True if `lease` covers blocks that the engine may take: its prompt is not complete."""
        found = self._streams.get(lease)
        return found is not None and found.word is not None and not found.over

    def on_new_request(self, request: Request) -> None:
        """Remember a request if a router has drawn a ticket for its prompt."""
        ticket = ticket_of(request.kv_transfer_params)
        # Samples of a prompt have the same ticket, and only one of them may publish it.
        if ticket is not None and self._engine.parent_of(request.request_id) is None:
            self._streams[request.request_id] = Stream(request, ticket)

    def stop(self) -> None:
        """Stop publishing prompts. Prompts that other engines can already read stay readable."""
        for one in self._streams.values():
            one.over |= one.word is None

    def preempted(self) -> list[str]:
        """Return the leases that must end because the blocks of their requests were taken."""
        return [
            name
            for name, one in self._streams.items()
            if name in self and one.request.num_preemptions != one.preemptions
        ]

    def scheduled(self, number: int, step: Step, block_ids: Callable[[str], BlockIds]) -> None:
        """Remember the tokens that the coming step computes, as `Producer.scheduled` describes it."""
        computed = []
        for name, one in self._streams.items():
            if name in step.tokens and not one.over:
                one.preemptions = one.request.num_preemptions
                one.cached_tokens = one.request.cached_tokens
                tokens = one.request.num_computed_tokens + step.tokens[name]
                computed.append(_Computed(one, one.preemptions, tokens, block_ids(name)))
        if computed:
            self._steps.append((number, computed))

    def step_done(self, number: int) -> list[Request]:
        """Publish the tokens that steps have computed whose output the engine has taken.

        Returns:
            The requests whose prompts have become readable with these steps.
        """
        begun = []
        while self._steps and self._steps[0][0] <= number:
            for one in self._steps.popleft()[1]:
                stream, request = one.stream, one.stream.request
                if self._streams.get(request.request_id) is not stream or stream.over:
                    continue
                # The last tokens are published when the request ends, with windows and state.
                # After a preemption the step's blocks may belong to another request.
                if one.preemptions == request.num_preemptions and one.tokens < request.num_prompt_tokens:
                    before = stream.word
                    self._publish(one)
                    if before is None and stream.word is not None:
                        begun.append(request)
        return begun

    def finished(self, request_id: str) -> Stream | None:
        """Forget a request that has ended. Return its stream; None if it has none."""
        return self._streams.pop(request_id, None)

    def ended(self, lease: str) -> None:
        """Publish nothing more under a lease that has ended. A lease of another kind is ignored."""
        if lease in self:
            self._streams[lease].over = True

    def _publish(self, one: _Computed) -> None:
        stream, request = one.stream, one.stream.request
        tables = [
            ids[: -(-one.tokens // group.block_tokens)] if attends_to_all(group.kind) else ()
            for group, ids in zip(self._engine.groups, one.tables, strict=True)
        ]
        # Null blocks stand for those that another connector fills (`PartBlocks.distrust_all`).
        if any(NULL_BLOCK in ids for ids in tables):
            return
        if stream.word is not None:
            grant = Grant.of(stream.word.slot, stream.word.generation, tables)
            self._tickets.advance(request.request_id, grant, one.tokens)
            return
        if stream.ticket in self._tickets:
            return  # another request was given the same ticket
        try:
            content = content_of(request, request.num_prompt_tokens, self._adapters)
            # It ends with the request, however long the prompt takes.
            stream.word = word = self._book.grant(request.request_id, math.inf)
        except (TransferError, Unnameable):
            return  # tried again after the next step
        self._tickets.publish(
            stream.ticket,
            request.request_id,
            request.num_prompt_tokens,
            content,
            Grant.of(word.slot, word.generation, tables),
            ready=one.tokens,
            cached_tokens=stream.cached_tokens,
        )
