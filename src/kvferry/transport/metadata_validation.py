"""Validate peers' transport metadata. It is loaded only after a child process has loaded it without a crash.

    asked ─checked, tried in the child─▶ PASSED | REFUSED (with the reason)

One thread per worker does this for all lanes (reading threads), so no lane has to wait. The digests of
metadata that passed are remembered. A refusal is soon forgotten, because the peer may only have been
unreachable.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry.errors import ProtocolError
from kvferry.transport.messages import RankCard
from kvferry.transport.metadata import check_metadata
from kvferry.transport.metadata_sandbox import MetadataSandbox, encode_trial

logger = logging.getLogger(__name__)

TRY_SECONDS = 10.0
"""Timeout in seconds for trying the metadata of all ranks of a peer in the child process."""

REFUSED_SECONDS = 1.0
"""Seconds for which a refusal is remembered, so that all lanes get the same result."""

MAX_PASSED = 65_536

MAX_TRIALS = 64
"""Maximum number of trials in one child process.

Peers keep a connection for each trial until the child ends.
"""


@dataclass(slots=True)
class ValidationResult:
    """The result of validating a peer's transport metadata. A background thread fills it in.

    Attributes:
        reason: None until the validation has ended; then the reason why the peer is refused, or an empty
            string if its metadata has passed.
    """

    reason: str | None = None


class MetadataValidator(Protocol):
    """An object that decides whether peers' transport metadata may be loaded."""

    def validate(self, cards: Sequence[RankCard], wake: Callable[[], None]) -> ValidationResult:
        """Start to validate the transport metadata of all ranks of a peer, in another thread.

        Return at once.

        Args:
            cards: descriptions of all ranks of the peer, which contain the metadata.
            wake: function that the other thread calls when the validation has ended.

        Returns:
            Result object. Its attribute `reason` is None until the validation has ended.
        """

    def warm_up(self) -> None:
        """Prepare for the first validation, so that the first peer does not wait for the preparation."""

    def close(self) -> None:
        """Stop validating, and release all resources."""


@dataclass(frozen=True, slots=True)
class _ValidationRequest:
    """A request to the validator's thread: validate a peer's transport metadata.

    Attributes:
        cards: descriptions of all ranks of the peer. If empty, the thread only starts the child process.
        verdict: result object that the thread fills in.
        wake: function that the thread calls when it has filled in the result.
    """

    cards: tuple[RankCard, ...]
    verdict: ValidationResult
    wake: Callable[[], None]


