"""Validate peers' transport metadata. It is loaded only after a child process has loaded it without a crash.

    asked ─checked, tried in the child─▶ passed | refused (with the reason)

One thread per worker does this for all lanes, so no lane has to wait. The digests of metadata that passed are
remembered. A refusal is soon forgotten, because the peer may only have been unreachable.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from kvferry.common.errors import ProtocolError
from kvferry.common.threads import Thread
from kvferry.transport.metadata import MemoryCard, check_metadata
from kvferry.transport.metadata_sandbox import MetadataSandbox, encode_trial

logger = logging.getLogger(__name__)

# Timeout in seconds for trying the metadata of all ranks of a peer in the child process.
TRY_SECONDS = 10.0

# Seconds for which a refusal is remembered, so that all lanes get the same result.
REFUSED_SECONDS = 1.0

MAX_PASSED = 65_536

# Maximum number of trials in one child process: peers keep a connection for each until the child ends.
MAX_TRIALS = 64


class MetadataValidator:
    """A thread that parses transport metadata, and has a child process load it (`MetadataSandbox`)."""

    def __init__(
        self,
        start: Callable[[], MetadataSandbox],
        clock: Callable[[], float] = time.monotonic,
        try_seconds: float = TRY_SECONDS,
        max_passed: int = MAX_PASSED,
    ) -> None:
        """Start the thread. The child process starts with the first validation, or with `warm_up`.

        `try_seconds` is the timeout for all ranks of a peer. At most `max_passed` digests are remembered.
        """
        self._start, self._clock = start, clock
        self._try_seconds, self._max_passed = try_seconds, max_passed
        self._sandbox: MetadataSandbox | None = None
        self._trials = 0
        self._passed: dict[bytes, None] = {}
        self._refused: dict[bytes, tuple[str, float]] = {}
        # Ranks of a peer (none to start the child), and why they are refused, to be set.
        self._requests: queue.SimpleQueue[tuple[tuple[MemoryCard, ...], Future[str]] | None]
        self._requests = queue.SimpleQueue()
        self._thread = Thread(self._run, "kvferry-validator")
        self._thread.start()

    def validate(self, cards: Sequence[MemoryCard]) -> Future[str]:
        """Start to validate all ranks of a peer. The result is why it is refused; empty if it has passed."""
        refusal: Future[str] = Future()
        self._requests.put((tuple(cards), refusal))
        return refusal

    def warm_up(self) -> None:
        """Start the child process, so that the first peer does not wait for it."""
        self.validate(())

    def close(self, patience_seconds: float = 2.0) -> None:
        """End the child process and the thread. If the child is busy for longer, both end later."""
        self._requests.put(None)
        self._thread.join(patience_seconds)

    # -- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            cards, refusal = request
            try:
                reason = self._validate_cards(cards)
            except Exception as error:
                logger.exception("transport metadata")
                reason = f"its transport metadata cannot be tried: {error}"
            refusal.set_result(reason)
        if self._sandbox is not None:
            self._sandbox.kill()

    def _validate_cards(self, cards: Sequence[MemoryCard]) -> str:
        try:
            for card in cards:
                check_metadata(card)
        except ProtocolError as error:
            return str(error)
        # Before waiting: a new child may take longer to start than a refusal is remembered.
        for card in cards:
            if reason := self._remembered_refusal(_digest(card)):
                return reason
        if reason := self._ensure_ready():
            return reason
        deadline = self._clock() + self._try_seconds
        return next(filter(None, (self._validate_card(card, deadline) for card in cards)), "")

    def _validate_card(self, card: MemoryCard, deadline: float) -> str:
        """Try a worker's metadata in the child, unless the result is remembered; return why it is refused."""
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
        now = self._clock()
        self._refused = {key: refused for key, refused in self._refused.items() if now < refused[1]}
        return self._refused[digest][0] if digest in self._refused else ""

    def _run_trial(self, card: MemoryCard, seconds: float) -> str:
        assert self._sandbox is not None  # noqa: S101 - it is ready
        reason = self._sandbox.run_trial(card, seconds)
        self._trials += 1
        # A child that has failed may be damaged.
        if reason or self._trials == MAX_TRIALS:
            self._replace()
        return reason

    def _ensure_ready(self) -> str:
        if self._sandbox is None:
            self._replace()
        if self._sandbox is None:
            return "the process that tries transport metadata cannot be started; see the log of this engine"
        if reason := self._sandbox.wait_ready():
            self._replace()
        return reason

    def _replace(self) -> None:
        if self._sandbox is not None:
            self._sandbox.kill()
            self._sandbox = None
        try:  # at once, so that the next peer does not wait until it has started
            self._sandbox, self._trials = self._start(), 0
        except OSError as error:
            logger.warning(
                "the process that tries peers' transport metadata cannot be started (%s), so no peer is read "
                "from; raise the limit of processes (ulimit -u, the container's pids) or of memory",
                error,
            )


def _digest(card: MemoryCard) -> bytes:
    # Only what the child tries: a peer may change the rest of its card without a new trial.
    return hashlib.blake2b(encode_trial(card), digest_size=32).digest()
