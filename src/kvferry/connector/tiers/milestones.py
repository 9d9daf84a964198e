"""Requests that a step must look at, found without a look at each one, and the snapshots that they leave.

A running request has something to do for the tiers only at some positions, its *milestones*: where a chunk is
complete, or where a snapshot is taken. Most steps compute one token for each of hundreds of requests, and
bring none of them to a milestone. So `Milestones` counts how many tokens the steps have computed for any one
request, and keeps the requests by the count at which they may reach their milestones. This is a calendar
queue over tokens instead of time (R. Brown, "Calendar queues", CACM 31(10), 1988).

`SnapshotPlaces` are the milestones at which the engine takes snapshots of recurrent state for other prompts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass
from math import lcm

from kvferry.common.units import counted, format_bytes
from kvferry.connector.engine import EngineFacts, Request, Step
from kvferry.connector.events import EventStream, SnapshotsPlaced
from kvferry.geometry.canonical import CanonicalForm
from kvferry.planning.retention import (
    bytes_of_snapshots,
    first_snapshot,
    snapshot_interval_of,
    snapshot_positions,
)

logger = logging.getLogger(__name__)

_LONGEST = 16
"""Number of tokens up to which a request's tokens of a step are counted for all. A request of which a step
computes more is due in any case: else the count would run far ahead of the requests that decode."""


class Milestones:
    """The running requests by the step in which they may reach their milestones. Not thread-safe.

    Attributes:
        due: requests of the coming step that may reach their milestones in it, by request id.
    """

    def __init__(self) -> None:
        self.due: dict[str, Request] = {}
        # Upper bound of the tokens that all steps so far have computed of any one request. Those of requests
        # that were due anyway are not counted.
        self._count = 0
        self._at: dict[str, int] = {}  # count at which each request is due
        self._requests: dict[int, dict[str, Request]] = {}  # by this count

    def __len__(self) -> int:
        return len(self._at)

    def set(self, request: Request, tokens: int) -> None:
        """Make a request due in the first step that may compute its `tokens`-th token from now on.

        Call this after `count` has counted the coming step. A request is due in the next step at the
        earliest, and in no step while it is not computed.
        """
        self.forget(request.request_id)
        at = self._count + max(tokens, 1)
        self._at[request.request_id] = at
        self._requests.setdefault(at, {})[request.request_id] = request

    def forget(self, request_id: str) -> None:
        self.due.pop(request_id, None)
        if (at := self._at.pop(request_id, None)) is not None:
            requests = self._requests[at]
            del requests[request_id]
            if not requests:
                del self._requests[at]

    def clear(self) -> None:
        self.due.clear()
        self._at.clear()
        self._requests.clear()

    def count(self, step: Step) -> None:
        """Count the tokens of the coming step, and add the requests that it may bring to milestones to `due`.

        A due request must be `set` again. Call this once per step.
        """
        tokens = step.tokens
        if step.num_tokens == len(tokens):
            self._pass(1 if tokens else 0, tokens)
            return
        counts = set(tokens.values())
        short = [count for count in counts if count <= _LONGEST]
        if len(short) < len(counts):
            for request_id in [name for name, count in tokens.items() if count > _LONGEST]:
                if (at := self._at.get(request_id)) is not None:
                    self._take({request_id: self._requests[at][request_id]}, tokens)
        self._pass(max(short, default=0), tokens)

    def _pass(self, most: int, tokens: Mapping[str, int]) -> None:
        """Count `most` tokens, and take all requests that are due by then."""
        first = self._count + 1
        self._count += most
        for at in range(first, self._count + 1):
            if requests := self._requests.get(at):
                self._take(dict(requests), tokens)

    def _take(self, requests: Mapping[str, Request], tokens: Mapping[str, int]) -> None:
        for request_id, request in requests.items():
            self.forget(request_id)
            if request_id in tokens:
                self.due[request_id] = request
            # The engine has not scheduled it, so it has made no progress. A request without blocks is set
            # again when the engine computes it anew.
            elif not request.needs_blocks:
                self.set(request, 1)


@dataclass(frozen=True, slots=True)
class _SnapshotRule:
    """The positions of snapshots in an engine's prompts, and what they cost."""

    first: int  # first position in tokens; 0 if kvferry places no snapshots
    usual: int  # first position by default, in tokens; 0 for a model without recurrent state
    interval: int  # number of tokens of which every position is a multiple
    state_bytes: int
    longest: int  # length of the longest prompt in tokens

    def announce(self, events: EventStream) -> None:
        """Log which snapshots are kept for shared prefixes, and emit an event. Warn if none is kept.

        Does nothing for a model without recurrent state. Logs nothing if all prompts are too short.
        """
        if not self.usual:
            return
        first = self.first or self.usual
        if count := len(snapshot_positions(self.longest, 0, 0, first, self.interval)):
            cost = (
                f"up to {counted(count, 'more snapshot')} of {format_bytes(self.state_bytes)} for a prompt "
                f"of {self.longest:,} tokens ({format_bytes(count * self.state_bytes)})"
            )
            if self.first:
                logger.info(
                    "tiers: for prompts that share a beginning, snapshots of recurrent state at %s tokens, "
                    "at its doubles, and where prompts depart from each other: %s",
                    f"{first:,}", cost,
                )  # fmt: skip
            else:
                logger.warning(
                    "tiers: first_snapshot_tokens is 0, so a prompt that shares only its beginning with "
                    "others computes nearly all of it again; leave the setting out to keep snapshots at %s "
                    "tokens and its doubles: %s",
                    f"{first:,}", cost,
                )  # fmt: skip
        events.emit(SnapshotsPlaced(self.first, self.state_bytes))