class SandboxValidator:
    """A thread that decides whether peers' transport metadata may be loaded.

    The thread parses the metadata, and has a child process load it first (`MetadataSandbox`).
    """

    def __init__(
        self,
        start: Callable[[], MetadataSandbox],
        clock: Callable[[], float] = time.monotonic,
        try_seconds: float = TRY_SECONDS,
        max_passed: int = MAX_PASSED,
    ) -> None:
        """Start the thread. The child process starts with the first validation, or with `warm_up`.

        Args:
            start: function that starts a child process and returns the object that controls it.
            clock: function that returns the current time in seconds.
            try_seconds: timeout in seconds for trying the metadata of all ranks of a peer.
            max_passed: maximum number of remembered digests of metadata that has passed.
        """
        self._start, self._clock = start, clock
        self._try_seconds, self._max_passed = try_seconds, max_passed
        self._sandbox: MetadataSandbox | None = None
        self._trials = 0
        self._passed: dict[bytes, None] = {}
        self._refused: dict[bytes, tuple[str, float]] = {}
        self._requests: queue.SimpleQueue[_ValidationRequest | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvferry-validator", daemon=True)
        self._thread.start()

    def validate(self, cards: Sequence[RankCard], wake: Callable[[], None]) -> ValidationResult:
        """Start to validate the transport metadata of all ranks of a peer, in a background thread.

        Return at once.

        Args:
            cards: descriptions of all ranks of the peer, which contain the metadata.
            wake: function that the background thread calls when the validation has ended.

        Returns:
            Result object. Its attribute `reason` is None until the validation has ended.
        """
        request = _ValidationRequest(tuple(cards), ValidationResult(), wake)
        self._requests.put(request)
        return request.verdict

    def warm_up(self) -> None:
        """Start the child process now, so that the first peer does not wait until the child has started."""
        self._requests.put(_ValidationRequest((), ValidationResult(), _ignore_result))

    def close(self, patience_seconds: float = 2.0) -> None:
        """End the child process and the thread.

        Wait at most `patience_seconds`. If the child is busy for longer, both end later.
        """
        self._requests.put(None)
        self._thread.join(patience_seconds)

    # -- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                request.verdict.reason = self._validate_cards(request.cards)
            except Exception as error:
                logger.exception("transport metadata")
                request.verdict.reason = f"its transport metadata cannot be tried: {error}"
            request.wake()
        if self._sandbox is not None:
            self._sandbox.kill()

    def _validate_cards(self, cards: Sequence[RankCard]) -> str:
        try:
            for card in cards:
                check_metadata(card)
        except ProtocolError as error:
            return str(error)
        # Before waiting: a new child may take longer to start than a refusal is remembered.
        if reason := next(filter(None, (self._remembered_refusal(_digest(card)) for card in cards)), ""):
            return reason
        if reason := self._ensure_ready():
            return reason
        deadline = self._clock() + self._try_seconds
        return next(filter(None, (self._validate_card(card, deadline) for card in cards)), "")

    def _validate_card(self, card: RankCard, deadline: float) -> str:
        """Test a worker's transport metadata in the child process, unless the result is remembered.

        A positive result is remembered for later peers, a refusal only for `REFUSED_SECONDS`.

        Args:
            card: description of the worker, which contains the metadata.
            deadline: time at which to stop waiting for the child, in seconds of the validator's clock.

        Returns:
            Reason why the worker's metadata is refused; empty if it has passed.
        """
        digest = _digest(card)
        if digest in self._passed:
            return ""
        if reason := self._remembered_refusal(digest):
            return reason
        if reason := self._ensure_ready() or self._run_trial(card, deadline - self._clock()):
            self._refused[digest] = reason, self._clock() + REFUSED_SECONDS
            return reason
        self._passed[digest] = None
        if len(self._passed) > self._max_passed:
            del self._passed[next(iter(self._passed))]
        return ""

    def _remembered_refusal(self, digest: bytes) -> str:
        """Return why metadata was refused in the last `REFUSED_SECONDS`; empty if it was not."""
        now = self._clock()
        self._refused = {key: refused for key, refused in self._refused.items() if now < refused[1]}
        return self._refused[digest][0] if digest in self._refused else ""

    def _run_trial(self, card: RankCard, seconds: float) -> str:
        assert self._sandbox is not None  # noqa: S101 - it is ready
        reason = self._sandbox.run_trial(card, seconds)
        self._trials += 1
        if reason or self._trials == MAX_TRIALS:
            self._replace()
        return reason

    def _ensure_ready(self) -> str:
        """Wait until the child process is ready. Start a child process if there is none.

        If the child does not become ready, replace it with a new one.

        Returns:
            Error message; empty if the child is ready.
        """
        if self._sandbox is None:
            self._replace()
        if self._sandbox is None:
            return "the process that tries transport metadata cannot be started; see the log of this engine"
        if reason := self._sandbox.wait_ready():
            self._replace()
        return reason

    def _replace(self) -> None:
        """Kill the child process, if there is one, and start a new one."""
        if self._sandbox is not None:
            self._sandbox.kill()
            self._sandbox = None
        try:
            self._sandbox, self._trials = self._start(), 0
        except OSError as error:
            logger.warning(
                "the process that tries peers' transport metadata cannot be started (%s), so no peer is read "
                "from; raise the limit of processes (ulimit -u, the container's pids) or of memory",
                error,
            )


def _ignore_result() -> None:
    """Do nothing: `warm_up` passes this as `wake`, because no thread waits for the end of a warm-up."""


def _digest(card: RankCard) -> bytes:
    """Return a digest of those parts of a worker's description that the child process tests.

    These are the transport metadata, the address of the lease words, and the incarnation. The validator
    remembers the results of tests by this digest.
    """
    return hashlib.blake2b(encode_trial(card), digest_size=32).digest()
