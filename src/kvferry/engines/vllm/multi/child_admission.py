"""Choice of the child connector that loads a request.

For each request, all children state how many tokens they can load, and one of them is chosen. If its load
fails, another child may load. Requests go through the same phases as in kvferry's own admission
(`connector.choosing`).

A synchronous load runs in the step that uses the blocks, and the child does not report its end. The request
waits for nothing, so its phase is SERVED as soon as it is admitted.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from kvferry.connector.bids import Bid, PlaceTokens
from kvferry.connector.blocks import Headroom
from kvferry.connector.choosing import BidChooser, LocalPrefix, RequestPhase, RequestState
from kvferry.connector.engine import PrefixCache
from kvferry.engines.vllm.compat.requests import VLLMRequest
from kvferry.engines.vllm.multi.completions import LateLoad, LateLoads
from kvferry.engines.vllm.multi.stats import Counts


@dataclass(slots=True)
class _Load:
    """Load that a child has started for a request."""

    bid: Bid  # what the child loads; its source is the child's name
    child_index: int
    asynchronous: bool
    blocks: Any  # vLLM's KVCacheBlocks of the request
    began: float  # in seconds on the admission's clock
    held_blocks: int  # number that it may write; 0 if the child ends its loads by itself
    invalid: bool = False  # the child has reported that it could not load some of the blocks
    late: bool = False  # the request goes on without it


@dataclass(slots=True, kw_only=True)
class _RequestState(RequestState):
    """State of one request.

    Attributes:
        answers: what each child said when it was last asked: the tokens that it offers, None if it was still
            looking for KV, and whether it would load them asynchronously.
        asynchronous: True if the child of the proposed bid loads asynchronously.
        load: load in flight. A synchronous load stays until its request ends or is asked for again.
    """

    answers: list[tuple[int | None, bool]] = field(default_factory=list)
    asynchronous: bool = False
    load: _Load | None = None


class ChildAdmission:
    """Chooses the child that loads the KV of each request. Only the engine's thread may use it.

    `FerryMultiConnector` sets `headroom` and `prefix_cache`, and starts `late`, when vLLM has its block pool.

    Attributes:
        late: loads that children have not ended in time.
        prefix_cache: vLLM's prefix cache, if it shares attention blocks where it lacks recurrent state.
        headroom: blocks to keep free for requests that wait for loads.
    """

    def __init__(
        self,
        names: Sequence[str],
        children: Sequence[Any],
        chooser: BidChooser,
        attempts: int,
        clock: Callable[[], float] = time.monotonic,
        awaited: Callable[[Any, str], Bid | None] = lambda *_: None,
        deadlines: Mapping[str, float] | None = None,
        workers: int = 1,
    ) -> None:
        """Store the children and the policy that chooses between them.

        Args:
            names, children: names and scheduler instances of the children, in the same order.
            awaited: returns an upper bound of the KV that a child still looks for; None if it is unknown.
            deadlines: longest time of a load in seconds, by name of each child that does not end its loads by
                itself.
        """
        self._deadlines = dict(deadlines or {})
        self.late = LateLoads(workers, max(self._deadlines.values(), default=0.0))
        self.counts, self.headroom = Counts(), Headroom()
        self.prefix_cache: PrefixCache | None = None
        self._names, self._children = tuple(names), tuple(children)
        self._chooser, self._attempts, self._clock, self._awaited = chooser, attempts, clock, awaited
        self._states: dict[str, _RequestState] = {}
        # Requests whose loads have succeeded, until the engine computes tokens of them.
        self._loaded: dict[str, _RequestState] = {}
        self._loads: dict[str, _Load] = {}
        self._new: dict[str, int] = {}

    def __len__(self) -> int:
        """Return the number of tracked requests plus the number of asynchronous loads in flight."""
        return len(self._states) + len(self._loads)

    def matched(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Choose a child. Return (tokens to load after the first `local_tokens`, True if asynchronously).

        The number of tokens is None if vLLM must ask again later.
        """
        name = request.request_id
        if (state := self._states.get(name)) is None:
            state = self._states[name] = _RequestState(attempts=self._attempts)
        state.answers = [child.get_num_new_matched_tokens(request, local_tokens) for child in self._children]
        for child_index, child_name in enumerate(self._names):
            # Late loads of the child already hold as many blocks as it may hold.
            if not self.late.has_room(child_name, {}):
                state.answers[child_index] = 0, False
        # A synchronous load has ended if vLLM asks again. Its child does not report that.
        if state.phase is RequestPhase.SERVED:
            self._settle(state)
        phase = state.begin_admission()
        if phase is RequestPhase.FAILED:
            return None, False  # other requests go first
        if phase is RequestPhase.LOADING or (phase is RequestPhase.RETRYING and state.proposed is not None):
            return 0, False
        prefix, now = LocalPrefix.of(self.prefix_cache, VLLMRequest(request), local_tokens), self._clock()
        choice = self._chooser.choose(
            state,
            [(bid.source, bid) for bid in self._bids(request, local_tokens, state.answers)],
            request.num_tokens - local_tokens,
            request.num_tokens - prefix.resumable_tokens,
            now,
        )
        state.end_wait(choice.unanswered, self._chooser.speeds, now)
        bid, crowded = choice.bid, False
        if bid is not None and not bid.looking:
            state.asynchronous = state.answers[self._names.index(bid.source)][1]
            crowded = state.asynchronous and not self._has_room(bid, request, local_tokens)
        tokens = state.propose(
            bid, local_tokens, now, crowded=crowded, patience_seconds=self._chooser.patience_seconds
        )
        return tokens, state.asynchronous and bool(tokens)

    def _bids(self, request: Any, local_tokens: int, answers: Sequence[tuple[int | None, bool]]) -> list[Bid]:
        return [
            self._bid_of_looking(child_index, request, local_tokens)
            if tokens is None
            else Bid(self._names[child_index], (PlaceTokens(self._names[child_index], tokens),))
            for child_index, (tokens, _) in enumerate(answers)
        ]

    def _bid_of_looking(self, child_index: int, request: Any, local_tokens: int) -> Bid:
        # Without further knowledge, it may find every missing token but the last, which is always computed.
        name, most = self._names[child_index], request.num_tokens - local_tokens - 1
        known = self._awaited(self._children[child_index], request.request_id)
        if known is None:
            return Bid(name, (PlaceTokens(name, most),), looking=True)
        tokens = min(known.tokens, most)
        return Bid(
            name, (PlaceTokens(name, tokens),), looking=True, promised=known.promised, growing=known.growing
        )

    def _has_room(self, bid: Bid, request: Any, local_tokens: int) -> bool:
        """Return True if an asynchronous load may start without taking blocks that waiting requests need."""
        held = Counter[str]()
        for load in self._loads.values():
            if not load.late:
                held[load.bid.source] += load.held_blocks
        total = local_tokens + bid.tokens
        return self.headroom.fits(request.request_id, total, request.num_tokens) and (
            # Loads that may never end must leave enough blocks for requests without them, too.
            bid.source not in self._deadlines or self.late.has_room(bid.source, held)
        )

    def chosen(self, request_id: str) -> int | None:
        """Return the index of the child chosen to load a request."""
        state = self._states.get(request_id)
        if state is None:
            return None
        if state.proposed is not None:
            return self._names.index(state.proposed.source)
        return None if state.load is None else state.load.child_index

    def allocated(self, request: Any, blocks: Any, load_tokens: int) -> int | None:
        """Tell all children that vLLM has allocated blocks for a request, and start its load.

        Return the index of the chosen child if it loads synchronously, in the coming step; else None.
        """
        state = self._states.get(request.request_id)
        loader = None
        if state is not None and state.phase in {RequestPhase.OPEN, RequestPhase.RETRYING}:
            loader = self._admit(request, state, blocks, load_tokens)
        for child_index, child in enumerate(self._children):
            # As in vLLM's MultiConnector, children that load 0 tokens drop what they keep for the request.
            child.update_state_after_alloc(request, blocks, load_tokens if child_index == loader else 0)
        return None if state is None or state.phase is RequestPhase.LOADING else loader

    def _admit(self, request: Any, state: _RequestState, blocks: Any, load_tokens: int) -> int | None:
        now = self._clock()
        bid = state.admit(load_tokens, self._chooser.speeds, now, waits=state.asynchronous)
        answers = zip(self._names, [tokens for tokens, _ in state.answers], strict=True)
        self.counts.admitted(answers, None if bid is None else bid.source, load_tokens)
        if bid is None:
            state.load = None
            return None
        child_index, asynchronous = self._names.index(bid.source), state.asynchronous
        timed = asynchronous and bid.source in self._deadlines
        # Block 0 is the null block, which no load writes.
        held_blocks = sum(map(bool, chain(*blocks.get_block_ids()))) if timed else 0
        state.load = _Load(bid, child_index, asynchronous, blocks, now, held_blocks)
        if asynchronous:
            self.headroom.on_load_begun(
                request.request_id, state.local_tokens + load_tokens, request.num_tokens
            )
            self._loads[request.request_id] = state.load
            self._new[request.request_id] = child_index
            self.counts.pending[bid.source] += 1
        return child_index

    def scheduled(self, requests: AbstractSet[str]) -> None:
        """Record which requests the engine's coming step computes. They no longer wait for loads."""
        self.headroom.on_resumed(requests)
        for name in self._loaded.keys() & requests:
            self._loaded.pop(name).on_computed()

    def take_new(self) -> dict[str, int]:
        """Return the child of each asynchronous load that has started since the last call, by request id."""
        new, self._new = self._new, {}
        return new

    def take_late(self) -> dict[str, LateLoad]:
        """Give up loads that are not ended in time, and pin their blocks. Return them by request."""
        now, late = self._clock(), dict[str, LateLoad]()
        for request_id, load in self._loads.items():
            name = load.bid.source
            if not load.late and now - load.began > self._deadlines.get(name, math.inf):
                load.late = True
                late[request_id] = self.late.hold(name, request_id, load.blocks.blocks)
        return late

    def take_results(self, received: set[str], failed: set[str], invalid: set[int]) -> None:
        """Record the loads that have ended, and exclude a child whose load has failed for the same request.

        `failed` are requests among `received`. `invalid` are ids of blocks that could not be loaded.
        """
        for state in self._states.values() if invalid else ():
            load = state.load
            # Reports of synchronous loads name blocks, not requests.
            if load is not None and any(invalid.intersection(ids) for ids in load.blocks.get_block_ids()):
                load.invalid = True
                state.excluded.setdefault(load.bid.source, "blocks of its load failed")
        for request_id in received:
            load = self._loads.pop(request_id, None)
            if load is None:
                continue
            name, succeeded = load.bid.source, request_id not in failed and not load.invalid
            self.counts.pending[name] -= 1
            self.counts.ended(name, succeeded=succeeded, late=load.late and not succeeded)
            # Only a whole load tells how fast the child is.
            if succeeded:
                self._chooser.speeds.record_load(load.bid.parts, self._clock() - load.began)
            found = self._states.get(request_id)
            if found is not None and found.load is load:
                if succeeded:
                    found.load = None
                    found.on_loaded()
                    self._loaded[request_id] = found
                else:
                    why = "its load did not end in time" if load.late else "its load failed"
                    found.excluded.setdefault(name, why)
                    found.on_failed()
                    self.headroom.forget(request_id)

    def finished(self, request_id: str) -> None:
        """Forget a request that has ended, and count the end of its synchronous load, if any."""
        self.headroom.forget(request_id)
        self._loaded.pop(request_id, None)
        state = self._states.pop(request_id, None)
        if state is not None:
            self._settle(state)

    def _settle(self, state: _RequestState) -> None:
        """Clear a request's load. If it is synchronous, count its end as succeeded or failed."""
        load, state.load = state.load, None
        if load is not None and not load.asynchronous:
            self.counts.ended(load.bid.source, succeeded=not load.invalid)
            if not load.invalid:
                state.on_loaded()
                state.on_computed()  # the step that loaded has also computed tokens
