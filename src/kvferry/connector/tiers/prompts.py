"""What requests are to the tiers: their chunk keys, and the positions at which they leave snapshots."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Sized
from dataclasses import dataclass
from math import lcm

from kvferry.cache.prompt_chunks import ChunkBeginnings, PromptChunks
from kvferry.common.errors import NotYetNamed, Unnameable
from kvferry.common.text import shown
from kvferry.common.units import counted, format_bytes
from kvferry.connector.content import Adapters, keys_of
from kvferry.connector.engine import EngineFacts, Request, Step
from kvferry.connector.events import EventStream, SnapshotsPlaced
from kvferry.connector.tiers.milestones import Milestones
from kvferry.geometry.canonical import CanonicalForm
from kvferry.planning.retention import (
    bytes_of_snapshots,
    first_snapshot,
    snapshot_interval_of,
    snapshot_positions,
)

logger = logging.getLogger(__name__)


class Prompts:
    """The chunk keys of all requests whose KV may be stored in the tiers or loaded from them.

    A request has no keys if its content cannot be identified for certain (for example, embeddings as prompt).
    Its KV is neither stored nor looked up.
    """

    def __init__(
        self,
        canonical: CanonicalForm,
        adapters: Adapters,
        beginnings: ChunkBeginnings | None = None,
        *,
        prompts_only: bool = False,
    ) -> None:
        """Begin without requests.

        Args:
            beginnings: the tiers' chunks by their beginnings; None if prefixes end with chunks only.
            prompts_only: True to compute no keys for generated tokens, because their KV differs from the KV
                of equal tokens in a prompt.
        """
        self._canonical, self._adapters, self._prompts_only = canonical, adapters, prompts_only
        self._beginnings = beginnings
        self._known: dict[str, PromptChunks] = {}
        self._unnamed: dict[str, Unnameable] = {}
        self._epoch, self._suspended = "", ""
        self._salt_of: dict[str, str] = {}  # cache salt of each known request
        self._salt_epochs: dict[str, str] = {}  # random text before each forgotten salt

    def add(self, request: Request) -> PromptChunks | None:
        """Compute the chunk keys of a new request and return its chunks; None if it has none, or none yet.

        `why_unnamed` then returns the reason.
        """
        self._unnamed.pop(request.request_id, None)
        try:
            chunks = self.chunks_of(request)
        except Unnameable as error:
            logger.debug("request %s: not cached: %s", shown(request.request_id), error)
            self._unnamed[request.request_id] = error
            return None
        self._salt_of[request.request_id] = request.cache_salt or ""
        self._known[request.request_id] = chunks
        return chunks

    def get(self, request: Request) -> PromptChunks | None:
        """Return the chunks of a request's tokens so far, prompt and generated; None if it has no keys."""
        name = request.request_id
        if self._prompts_only and request.num_tokens > request.num_prompt_tokens:
            self.remove(name)
        if self.are_pending(name):
            self.add(request)
        if (chunks := self._known.get(name)) is None:
            return None
        try:
            # Blocks that the request has computed since the LoRA was replaced hold other KV than their keys
            # say.
            if not self._adapters.is_current(request.adapter):
                raise Unnameable("its LoRA was replaced in place since it came in")
            if any(one.is_ambiguous for one in request.items):
                raise Unnameable("an identifier of its items has stood for another")
            known = len(chunks.keys)
            if known < request.num_tokens:
                chunks.keys.extend(request.all_token_ids[known : request.num_tokens])
        except Unnameable as error:
            self.remove(name)
            self._unnamed[name] = error
            return None
        return chunks

    def are_pending(self, request_id: str) -> bool:
        """Return True while the digest of a request's LoRA adapter is computed: its keys may become known."""
        return isinstance(self._unnamed.get(request_id), NotYetNamed)

    def why_unnamed(self, request_id: str) -> str:
        return str(self._unnamed.get(request_id, self._suspended or "the cache was reset since it came in"))

    def remove(self, request_id: str) -> None:
        self._known.pop(request_id, None)
        self._salt_of.pop(request_id, None)
        self._unnamed.pop(request_id, None)

    def start_anew(self) -> None:
        """Give all content new chunk keys from now on, because the engine's cache was reset. Ends `suspend`.

        KV of running requests is no longer stored or looked up.
        """
        # The number is random, so that other engines with a shared tier do not find chunks from after the
        # reset, nor this engine those from before. Running requests get no keys: their blocks mix KV from
        # before and after.
        self.suspend("")  # for no reason: keys are computed
        self._epoch = f"{secrets.token_hex(16)} "

    def suspend(self, why: str) -> None:
        """Drop the chunk keys of all requests, and compute none until `start_anew`, for this reason."""
        self._known.clear()
        self._salt_of.clear()
        self._unnamed.clear()
        self._suspended = why

    def forget_salt(self, salt: str) -> None:
        """Give content under a cache salt new chunk keys from now on, so that its chunks are not found again.

        KV of running requests with the salt is no longer stored or looked up. The salt is empty for requests
        without one.
        """
        self._salt_epochs[salt] = f"{secrets.token_hex(16)} "
        for name in [name for name, one in self._salt_of.items() if one == salt]:
            self.remove(name)

    def chunks_of(self, request: Request) -> PromptChunks:
        """Return the chunks of a prompt, without remembering it. Raise Unnameable if it has no keys."""
        if self._suspended:
            raise Unnameable(self._suspended)
        epoch = self._epoch + self._salt_epochs.get(request.cache_salt or "", "")
        tokens = list(request.all_token_ids)
        keys = keys_of(request, tokens, self._canonical.chunk_tokens, self._adapters, epoch)
        return PromptChunks(self._canonical.groups, keys, self._beginnings)


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
