"""The positions of running requests at which the engine is to take snapshots of recurrent state.

The engine takes one position of a request at a time (`Request.take_snapshot_at`). When a step that ends at or
beyond it was scheduled, the request gets its next one. The engine may have set a position by itself, where
the request departs from another prompt in its own prefix cache. That position is kept among the others.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from math import lcm

from kvferry.connector.config import ConnectorConfig
from kvferry.connector.engine import EngineFacts, Request, Step
from kvferry.connector.events import SnapshotsPlaced
from kvferry.connector.stream import EventStream
from kvferry.geometry.canonical import CanonicalForm
from kvferry.planning.snapshots import (
    bytes_of_snapshots,
    first_snapshot,
    snapshot_interval_of,
    snapshot_positions,
)
from kvferry.units import counted, format_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SnapshotRule:
    """The positions of snapshots in an engine's prompts, and what they cost.

    Attributes:
        first: first position in tokens; 0 if kvferry places no snapshots.
        usual: first position by default, in tokens; 0 for a model without recurrent state.
        interval: number of tokens of which every position is a multiple.
        state_bytes: size of a snapshot in bytes.
        longest: length of the longest prompt in tokens.
    """

    first: int
    usual: int
    interval: int
    state_bytes: int
    longest: int

    def announce(self, events: EventStream) -> None:
        """Log which snapshots are kept for shared prefixes, and emit an event. Warn if none is kept.

        Does nothing for a model without recurrent state. Logs nothing if all prompts are too short.
        """
        if self.usual:
            if self._most:
                (logger.info if self.first else logger.warning)("tiers: %s", self)
            events.emit(SnapshotsPlaced(self.first, self.state_bytes))

    @property
    def _most(self) -> int:
        """Number of positions in the longest prompt, or the number by default if kvferry places none."""
        return len(snapshot_positions(self.longest, 0, 0, self.first or self.usual, self.interval))

    def __str__(self) -> str:
        """Return the rule, and its cost in bytes, as text for people."""
        first = self.first or self.usual
        count, each = self._most, format_bytes(self.state_bytes)
        cost = (
            f"up to {counted(count, 'more snapshot')} of {each} for a prompt of {self.longest:,} tokens "
            f"({format_bytes(count * self.state_bytes)})"
        )
        if self.first:
            return (
                f"for prompts that share a beginning, snapshots of recurrent state at {first:,} tokens, at "
                f"its doubles, and where prompts depart from each other: {cost}"
            )
        return (
            "first_snapshot_tokens is 0, so a prompt that shares only its beginning with others computes "
            f"nearly all of it again; leave the setting out to keep snapshots at {first:,} tokens and its "
            f"doubles: {cost}"
        )


def snapshot_rule(
    config: ConnectorConfig, engine: EngineFacts, canonical: CanonicalForm, snapshot_tokens: int
) -> SnapshotRule:
    """Return the positions of snapshots in an engine's prompts.

    Args:
        config: the connector's settings.
        engine: properties of the engine.
        canonical: format in which chunks are stored.
        snapshot_tokens: distance in tokens between the positions at which snapshots are stored.
    """
    state_bytes, token_bytes = bytes_of_snapshots(canonical)
    block = lcm(*(group.block_tokens for group in engine.groups))
    interval = snapshot_interval_of(block, snapshot_tokens)
    if not state_bytes:
        return SnapshotRule(0, 0, interval, 0, engine.longest_request)
    first, usual = (
        first_snapshot(requested, interval, state_bytes, token_bytes)
        for requested in (config.first_snapshot_tokens, None)
    )
    return SnapshotRule(first, usual, interval, state_bytes, engine.longest_request)


@dataclass(slots=True)
class _Places:
    """The positions of one request that no step has reached.

    Attributes:
        request: the request.
        left: positions in tokens, ascending.
        given: position that the request was given last; 0 for none.
    """

    request: Request
    left: list[int]
    given: int = 0

    def give_next(self, done: int) -> bool:
        """Give the request its next position. Return False if there is none.

        Args:
            done: number of tokens that will have been computed when all steps scheduled so far have run.
        """
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

    Only the engine's thread calls it.
    """

    def __init__(self, first: int, interval: int) -> None:
        """Create the object. It has no requests yet.

        Args:
            first: first position in tokens, from `planning.snapshots.first_snapshot`; 0 for no positions.
            interval: number of tokens of which every position is a multiple.
        """
        self._first, self._interval = first, interval
        self._places: dict[str, _Places] = {}

    def admit(self, request: Request, start: int, shared: int) -> None:
        """Give a request that is about to be admitted its first position.

        Args:
            request: the request.
            start: position in tokens at which the engine begins to compute.
            shared: length in tokens of the longest prefix whose attention KV the tiers have.
        """
        prompt = request.num_prompt_tokens
        positions = snapshot_positions(prompt, start, shared, self._first, self._interval)
        places = _Places(request, [*positions])
        if positions and places.give_next(start):
            self._places[request.request_id] = places
        else:
            self._places.pop(request.request_id, None)

    def schedule(self, step: Step) -> None:
        """Give requests their next positions, after a step was scheduled that reaches the current ones."""
        for request_id, places in [*self._places.items()]:
            if tokens := step.tokens.get(request_id):
                done = places.request.num_computed_tokens + tokens
                if not places.give_next(done):
                    del self._places[request_id]

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._places.pop(request_id, None)