def snapshot_rule(
    first_tokens: int | None, engine: EngineFacts, canonical: CanonicalForm, snapshot_tokens: int
) -> _SnapshotRule:
    """Return the positions of snapshots, which are stored at multiples of `snapshot_tokens`.

    `first_tokens` is the setting ``first_snapshot_tokens``.
    """
    state_bytes, token_bytes = bytes_of_snapshots(canonical)
    block = lcm(*(group.block_tokens for group in engine.groups))
    interval = snapshot_interval_of(block, snapshot_tokens)
    if not state_bytes:
        return _SnapshotRule(0, 0, interval, 0, engine.longest_request)
    first, usual = (
        first_snapshot(requested, interval, state_bytes, token_bytes) for requested in (first_tokens, None)
    )
    return _SnapshotRule(first, usual, interval, state_bytes, engine.longest_request)


@dataclass(slots=True)
class _Places:
    """The positions of one request that no step has reached."""

    request: Request
    left: list[int]  # positions in tokens, ascending
    given: int = 0  # position that the request was given last; 0 for none

    def give_next(self, done: int) -> bool:
        """Give the request its next position after `done` tokens. Return False if there is none."""
        own = self.request.snapshot_at
        # The engine has set this position by itself: there the request departs from a prompt in its own
        # prefix cache.
        if own not in (0, self.given, *self.left):
            self.left = sorted((*self.left, own))
        self.left = [at for at in self.left if at > done]
        if not self.left:
            return False
        self.given = self.left[0]
        if own != self.given:
            self.request.take_snapshot_at(self.given)
        return True


class SnapshotPlaces:
    """Has the engine take snapshots of running requests, one position after the other.

    Args:
        first: first position in tokens, from `planning.retention.first_snapshot`; 0 for no positions.
        interval: number of tokens of which every position is a multiple.
    """

    def __init__(self, first: int, interval: int) -> None:
        self._first, self._interval = first, interval
        self._places: dict[str, _Places] = {}
        self._milestones = Milestones()

    @property
    def agenda(self) -> tuple[Sized, ...]:
        """Containers that are all empty if a step needs no call of `schedule`, after `count`."""
        return (self._milestones.due,)

    def admit(self, request: Request, start: int, shared: int) -> None:
        """Give a request that is about to be admitted its first position.

        Args:
            start: position in tokens at which the engine begins to compute.
            shared: length in tokens of the longest prefix whose attention KV the tiers have.
        """
        prompt = request.num_prompt_tokens
        positions = snapshot_positions(prompt, start, shared, self._first, self._interval)
        places = _Places(request, [*positions])
        self.forget(request.request_id)
        if positions and places.give_next(start):
            self._places[request.request_id] = places

    def count(self, step: Step) -> None:
        """Find the requests that the coming step may bring to their positions. Call this once per step."""
        if self._places:
            self._milestones.count(step)

    def schedule(self, step: Step, started: Iterable[str]) -> None:
        """Give requests their next positions, after a step was scheduled that reaches the current ones.

        `started` are the requests of the step that the engine has admitted since their last step.
        """
        due = dict.fromkeys((*self._milestones.due, *started))
        self._milestones.due.clear()
        for request_id in due:
            if (places := self._places.get(request_id)) is None:
                continue
            done = places.request.num_computed_tokens + step.tokens[request_id]
            if places.give_next(done):
                self._milestones.set(places.request, places.given - done)
            else:
                del self._places[request_id]

    def forget(self, request_id: str) -> None:
        self._places.pop(request_id, None)
        self._milestones.forget(request_id)
